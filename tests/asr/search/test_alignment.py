import math
from itertools import islice

import numpy as np
import pytest

from lightning_adpsgd.asr.frames.cepstra import cepstra
from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.search.alignment import (
    AlignmentOptions,
    AlignmentStep,
    AlignmentUtterance,
    StateScorer,
    align,
    mixture_scorer,
    train_mixtures,
)
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from tests.asr.digits import Speaker, lexicon


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker(lexicon(), noise=0.3)


@pytest.fixture(scope="module")
def graphs(speaker: Speaker) -> TrainingGraphs:
    return TrainingGraphs(speaker.lexicon, speaker.topology)


@pytest.fixture(scope="module")
def spoken(speaker: Speaker) -> list[tuple[AlignmentUtterance, np.ndarray]]:
    corpus = []
    for number in range(60):
        words = speaker.sentence(4)
        states = speaker.states(words)
        frames = speaker.frames(states)
        corpus.append((AlignmentUtterance(f"u{number}", words, frames), states))
    return corpus


@pytest.fixture(scope="module")
def steps(spoken, graphs) -> list[AlignmentStep]:
    utterances = [utterance for utterance, _ in spoken]
    options = AlignmentOptions(num_iterations=6, num_gaussians=100, num_processes=2)
    return list(train_mixtures(utterances, graphs, options))


def scorer(steps: list[AlignmentStep]) -> StateScorer:
    return mixture_scorer(steps[-1].mixtures, FrontEnd())


