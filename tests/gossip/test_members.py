"""Which super-learner speaks for all, where they are fixed and where they are not."""

import pytest

from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule


@pytest.mark.parametrize("own", range(3))
def test_the_first_of_all_speaks_for_them(own: int) -> None:
    members = Members.fixed(Schedule(find_topology("ring"), 3), own)
    assert members.own_is_first is (own == 0)
    assert members.are_fixed


def test_where_they_come_and_go_the_least_number_speaks() -> None:
    told = list[tuple[int, bool, int]]()
    members = Members(
        Schedule(find_topology("ring"), 1),
        [9, 4],
        7,
        on_left=lambda *left: told.append(left),
    )
    assert members.own_is_first is False
    assert members.live_schedule.numbers == (4, 7, 9)
    assert members.on_left is not None
    members.on_left(9, True, 2)
    assert (told, members.are_fixed) == ([(9, True, 2)], False)
