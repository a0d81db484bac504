"""Islands that share an epoch lose no sample: killed, joined, ended, without a pool."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lightning_adpsgd.epochs.pool import PoolTimeouts
from tests.faults.sharing import SharingWorld
from tests.faults.world import until

SHARED_TWICE = ("by another super-learner too", "it takes their weights")


@contextmanager
def sharing(folder: Path) -> Iterator[SharingWorld]:
    made = SharingWorld(folder)
    try:
        yield made
    finally:
        made.close()


def seen(islands: SharingWorld, names: str, epoch: int = 0) -> Counter[int]:
    """How often these islands have trained on each row."""
    batches = chain.from_iterable(islands.rows(name, epoch) for name in names.split())
    return Counter(chain.from_iterable(batches))


def twice(rows: Counter[int]) -> set[int]:
    return {row for row, times in rows.items() if times > 1}


def was_told(islands: SharingWorld, names: str) -> bool:
    """Whether one says that batches were trained on twice, as after a long stall."""
    outputs = [islands.output(name) for name in names.split()]
    return any(told in output for told in SHARED_TWICE for output in outputs)


def end_well(islands: SharingWorld, names: str) -> None:
    for name in names.split():
        assert islands.exit_code(name) == 0, islands.output(name)


def has_begun(islands: SharingWorld, name: str, num: int, epoch: int = 0) -> None:
    until(lambda: len(islands.rows(name, epoch)) >= num, f"batches of {name}")


def all_begin(islands: SharingWorld, names: str, **settings: Any) -> None:
    """Starts islands of one epoch, and waits until each has had four batches."""
    for name in names:
        islands.share(name, max_epochs=1, **settings)
    for name in names:
        has_begun(islands, name, 4)


def test_every_row_is_seen_once_in_each_epoch(tmp_path: Path) -> None:
    with sharing(tmp_path) as islands:
        islands.share("a", rows=120, max_epochs=3)
        has_begun(islands, "a", 3)
        islands.share("b", rows=120, max_epochs=3)
        end_well(islands, "a b")
        for epoch in range(3):
            rows = seen(islands, "a b", epoch)
            assert set(rows) == set(range(120))
            assert not twice(rows) or was_told(islands, "a b")


def test_what_one_that_is_killed_had_not_finished_is_trained_on_by_others(
    tmp_path: Path,
) -> None:
    with sharing(tmp_path) as islands:
        all_begin(islands, "abc", rows=600)
        islands.signal("b", signal.SIGKILL)
        end_well(islands, "a c")
        rows = seen(islands, "a b c")
        assert set(rows) == set(range(600))
        of_the_dead = set(chain.from_iterable(islands.rows("b")))
        assert len(of_the_dead) < 600
        assert twice(rows) <= of_the_dead or was_told(islands, "a c")


def test_the_pool_survives_a_restart_of_the_rendezvous(tmp_path: Path) -> None:
    with sharing(tmp_path) as islands:
        all_begin(islands, "ab", rows=500)
        islands.signal("rendezvous", signal.SIGKILL)
        for name in "ab":
            has_begun(islands, name, len(islands.rows(name)) + 15)
        until(
            lambda: "continues with its share" in islands.output("a"), "the share of a"
        )
        islands.start_rendezvous()
        end_well(islands, "a b")
        assert set(seen(islands, "a b")) == set(range(500))


def test_without_a_rendezvous_islands_share_what_is_left(tmp_path: Path) -> None:
    with sharing(tmp_path) as islands:
        all_begin(islands, "ab", rows=300)
        islands.signal("rendezvous", signal.SIGKILL)
        end_well(islands, "a b")
        assert set(seen(islands, "a b")) == set(range(300))


def test_a_rendezvous_that_hangs_does_not_stop_the_training(tmp_path: Path) -> None:
    with sharing(tmp_path) as islands:
        all_begin(islands, "ab", times=PoolTimeouts(), rows=800)
        islands.signal("rendezvous", signal.SIGSTOP)
        for name in "ab":
            has_begun(islands, name, len(islands.rows(name)) + 40)
        islands.signal("rendezvous", signal.SIGCONT)
        end_well(islands, "a b")
        assert set(seen(islands, "a b")) == set(range(800))


def test_one_that_is_told_to_end_gives_back_what_it_holds(tmp_path: Path) -> None:
    with sharing(tmp_path) as islands:
        all_begin(islands, "ab", rows=300)
        islands.signal("b", signal.SIGTERM)
        end_well(islands, "b a")
        rows = seen(islands, "a b")
        assert set(rows) == set(range(300))
        assert not twice(rows) or was_told(islands, "a b")


def test_a_checkpoint_keeps_what_is_left_of_the_epoch(tmp_path: Path) -> None:
    with sharing(tmp_path) as islands:
        islands.share("a", rows=120, max_epochs=2)
        has_begun(islands, "a", 4, epoch=1)
        islands.signal("a", signal.SIGTERM)
        end_well(islands, "a")
        (path,) = tmp_path.glob("preempted-*.ckpt")
        islands.share("b", rows=120, max_epochs=2, ckpt_path=str(path))
        end_well(islands, "b")
        assert not islands.rows("b", 0)
        assert seen(islands, "a b", 1) == Counter(range(120))


@pytest.mark.parametrize("settings", [{"learners": 2}, {"read": 2}], ids=str)
def test_islands_of_two_and_loaders_that_read_ahead_share_alike(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with sharing(tmp_path) as islands:
        for name in "ab":
            islands.share(name, rows=161, max_epochs=2, **settings)
        end_well(islands, "a b")
        for epoch in range(2):
            rows = seen(islands, "a b", epoch)
            assert set(rows) == set(range(161))
            assert not twice(rows) or was_told(islands, "a b")