def test_flat_start_finds_the_phones_that_were_said(spoken, graphs, steps):
    utterances = [utterance for utterance, _ in spoken]
    results = dict(align(utterances, graphs, scorer(steps), AlignmentOptions()))
    right = total = 0
    for index, (_, states) in enumerate(spoken):
        found = results[index].states
        assert found is not None
        assert found.shape == states.shape
        right += int((found // 3 == states // 3).sum())
        total += len(states)
    assert right / total > 0.85


def test_likelihood_rises_and_changes_settle(steps):
    likelihoods = [step.log_likelihood for step in steps[1:]]
    assert math.isnan(steps[0].log_likelihood)
    assert likelihoods[-1] > likelihoods[0]
    assert steps[-1].changed < 0.2 * steps[1].changed


def test_mixtures_grow_to_the_number_asked_for(steps, graphs):
    sizes = [step.num_gaussians for step in steps]
    assert sizes[0] == graphs.topology.num_states
    assert sizes == sorted(sizes)
    assert sizes[-1] == 100


def test_two_processes_and_three_find_the_same(spoken, graphs, steps):
    utterances = [utterance for utterance, _ in spoken]
    options = AlignmentOptions(num_iterations=6, num_gaussians=100, num_processes=3)
    # By then mixtures have been split; forks take most of the time.
    fourth = next(islice(train_mixtures(utterances, graphs, options), 3, None))
    assert fourth.num_gaussians > steps[0].num_gaussians
    np.testing.assert_array_equal(fourth.mixtures.mean, steps[3].mixtures.mean)


def bad_utterances(frames: np.ndarray) -> list[AlignmentUtterance]:
    broken = frames.copy()
    broken[3, 7] = np.nan
    return [
        AlignmentUtterance("short", ["seven"] * 4, frames[:20]),
        AlignmentUtterance("unknown", ["eleven"], frames),
        AlignmentUtterance("silent", [], frames),
        AlignmentUtterance("broken", ["one"], broken),
    ]


def test_utterances_that_cannot_be_aligned_are_named_with_the_reason(spoken, graphs):
    utterances = [utterance for utterance, _ in spoken[:20]]
    utterances += bad_utterances(utterances[0].log_mel)
    options = AlignmentOptions(num_iterations=1, num_gaussians=1)
    *_, last = train_mixtures(utterances, graphs, options)
    assert set(last.failures) == {"short", "unknown", "silent", "broken"}
    assert "20 frames, its words need at least 60" in last.failures["short"]
    assert "eleven" in last.failures["unknown"]
    assert "not finite" in last.failures["broken"]


def test_final_alignment_tells_why_an_utterance_failed(spoken, graphs, steps):
    utterances = bad_utterances(spoken[0][0].log_mel)
    results = dict(align(utterances, graphs, scorer(steps), AlignmentOptions()))
    assert [results[i].states for i in range(4)] == [None] * 4
    assert "eleven" in results[1].failure


@pytest.mark.parametrize("phones", ["t uw", "sil t uw", "t ax sil", "sil t ax"])
def test_pronunciation_and_silences_are_those_that_the_scores_favour(phones: str):
    """A network that realigns is such a scorer: labels may change in their phones."""
    words = lexicon({"two": "t uw", "a": "ax"})
    words.pronunciations["two"] = (("t", "uw"), ("t", "ax"))
    graphs = TrainingGraphs(words, Topology.of(words))
    chain = [
        state
        for phone in phones.split()
        for state in graphs.topology.chain([1 + graphs.topology.phones.index(phone)])
    ]
    heard = np.repeat(chain, 3)
    frames = np.eye(graphs.topology.num_states, dtype=np.float32)[heard]
    utterance = AlignmentUtterance("u", ["two"], frames)
    options = AlignmentOptions(acoustic_scale=10.0)
    ((_, found),) = align([utterance], graphs, lambda x, own: x[:, own], options)
    np.testing.assert_array_equal(found.states, heard)


def test_nothing_to_align_is_an_error_that_says_why(graphs):
    frames = np.zeros((50, 40), np.float32)
    utterances = [AlignmentUtterance("u", ["eleven"], frames)]
    with pytest.raises(ValueError, match="eleven"):
        list(train_mixtures(utterances, graphs, AlignmentOptions()))


def test_a_path_outside_the_beam_is_found_with_the_wider_one(spoken, graphs, steps):
    utterance, _ = spoken[0]
    # noise in the middle leads a narrow search into a path that cannot be finished
    noise = np.random.default_rng(1).normal(size=utterance.log_mel.shape)
    noisy = utterance._replace(log_mel=5 * noise.astype(np.float32))
    narrow = AlignmentOptions(beam=1e-3, retry_beam=1e-3, acoustic_scale=1.0)
    wide = AlignmentOptions(beam=1e-3, retry_beam=1e5, acoustic_scale=1.0)
    ((_, lost),) = align([noisy], graphs, scorer(steps), narrow)
    ((_, found),) = align([noisy], graphs, scorer(steps), wide)
    assert lost.states is None
    assert "beam of 0.001" in lost.failure
    assert found.states is not None


def test_mixtures_are_trained_on_no_more_utterances_than_allowed(spoken, graphs):
    utterances = [utterance for utterance, _ in spoken]
    few = AlignmentOptions(num_iterations=2, max_training_utterances=15)
    *_, last = train_mixtures(utterances, graphs, few)
    every_fourth = train_mixtures(utterances[::4], graphs, few)
    *_, expected = every_fourth
    assert isinstance(last.mixtures, GaussianMixtures)
    np.testing.assert_array_equal(last.mixtures.mean, expected.mixtures.mean)


def test_training_from_the_true_states_starts_with_them(spoken, graphs):
    utterances = [utterance for utterance, _ in spoken[:20]]
    truth = {utterance.id: states for utterance, states in spoken[:19]}
    options = AlignmentOptions(num_iterations=1, num_gaussians=1)
    first, last = train_mixtures(utterances, graphs, options, start=truth.get)
    frames = np.concatenate([cepstra(u.log_mel) for u in utterances[:19]])
    states = np.concatenate(list(truth.values()))
    own = frames[states == 5]
    expected = own.mean(axis=0)
    np.testing.assert_allclose(first.mixtures.mean[5], expected, atol=1e-4)
    assert set(first.failures) == {utterances[19].id}
    assert "no alignment to start from" in first.failures[utterances[19].id]
    assert last.failures == {}
    assert last.changed < 0.1


def test_states_to_start_from_must_be_as_many_as_frames(spoken, graphs):
    (utterance, states), *_ = spoken
    options = AlignmentOptions(num_iterations=1)
    with pytest.raises(ValueError, match=f"frames of {utterance.id}"):
        list(train_mixtures([utterance], graphs, options, start=lambda _: states[:-1]))


def test_mixtures_are_trained_on_what_the_front_end_gives(spoken, graphs):
    utterances = [utterance for utterance, _ in spoken[:20]]
    projection = np.random.default_rng(0).normal(size=(3 * 13, 7))
    options = AlignmentOptions(num_iterations=1, num_gaussians=1)
    front_end = FrontEnd(13, 1, projection)
    *_, last = train_mixtures(utterances, graphs, options, front_end=front_end)
    assert last.mixtures.mean.shape[1] == 7
    scorer = mixture_scorer(last.mixtures, front_end)
    results = dict(align(utterances, graphs, scorer, options))
    assert all(result.states is not None for result in results.values())
