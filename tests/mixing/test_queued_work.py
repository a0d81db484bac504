"""Work that is queued on a device runs in a certain order; no GPU is needed to know."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Condition, RLock
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.gossip.codecs import _FORMS, _narrower, _scales
from lightning_adpsgd.mixing.lattice_mean import words_for_places
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import ShardGather, SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.weights.replica import Replica
from lightning_adpsgd.weights.streams import Guard, Mark, to_device, to_host
from lightning_adpsgd.weights.streams import host_memory as pinned
from lightning_adpsgd.weights.worker import BackgroundWorker
from tests.helpers import PATIENCE, ThreadTransport
from tests.queued import Books, queued

CPU = torch.device("cpu")


def beside(action: Callable[[], object]) -> None:
    """Acts in a thread with a stream of its own, and waits for the thread alone."""
    worker = BackgroundWorker("side", CPU)
    worker.submit(action).result()
    worker.stop(PATIENCE.total_seconds())


def racing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> Books:
    """What is booked of an action that is expected to race."""
    with pytest.raises(AssertionError), queued(monkeypatch) as books:
        act()
    return books


def test_books_tell_work_that_is_in_order_from_work_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vector = torch.zeros(4)

    def in_order() -> None:
        mark = Mark(CPU)
        vector.add_(1)
        mark.set()
        beside(lambda: (mark.follow(), vector[:2].mul_(2), mark.set()))
        vector[2:].mul_(3)  # other elements
        mark.follow()
        vector.add_(1)

    with queued(monkeypatch):
        in_order()
    vector = torch.zeros(4)
    books = racing(
        monkeypatch, lambda: (vector.add_(1), beside(lambda: vector.add_(1)))
    )
    assert "aten::add_" in books.races[0]
    vector = torch.zeros(4)
    racing(monkeypatch, lambda: (vector.add_(1), beside(vector.clone)))
    racing(monkeypatch, lambda: (vector.clone(), beside(lambda: vector.add_(1))))


def test_a_lock_orders_what_is_queued_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.zeros(4)
    with queued(monkeypatch):
        guard = Guard(Condition(RLock()), CPU)

        def change() -> None:
            with guard:
                vector.add_(1)

        def try_to() -> None:
            assert guard.try_enter()
            vector.add_(1)
            guard.leave()

        for act in (change, try_to, change, try_to):
            act()
            beside(act)


def test_a_message_is_on_the_host_before_anybody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = torch.ones(4), torch.zeros(4)
    with queued(monkeypatch):
        beside(lambda: to_host(here.add_(1), there))
        assert there.clone().tolist() == [2.0] * 4
        to_device(there, here)
    racing(monkeypatch, lambda: (beside(lambda: here.add_(1)), here.clone()))
    assert pinned(3, torch.float64, CPU).shape == (3,)


@pytest.mark.parametrize(
    ("table", "key"),
    [(_scales, torch.float32), (_narrower, _FORMS[8]), (words_for_places, 8)],
)
def test_a_table_that_all_threads_use_is_there_for_each(
    table: Any, key: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.cache_clear()
    with queued(monkeypatch):
        beside(lambda: table(key, CPU))
        table(key, CPU).clone()
    table.cache_clear()


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_round_reads_what_was_copied_and_is_added_once_it_is_computed(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = torch.ones(6)
    with queued(monkeypatch):
        schedule = Schedule(find_topology(topology), 1)
        (alone,) = ThreadTransport.connect(1)
        mixer = RoundMixer([vector], alone, SuperLearnerGroup(), schedule, PATIENCE)
        for _ in range(3):
            vector.add_(1)  # a step
            mixer.take_snapshot()
            beside(mixer.mix)
            vector.add_(1)
            mixer.finish()


class OfTwo(SuperLearnerGroup):
    """Learner 0 of two, of which each changes the chunks that it is told to."""

    def __init__(self, changes: Sequence[Sequence[int]], books: Books) -> None:
        super().__init__()
        self.size, self._left, self._books = 2, list(changes), books

    @override
    def agree(self, numbers: Sequence[int], timeout: timedelta) -> list[int]:
        found = list(numbers)
        for number in self._left.pop(0):
            found[2 + 2 * number + 1] = 1
        return found

    @override
    def share(self, part: Tensor, owner: int, timeout: timedelta) -> None:
        self._books.note_network(part, writes=owner != 0)


@pytest.mark.parametrize("own", [[0, 1, 2, 3], [0], []])
def test_what_a_super_learner_shares_is_taken_sent_and_merged_in_order(
    own: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    vector, before = torch.zeros(8), set(threading.enumerate())
    with queued(monkeypatch) as books:
        group = OfTwo([[0, 1], [0, 1], [1], [0], [0, 1]], books)
        shards = [group.shards([vector], 0)]
        replica = Replica(shards, 2, Condition(RLock()), part_elements=2)
        gather = ShardGather([vector], replica, group, PATIENCE)
        for step in range(4):
            vector.add_(1)
            if step in own:
                with replica.guard:
                    for chunk in replica.chunks:
                        chunk.add(torch.ones(2), 0.5)
            gather.finish()
            gather.begin()
        gather.finish()
        assert set(threading.enumerate()) > before
        gather.stop(PATIENCE.total_seconds())
    assert set(threading.enumerate()) <= before
