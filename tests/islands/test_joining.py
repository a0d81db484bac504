"""What the learners of one island agree upon before they ask others for weights."""

from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.gossip.protocol import Position, Pulled
from lightning_adpsgd.islands.joining import Joining
from lightning_adpsgd.islands.member_list import Member, MemberList
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule
from tests import helpers
from tests.islands.archipelago import PATIENCE

ROWS = {
    number: Member(number, f"start {number}", "host", (), origin)
    for number, origin in enumerate(["behind", "far", "far"])
}


class Learner:
    """One learner of an island that begins, and the members that it has asked."""

    def __init__(self, index: int, store: HashStore, steps_of: dict[int, int]) -> None:
        self.asked: list[int] = []
        membership: Any = SimpleNamespace(
            member=Member(5, "mine", "host", ()),
            members=MemberList(1, ROWS),
            steps_of=steps_of,
        )
        threads = SimpleNamespace(raise_if_failed=lambda: None)
        live_schedule = LiveSchedule.of(Schedule(find_topology("complete"), 1), (), 5)
        connections: Any = SimpleNamespace(
            engine=SimpleNamespace(
                threads=threads, members=SimpleNamespace(live_schedule=live_schedule)
            ),
            pull=self._pull,
        )
        group: Any = SimpleNamespace(index=index, agree=lambda flags, timeout: None)
        self.joining = Joining(
            [],
            RendezvousAddress("127.0.0.1", 1, "job"),
            membership,
            connections,
            group,
            store,
            PATIENCE,
            helpers.PATIENCE,
        )

    def _pull(self, number: int, seconds: float) -> Pulled:
        self.asked.append(number)
        return Pulled(Position(1, 1, 0), [torch.ones(1)])


def test_all_learners_of_an_island_take_weights_of_one_training() -> None:
    """Only the first one hears how far the others have come."""
    store = HashStore()
    learners = [Learner(0, store, {0: 1, 1: 50, 2: 60}), Learner(1, store, {})]
    for one in learners:
        assert not one.joining._is_first()
        assert one.joining._weights_for_all() is not None
    assert [set(one.asked) for one in learners] == [{1, 2}, {1, 2}]
    assert [one.joining.origin for one in learners] == ["far", "far"]
