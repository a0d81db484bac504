import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.contexts import context_statistics, contexts_of
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.hmm.tree import LEFT, DecisionTree

PHONES = ("sil", "a", "b")


@pytest.fixture(params=["monophones", "triphones"])
def topology(request) -> Topology:
    if request.param == "monophones":
        return Topology(PHONES, 2)
    questions = np.array([[False, False, True]])
    return Topology(PHONES, 2, DecisionTree.of(6, questions, [(2, LEFT, 0)]))


def utterance(topology: Topology, phones: list[int], random) -> tuple:
    """Frames and states of phones, and the context of every frame by hand."""
    states, contexts = [], []
    around = [0, *phones, 0]
    for left, phone, right in zip(around, around[1:], around[2:], strict=False):
        window = [left + 1, phone + 1, right + 1]
        wide = topology.context_width == 3
        chain = topology.chain(window if wide else window[1:2])
        for position, state in enumerate(chain):
            for _ in range(random.integers(1, 4)):
                states.append(state)
                contexts.append((2 * phone + position, left, right))
    return random.normal(size=(len(states), 3)), np.array(states), contexts


@pytest.fixture
def corpus(topology) -> list[tuple]:
    random = np.random.default_rng(0)
    return [
        utterance(topology, random.integers(0, 3, length).tolist(), random)
        for length in (4, 1, 7, 12, 3, 9)
    ]


def test_the_context_of_a_frame_is_that_of_the_phones_around_it(topology, corpus):
    for _, states, contexts in corpus:
        found = np.stack(contexts_of(states, topology), axis=1)
        assert [tuple(row) for row in found.tolist()] == contexts


def load(shard: list[tuple]) -> list[tuple]:
    return [(frames, states) for frames, states, _ in shard]


def test_sums_are_those_of_the_frames_of_each_context(topology, corpus):
    shards = [corpus[:2], [], corpus[2:5], corpus[5:]]
    found = context_statistics(shards, load, topology)
    frames = np.concatenate([frames for frames, _, _ in corpus])
    keys = [context for _, _, contexts in corpus for context in contexts]
    assert list(zip(*(c.tolist() for c in found[:3]), strict=True)) == sorted(set(keys))
    for number, key in enumerate(sorted(set(keys))):
        own = frames[[key == other for other in keys]]
        assert found.sums.frames[number] == len(own)
        np.testing.assert_allclose(found.sums.first[number], own.sum(axis=0))
        np.testing.assert_allclose(found.sums.second[number], (own**2).sum(axis=0))


def test_three_processes_find_the_very_same_sums(topology, corpus):
    shards = [[utterance] for utterance in corpus]
    one, three = (context_statistics(shards, load, topology, n) for n in (1, 3))
    np.testing.assert_array_equal(one.root, three.root)
    for mine, other in zip(one.sums, three.sums, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_no_frame_at_all_is_an_error(topology):
    with pytest.raises(ValueError, match="no labelled frames"):
        context_statistics([[]], load, topology)
