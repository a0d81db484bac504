"""The loss on held-out speech, against the loss of a model on all of it at once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.frames.data import SpeechData
from lightning_adpsgd.asr.frames.store import IGNORE
from lightning_adpsgd.asr.model import AcousticModel, frame_cross_entropy
from lightning_adpsgd.files import write_json
from recipes.hybrid.training.held_out import (
    HeldOut,
    Point,
    Spoken,
    difference_interval,
    loss_interval,
    losses_of,
    read_held_out,
)
from recipes.hybrid.training.metrics import by_step, series
from tests.recipes.experiments import write_frames

STATES, CHUNK = 5, 7
LENGTHS = {"a": 20, "b": 7, "c": 3}


@pytest.fixture
def data(tmp_path: Path) -> SpeechData:
    dice = np.random.default_rng(0)
    labels: list[np.ndarray] = []
    frames = {n: dice.normal(size=(t, 40)) for n, t in LENGTHS.items()}
    write_frames(tmp_path / "features" / "dev", frames)
    labels = [dice.integers(STATES, size=t) for t in LENGTHS.values()]
    folder = tmp_path / "labels" / "dev"
    folder.mkdir(parents=True)
    np.save(folder / "labels.npy", np.concatenate(labels).astype(np.int32))
    np.save(folder / "labels.present.npy", np.ones(len(LENGTHS), bool))
    features = tmp_path / "features"
    return SpeechData(features, tmp_path / "labels", batch_size=2, chunk=CHUNK)


@pytest.fixture
def model() -> AcousticModel:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "hidden_size": 4, "bottleneck_size": 3, "max_warp": 0.1}
    return AcousticModel(STATES, input_size=120, **sizes)  # pyright: ignore


def test_utterances_have_the_loss_of_their_chunks_in_validation(data, model):
    found = losses_of(model, data)
    assert {name: one.frames for name, one in found.items()} == LENGTHS
    frames, labels = data.dataset("dev").__getitems__([0, 1, 2, 3, 4])
    with torch.no_grad():
        logits, labels = model.eval()._evaluate((frames, labels))
    counted = (labels != IGNORE).sum(1)
    by_chunk = [
        float(frame_cross_entropy(logits[n : n + 1], labels[n : n + 1]) * counted[n])
        for n in range(5)
    ]
    expected = {"a": sum(by_chunk[:3]), "b": by_chunk[3], "c": by_chunk[4]}
    losses = {name: one.loss for name, one in found.items()}
    assert losses == pytest.approx(expected, rel=1e-5)


# --- intervals


def spoken(*losses: float) -> dict[str, Spoken]:
    """Utterances of ten frames with these losses per frame."""
    return {str(n): Spoken(10, 10 * loss) for n, loss in enumerate(losses)}


def test_equal_utterances_leave_no_doubt():
    assert loss_interval(spoken(1.5, 1.5, 1.5)) == pytest.approx((1.5, 1.5))


def test_the_interval_of_many_utterances_is_two_deviations_of_their_mean():
    losses = np.random.default_rng(1).normal(2.0, 0.5, size=400)
    low, high = loss_interval(spoken(*losses))
    half = 1.96 * losses.std() / 20
    assert (low, high) == pytest.approx(
        (losses.mean() - half, losses.mean() + half), abs=0.01
    )


def test_what_both_methods_find_hard_does_not_blur_their_difference():
    hard = np.random.default_rng(2).normal(2.0, 1.0, size=50)
    ends = difference_interval(spoken(*hard), spoken(*(hard - 0.25)))
    assert ends == pytest.approx((-0.25, -0.25))


def test_losses_of_other_utterances_are_not_compared():
    with pytest.raises(ValueError, match="1 are of one alone, the first: 2"):
        difference_interval(spoken(1.0, 1.0), spoken(1.0, 1.0, 1.0))


# --- the file


def test_the_file_holds_the_curve_and_every_utterance(tmp_path):
    curve, utterances = (Point(3, 1.5, 96, 2.0),), spoken(1.0, 2.0)
    found = {"curve": curve, "utterances": utterances}
    write_json(tmp_path / "held_out.json", found)
    assert read_held_out(tmp_path / "held_out.json") == HeldOut(curve, utterances)


def test_points_of_the_curve_are_validations_to_whoever_reads_the_figures():
    rows = by_step([{"step": 9, "val_loss": 1.0}, Point(5, 1.5, 160, 2.0).row()])
    assert series(rows, "learners/train_seconds", "val_loss") == [(1.5, 2.0)]
    assert [row["step"] for row in rows] == [4, 9]
