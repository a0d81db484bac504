"""The agreement of pairs at step boundaries, over channels that deliver at any time."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.gossip.pairing import READY, REST, Pair, Pairing, Word
from lightning_adpsgd.gossip.protocol import Patience

Edges = dict[int, list[int]]


def complete(size: int) -> Edges:
    return {i: [j for j in range(size) if j != i] for i in range(size)}


def ring(size: int) -> Edges:
    return {i: sorted({(i - 1) % size, (i + 1) % size} - {i}) for i in range(size)}


class World:
    """Super-learners, and a channel for each direction of each edge."""

    def __init__(self, edges: Edges) -> None:
        self.edges = edges
        self.patience = {
            i: Patience(None, random.Random(i), len(peers))
            for i, peers in edges.items()
        }
        self.ends = {
            i: Pairing(i, peers, self.patience[i].choose) for i, peers in edges.items()
        }
        self.channels = {(i, j): deque[int]() for i in edges for j in edges[i]}
        self.at_boundary = set[int]()
        self.pairs = list[tuple[int, int]]()

    def say(self, i: int, words: list) -> None:
        for peer, word in words:
            self.channels[i, peer].append(word)

    def arrive(self, i: int) -> None:
        self.at_boundary.add(i)
        self.say(i, self.ends[i].arrive(self.patience[i].avoided))

    def relent(self, i: int) -> None:
        self.say(i, self.ends[i].relent())

    def give_up(self, i: int) -> None:
        self.say(i, self.ends[i].give_up())

    def deliver(self, i: int, j: int) -> None:
        """The oldest word from i to j arrives."""
        self.say(j, self.ends[j].hear(i, self.channels[i, j].popleft()))

    def decided(self) -> list[int]:
        return [i for i in sorted(self.at_boundary) if self.ends[i].is_decided]

    def exchange(self) -> None:
        """Those go on that skip, and both ends of a pair together."""
        for i in self.decided():
            pair = self.ends[i].pair
            partner = pair.partner
            if partner is None:
                self.leave(i)
            elif partner in self.decided() and i in self.at_boundary:
                # No half meeting: both ends have agreed, and one of them asks.
                assert self.ends[partner].pair == Pair(i, not pair.asks)
                assert partner in self.edges[i]
                self.pairs.append((i, partner))
                self.leave(i)
                self.leave(partner)

    def leave(self, i: int) -> None:
        self.patience[i].met(self.ends[i].pair.partner)
        self.ends[i].leave()
        self.at_boundary.remove(i)

    def deliver_all(self, draw: random.Random) -> None:
        for _ in range(10_000):
            filled = [edge for edge, words in self.channels.items() if words]
            if not filled:
                return
            self.deliver(*draw.choice(filled))
        raise AssertionError("words go to and fro without end")


def run(world: World, draw: random.Random, num_events: int) -> None:
    """Arrivals, ends of waits and deliveries in a random order."""
    for _ in range(num_events):
        acts = [(world.arrive, (i,)) for i in world.ends if i not in world.at_boundary]
        acts += [
            (world.give_up, (i,)) for i in world.at_boundary if draw.random() < 0.3
        ]
        acts += [(world.relent, (i,)) for i in world.at_boundary]
        acts += [
            (world.deliver, edge) for edge, words in world.channels.items() if words
        ]
        if acts:
            act, arguments = draw.choice(acts)
            act(*arguments)
        if draw.random() < 0.5:
            world.exchange()


worlds = st.builds(
    lambda make, size: World(make(size)),
    st.sampled_from([complete, ring]),
    st.integers(2, 6),
)


@settings(max_examples=200, deadline=None)
@given(world=worlds, seed=st.integers(0, 10_000))
def test_both_ends_agree_whatever_comes_late(world: World, seed: int) -> None:
    draw = random.Random(seed)
    run(world, draw, 120)
    # `exchange` checks each pair. Nobody is left in half of one.
    for i in world.ends:
        world.give_up(i)
    world.deliver_all(draw)
    world.exchange()
    assert not world.at_boundary


@settings(max_examples=100, deadline=None)
@given(world=worlds, seed=st.integers(0, 10_000))
def test_no_two_that_could_pair_are_left_waiting(world: World, seed: int) -> None:
    draw = random.Random(seed)
    run(world, draw, 60)
    for i in world.at_boundary:
        world.relent(i)
    world.deliver_all(draw)
    world.exchange()
    waiting = world.at_boundary
    assert not [(i, j) for i in waiting for j in world.edges[i] if j in waiting]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_all_but_an_odd_one_pair_if_all_are_there(size: int) -> None:
    world, draw = World(complete(size)), random.Random(size)
    for i in range(size):
        world.arrive(i)
    world.deliver_all(draw)
    world.exchange()
    assert len(world.pairs) == size // 2
    assert len(world.at_boundary) == size % 2


def test_a_partner_is_drawn_from_all_that_are_ready() -> None:
    # On a star, those at the points never pair with each other, and all wait.
    star = {0: [1, 2, 3, 4], 1: [0], 2: [0], 3: [0], 4: [0]}
    world, draw = World(star), random.Random(0)
    for i in (1, 2, 3, 4):
        world.arrive(i)
    world.deliver_all(draw)
    for _ in range(40):
        world.arrive(0)
        world.deliver_all(draw)
        world.exchange()
        world.arrive(max(world.pairs[-1]))
        world.deliver_all(draw)
    assert set(world.pairs) == {(0, 1), (0, 2), (0, 3), (0, 4)}


def test_one_that_waits_in_vain_skips_and_owes_nobody_an_answer() -> None:
    world = World(complete(2))
    world.arrive(0)
    world.give_up(0)
    assert world.ends[0].is_decided
    assert world.ends[0].pair == Pair()
    # The other comes too late: it hears that the first was ready, and is gone.
    world.deliver_all(random.Random(0))
    world.arrive(1)
    assert not world.ends[1].is_decided
    world.give_up(1)
    assert world.ends[1].pair == Pair()


def test_an_offer_that_is_under_way_is_waited_for_and_kept() -> None:
    world = World(complete(2))
    world.arrive(0)
    world.deliver(0, 1)
    world.arrive(1)  # offers, since 0 has said that it is ready
    world.give_up(1)
    assert not world.ends[1].is_decided
    world.deliver_all(random.Random(0))
    world.exchange()
    assert world.pairs == [(0, 1)]


def test_offers_that_cross_are_each_others_answer() -> None:
    world = World(complete(2))
    world.arrive(0)
    world.give_up(0)
    world.leave(0)
    world.deliver(0, 1)  # READY; the news that 0 is gone is still on its way
    world.arrive(1)  # and offers
    world.ends[0].hear(1, READY)  # of an earlier boundary of 1
    world.arrive(0)  # and offers
    for edge in ((1, 0), (0, 1), (0, 1)):
        world.deliver(*edge)
    assert not any(world.channels.values())
    world.exchange()
    assert world.pairs == [(0, 1)]


def test_one_that_has_refused_says_again_that_it_is_ready() -> None:
    """Both would wait for the other's offer if it did not."""
    world = World(complete(3))
    world.arrive(1)
    world.deliver(1, 0)
    world.arrive(2)
    world.deliver(2, 1)  # 1 offers to 2, which is about to give up
    world.give_up(2)
    world.arrive(0)  # offers to 1
    world.deliver(0, 1)  # which refuses
    world.deliver_all(random.Random(0))
    world.exchange()
    assert world.pairs == [(0, 1)]


