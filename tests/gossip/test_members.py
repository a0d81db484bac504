"""The super-learners that take part, where they are fixed and where they are not."""

from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule


def test_the_super_learners_of_one_job_are_fixed() -> None:
    members = Members.fixed(Schedule(find_topology("ring"), 3), 1)
    assert members.live_schedule.numbers == (0, 1, 2)
    assert members.are_fixed


def test_where_they_come_and_go_a_member_hears_who_leaves() -> None:
    told = list[tuple[int, bool]]()
    members = Members(
        Schedule(find_topology("ring"), 1),
        [9, 4],
        7,
        on_left=lambda *left: told.append(left),
    )
    assert members.live_schedule.numbers == (4, 7, 9)
    assert members.on_left is not None
    members.on_left(9, True)
    assert (told, members.are_fixed) == ([(9, True)], False)
