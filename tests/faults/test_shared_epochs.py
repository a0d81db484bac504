"""Islands that share an epoch lose no sample: killed, joined, ended, without a pool."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

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
        for name in "abc":
            islands.share(name, rows=600, max_epochs=1)
        for name in "abc":
            has_begun(islands, name, 4)
        islands.signal("b", signal.SIGKILL)
        end_well(islands, "a c")
        rows = seen(islands, "a b c")
        assert set(rows) == set(range(600))
        of_the_dead = set(chain.from_iterable(islands.rows("b")))
        assert len(of_the_dead) < 600
        assert twice(rows) <= of_the_dead or was_told(islands, "a c")
