import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.asr.hmm.states import (
    Topology,
    phone_runs,
    read_topology,
    write_topology,
)
from lightning_adpsgd.asr.hmm.tree import LEFT, RIGHT, DecisionTree

PHONES = ("sil", "a", "b", "c")
LENGTH = 2
ROOTS = len(PHONES) * LENGTH
QUESTIONS = np.array(
    [[0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 1]], dtype=bool
)
CONTEXTS = np.stack(np.meshgrid(np.arange(ROOTS), np.arange(4), np.arange(4))).reshape(
    3, -1
)


@st.composite
def trees(draw) -> DecisionTree:
    leaves, root = list(range(ROOTS)), {node: node for node in range(ROOTS)}
    splits = []
    for number in range(draw(st.integers(0, 12))):
        node = leaves.pop(draw(st.integers(0, len(leaves) - 1)))
        splits.append((node, draw(st.integers(0, 1)), draw(st.integers(0, 3))))
        for child in (ROOTS + 2 * number, ROOTS + 2 * number + 1):
            leaves.append(child)
            root[child] = root[node]
    ties = []
    for _ in range(draw(st.integers(0, 3))):
        pairs = [(a, b) for a in leaves for b in leaves if a > b and root[a] == root[b]]
        if pairs:
            pair = draw(st.sampled_from(pairs))
            ties.append(pair)
            leaves.remove(pair[0])
    return DecisionTree.of(ROOTS, QUESTIONS, splits, ties)


def leaf_of(tree: DecisionTree, root: int, left: int, right: int) -> int:
    """The leaf of a context, found by following one split after the other."""
    node = root
    for number, (at, side, question) in enumerate(tree.splits.tolist()):
        if node == at:
            phone = left if side == LEFT else right
            yes = tree.questions[question, phone]
            node = ROOTS + 2 * number + (0 if yes else 1)
    for leaf, other in tree.ties.tolist():
        node = other if node == leaf else node
    return node


@given(trees())
@settings(max_examples=40, deadline=None)
def test_every_context_has_the_state_of_its_leaf(tree):
    states = tree.find(*CONTEXTS)
    leaves = [leaf_of(tree, *context) for context in CONTEXTS.T.tolist()]
    assert [int(tree.leaves[state]) for state in states] == leaves


@given(trees())
@settings(max_examples=40, deadline=None)
def test_states_are_numbered_by_phone_and_position(tree):
    topology = Topology(PHONES, LENGTH, tree)
    states = tree.find(*CONTEXTS)
    assert states.min() >= 0
    assert states.max() < topology.num_states
    phones, positions = np.divmod(CONTEXTS[0], LENGTH)
    np.testing.assert_array_equal(topology.phone_of_state[states], phones)
    np.testing.assert_array_equal(topology.position_of_state[states], positions)
    assert (np.diff(topology.phone_of_state) >= 0).all()
    assert len(set(topology.state_names)) == topology.num_states


@given(trees())
@settings(max_examples=20, deadline=None)
def test_a_tree_survives_the_way_through_its_file(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    write_topology(path, Topology(PHONES, LENGTH, tree))
    found = read_topology(path)
    assert (found.phones, found.states_per_phone) == (PHONES, LENGTH)
    assert found.tree is not None
    np.testing.assert_array_equal(found.tree.find(*CONTEXTS), tree.find(*CONTEXTS))


def test_without_splits_each_phone_has_a_chain_of_states_of_its_own():
    topology = Topology(PHONES, LENGTH)
    windows = np.array([[1], [2], [3], [4]])
    assert topology.chains(windows).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.context_width == 1
    assert topology.state_names[3] == "a.1"


def split_on_the_left_of_a() -> Topology:
    """Phone a begins in one way after a or b (question 1), in another elsewhere."""
    return Topology(
        PHONES, LENGTH, DecisionTree.of(ROOTS, QUESTIONS, [(2, LEFT, 1)], [])
    )


def test_the_phone_before_decides_where_the_tree_asks_for_it():
    topology = split_on_the_left_of_a()
    after_b, after_c = topology.chains(np.array([[3, 2, 4], [4, 2, 3]]))
    assert after_b[0] != after_c[0]
    assert after_b[1] == after_c[1]
    assert topology.state_names[2:5] == ("a.0.0", "a.0.1", "a.1")


def test_outside_the_utterance_counts_as_silence():
    topology = split_on_the_left_of_a()
    at_start, after_silence = topology.chains(np.array([[0, 2, 0], [1, 2, 1]]))
    assert at_start.tolist() == after_silence.tolist()


def test_phones_are_read_off_states_in_context():
    topology = split_on_the_left_of_a()
    windows = np.array([[0, 3, 2], [3, 2, 2], [2, 2, 4], [2, 4, 0]])  # b a a c
    states = np.repeat(topology.chains(windows).ravel(), 3)
    assert phone_runs(states, topology) == ([2, 1, 1, 3], [0, 6, 12, 18, 24])


@pytest.mark.parametrize(
    "splits",
    [
        [(ROOTS, LEFT, 0)],  # no such node at its turn
        [(0, LEFT, 0), (0, RIGHT, 1)],  # not a leaf any more
        [(0, 2, 0)],  # no such side
        [(0, LEFT, 4)],  # no such question
        [(-1, LEFT, 0)],
    ],
)
def test_a_split_that_cannot_be_is_refused(splits):
    with pytest.raises(ValueError, match="`splits`"):
        DecisionTree.of(ROOTS, QUESTIONS, splits, [])


@pytest.mark.parametrize("tie", [(ROOTS, 5), (ROOTS, ROOTS), (0, ROOTS), (ROOTS, 99)])
def test_a_tie_of_other_nodes_than_leaves_of_one_root_is_refused(tie):
    with pytest.raises(ValueError, match="`ties`"):
        DecisionTree.of(ROOTS, QUESTIONS, [(0, LEFT, 0)], [tie])


def test_a_tree_of_other_phones_is_refused():
    tree = DecisionTree.without_context(6, 3)
    with pytest.raises(ValueError, match="8 roots and questions over 4"):
        Topology(PHONES, LENGTH, tree)


def test_windows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="3"):
        split_on_the_left_of_a().chains(np.array([[1]]))


def _write(path: Path, **changes: object) -> Path:
    write_topology(path, split_on_the_left_of_a())
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"phones": ["sil", "a"]}, "not in `phones`"),
        ({"splits": [[99, 0, 0]]}, "`splits`"),
        ({"splits": [[1, 0]]}, "reshape"),
        ({"states_per_phone": 3}, "make 13"),
        ({"questions": None}, "NoneType"),
    ],
)
def test_a_broken_file_is_named(tmp_path, changes, problem):
    path = _write(tmp_path / "tree.json", **changes)
    with pytest.raises(ValueError, match=rf"tree\.json.*({problem})"):
        read_topology(path)


def test_a_missing_or_truncated_file_is_named(tmp_path):
    path = tmp_path / "tree.json"
    with pytest.raises(ValueError, match=r"tree\.json: expected a decision tree"):
        read_topology(path)
    text = _write(path).read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"tree\.json is not a decision tree"):
        read_topology(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="lacks 'phones'"):
        read_topology(path)
