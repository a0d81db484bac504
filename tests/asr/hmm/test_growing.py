import itertools

import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.clustering import questions
from lightning_adpsgd.asr.hmm.contexts import ContextStatistics
from lightning_adpsgd.asr.hmm.gmm import Statistics
from lightning_adpsgd.asr.hmm.growing import TreeOptions, grow, variance_floor
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.hmm.tree import LEFT, RIGHT, DecisionTree

TOPOLOGY = Topology(("sil", "a", "b", "c", "d"), 1)
SIZE = len(TOPOLOGY.phones)
CONTEXTS = np.array(list(itertools.product(range(SIZE), repeat=3)))


class World:
    """Frames of every context of five phones with chains of one state.

    Args:
        mean: The mean of a context (phone, left, right), a number.
        num_frames: Frames of each context.
    """

    def __init__(self, mean, num_frames: int = 6, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.num_frames = num_frames
        self.frames = [
            random.normal(mean(*context), 1.0, size=(num_frames, 3))
            for context in CONTEXTS.tolist()
        ]
        root, left, right = CONTEXTS.T
        sums = self.sums(range(SIZE**3))
        self.statistics = ContextStatistics(root, left, right, sums)
        self.floor = variance_floor(self.statistics.sums)

    def sums(self, contexts) -> Statistics:
        chosen = [self.frames[context] for context in contexts]
        return Statistics(
            np.array([float(len(frames)) for frames in chosen]),
            np.array([frames.sum(axis=0) for frames in chosen]),
            np.array([(frames**2).sum(axis=0) for frames in chosen]),
        )

    def likelihood(self, contexts: list[int]) -> float:
        frames = np.concatenate([self.frames[context] for context in contexts])
        variance = np.maximum(frames.var(axis=0), self.floor)
        squares = (frames - frames.mean(axis=0)) ** 2 / variance
        return float(-0.5 * (np.log(2 * np.pi * variance) + squares).sum())

    def partition(self, tree: DecisionTree) -> set[frozenset[int]]:
        states = tree.find(*CONTEXTS.T)
        parts = [np.flatnonzero(states == s) for s in range(tree.num_states)]
        return {frozenset(part.tolist()) for part in parts}


def grown(world: World, num_leaves: int, **options) -> DecisionTree:
    chosen = TreeOptions(num_leaves=num_leaves, min_frames=12, **options)
    return grow(world.statistics, TOPOLOGY, 1, chosen)


def sides(world: World) -> list[tuple[int, np.ndarray]]:
    """All questions (column of `CONTEXTS`, set), from the sums of whole phones."""
    by_phone = [np.flatnonzero(CONTEXTS[:, 0] == phone) for phone in range(SIZE)]
    parts = [
        Statistics(*(p.sum(axis=0) for p in world.sums(rows))) for rows in by_phone
    ]
    sums = Statistics(*(np.array(column) for column in zip(*parts, strict=True)))
    asked = questions(sums, world.floor)
    return [(column, set_) for column in (1, 2) for set_ in asked]


def grown_by_hand(world: World, num_leaves: int) -> set[frozenset[int]]:
    """The partition of contexts, all splits of all leaves tried at every turn."""
    asked = sides(world)
    leaves = {
        frozenset[int](np.flatnonzero(CONTEXTS[:, 0] == phone).tolist())
        for phone in range(SIZE)
    }

    def best(leaf: frozenset[int]) -> tuple[float, frozenset[int]]:
        found = (0.0, frozenset[int]())
        for column, set_ in asked:
            yes = frozenset(i for i in leaf if set_[CONTEXTS[i, column]])
            if min(len(yes), len(leaf - yes)) * world.num_frames < 12:
                continue
            parts = [world.likelihood(sorted(part)) for part in (yes, leaf - yes)]
            gain = sum(parts) - world.likelihood(sorted(leaf))
            found = max(found, (gain, yes), key=lambda pair: pair[0])
        return found

    while len(leaves) < num_leaves:
        open_ = [leaf for leaf in leaves if CONTEXTS[min(leaf), 0] != 0]
        leaf = max(open_, key=lambda leaf: best(leaf)[0])
        yes = best(leaf)[1]
        leaves = (leaves - {leaf}) | {yes, leaf - yes}
    return leaves


def uneven(phone: int, left: int, right: int) -> float:
    """Contexts matter most to phone 4, whose tree outgrows the others by far."""
    return phone + (0.3 + 3 * (phone == 4)) * (left % 2 + 0.6 * right + 0.1 * left)


def test_splits_are_those_that_brute_force_finds_best_over_all_leaves():
    world = World(uneven)
    for num_leaves in (6, 9, 18):
        tree = grown(world, num_leaves, tie=False)
        assert world.partition(tree) == grown_by_hand(world, num_leaves)


def test_a_root_that_outgrows_the_others_by_far_gets_all_its_splits():
    # all gain is below phone 4, which is first grown to twice its share only
    world = World(lambda p, left, right: (p == 4) * (9.0 * left + 2.0 * right), 60)
    tree = grown(world, 22, tie=False)
    by_root = np.bincount(tree.root_of_state)
    assert by_root[4] > 1 + 2 * (22 - 5) / 4
    assert world.partition(tree) == grown_by_hand(world, 22)


def test_a_planted_question_is_the_first_split():
    # phones b and d end alike; phone a sounds otherwise after them
    alike = {0: 0.0, 1: 4.0, 2: 8.0, 3: -4.0, 4: 8.1}
    world = World(lambda p, left, _: alike[p] + (p == 1) * (left in (2, 4)))
    node, side, question = grown(world, 6).splits[0]
    tree = grown(world, 6)
    assert (node, side) == (1, LEFT)
    assert np.flatnonzero(tree.questions[question]).tolist() == [2, 4]


def test_the_phone_after_is_asked_for_where_it_matters():
    world = World(lambda phone, _, right: phone + 5 * (phone == 3) * (right == 0))
    node, side, _ = grown(world, 6).splits[0]
    assert (node, side) == (3, RIGHT)


def test_silence_keeps_one_state_and_every_leaf_has_enough_frames():
    world = World(uneven)
    tree = grown(world, 1000, tie=False)
    states = tree.find(*CONTEXTS.T)
    assert len(set(states[CONTEXTS[:, 0] == 0])) == 1
    assert np.bincount(states).min() * 6 >= 12
    assert SIZE < tree.num_states < 1000


def test_no_split_gains_less_than_asked_for():
    world = World(uneven)
    assert grown(world, 1000, min_gain=1e9).num_states == SIZE
    few, many = (grown(world, 99, min_gain=gain) for gain in (30.0, 3.0))
    assert few.num_states < many.num_states


@pytest.mark.parametrize("num_processes", [2, 3])
def test_the_tree_is_the_same_whatever_the_number_of_processes(num_processes):
    world = World(uneven)
    one, several = (grown(world, 14, num_processes=n) for n in (1, num_processes))
    np.testing.assert_array_equal(one.splits, several.splits)
    np.testing.assert_array_equal(one.ties, several.ties)


def test_leaves_that_sound_alike_share_a_state():
    # the first split, on the left, parts what the right parts again in both halves
    world = World(lambda p, left, right: 9 * (p == 4) * ((left == 1) != (right == 1)))
    tied, free = (grown(world, 8, tie=tie) for tie in (True, False))
    assert tied.num_states < free.num_states
    assert all(
        any(part <= whole for whole in world.partition(tied))
        for part in world.partition(free)
    )


def test_fewer_leaves_than_roots_are_refused():
    with pytest.raises(ValueError, match="at least 5"):
        grown(World(uneven), 4)


def test_contexts_that_were_never_heard_have_a_state():
    world = World(uneven)
    heard = CONTEXTS[:, 1] != 2
    sums = Statistics(*(part[heard] for part in world.statistics.sums))
    root, left, right = CONTEXTS[heard].T
    part = ContextStatistics(root, left, right, sums)
    options = TreeOptions(num_leaves=14, min_frames=12)
    tree = grow(part, TOPOLOGY, 1, options)
    states = tree.find(*CONTEXTS.T)
    assert (tree.root_of_state[states] == CONTEXTS[:, 0]).all()
