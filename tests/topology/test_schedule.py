"""Everybody who knows the same members draws the same ring."""

import pytest

from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule, check_any_size
from tests.helpers import topologies_of

RING = Schedule(find_topology("ring"), 1)


@pytest.mark.parametrize(("name", "size"), topologies_of(1, 2, 3, 5, 6))
def test_numbers_with_gaps_ask_as_indices_do(name: str, size: int) -> None:
    schedule = Schedule(find_topology(name), size)
    numbers = [7 * index + 3 for index in range(size)]
    for index, own in enumerate(numbers):
        live = LiveSchedule.of(Schedule(find_topology(name), size), numbers, own)
        for round in range(8):
            expected = [numbers[peer] for peer in schedule.asks(index, round)]
            assert live.asks(round) == expected
        peers = schedule.topology.peers(index, size)
        assert live.peers() == [numbers[peer] for peer in peers]


def test_members_draw_one_ring_in_whatever_order_they_hear_of_one_another() -> None:
    edges = set()
    for own, others in ((2, (9, 4, 5)), (4, (2, 5, 9)), (5, (9, 2, 4)), (9, (5, 4, 2))):
        edges |= {(own, peer) for peer in LiveSchedule.of(RING, others, own).peers()}
    ring = {(2, 4), (4, 5), (5, 9), (9, 2)}
    assert edges == ring | {(j, i) for i, j in ring}


def test_a_ring_closes_around_who_is_gone() -> None:
    assert LiveSchedule.of(RING, (1, 2, 3), 0).peers() == [1, 3]
    assert LiveSchedule.of(RING, (2, 3), 0).peers() == [2, 3]
    assert LiveSchedule.of(RING, (), 0).peers() == []


def test_the_gain_and_the_seed_stay_when_the_size_changes() -> None:
    schedule = Schedule(find_topology("random_pairs"), 1, gain=0.5, seed=3)
    changed = LiveSchedule.of(schedule, (1, 2, 5), 0).schedule
    assert changed == Schedule(find_topology("random_pairs"), 4, gain=0.5, seed=3)


def test_a_topology_of_certain_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`topology` must exist for any .*3"):
        check_any_size(find_topology("hypercube"))
    with pytest.raises(ValueError, match="got 'matrices'"):
        check_any_size(find_topology([[0.5, 0.5], [0.5, 0.5]]))
    check_any_size(find_topology("random_ring"))