def test_a_partner_is_not_taken_for_ready_after_the_exchange() -> None:
    world = World(complete(2))
    world.arrive(0)
    world.arrive(1)
    world.deliver_all(random.Random(0))
    world.exchange()
    for i in (0, 1):
        world.arrive(i)
        assert list(world.channels[i, 1 - i]) == [READY]


# --- those that are avoided, and those that rest


def end(own: int, *peers: int) -> Pairing:
    return Pairing(own, peers, Patience(None, random.Random(0), len(peers)).choose)


def test_the_last_partner_is_taken_when_no_other_has_come() -> None:
    world = World(complete(3))
    for _ in range(2):
        world.arrive(0)
        world.arrive(1)
        world.deliver_all(random.Random(0))
        world.exchange()
        assert world.pairs == [(0, 1)]
    world.relent(0)
    world.deliver_all(random.Random(0))
    world.exchange()
    assert world.pairs == [(0, 1), (0, 1)]


def test_another_than_the_last_partner_is_taken_at_once() -> None:
    world = World(complete(3))
    for both in ((0, 1), (0, 1, 2)):
        for i in both:
            world.arrive(i)
        world.deliver_all(random.Random(0))
        world.exchange()
    assert [set(pair) - {2} for pair in world.pairs] in ([{0, 1}, {0}], [{0, 1}, {1}])


def test_the_only_peer_is_taken_again_at_once() -> None:
    world = World(complete(2))
    for number in (1, 2, 3):
        world.arrive(0)
        world.arrive(1)
        world.deliver_all(random.Random(0))
        world.exchange()
        assert len(world.pairs) == number


def test_the_last_partner_is_taken_if_all_others_rest() -> None:
    one = end(0, 1, 2)
    one.hear(1, READY)
    assert one.arrive(avoided=frozenset((1,))) == [Word(2, READY), Word(1, READY)][::-1]
    assert [word.peer for word in one.hear(2, REST)] == [1]
    assert not one.is_decided  # it awaits the answer


def test_nobody_is_waited_for_who_is_at_a_meeting() -> None:
    one = end(0, 1, 2)
    one.arrive()
    one.hear(1, REST)
    assert not one.is_decided
    one.hear(2, REST)
    assert one.is_decided
    assert one.pair == Pair()
    one.leave()
    one.arrive()
    assert one.is_decided


def test_after_the_meeting_all_may_come_whichever_word_is_late() -> None:
    one = end(0, 1, 2)
    one.hear(1, REST)
    assert [word.word for word in one.rest()] == [REST, REST]
    assert one.may_come == {1, 2}
    one.hear(2, REST)  # of the same meeting
    assert one.may_come == {1, 2}
    one.hear(2, REST)  # of the next one
    assert one.may_come == {1}
    one.rest()
    assert one.may_come == {1, 2}
