"""The loss of a training for a time on held-out speech: its curve, and how sure it is.

`held_out.json` has the curve (steps of learner 0, seconds, samples of all learners,
loss in nats per frame) and, for the weights at the end, frames and loss of each
utterance. Intervals are a bootstrap: utterances are redrawn with repetition. Speakers
would be the better unit, but few of them are held out.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lightning_adpsgd.asr.frames.data import SpeechData
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.scoring.significance import Interval
from lightning_adpsgd.files import write_json
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.scorers import read_network
from recipes.hybrid.training.metrics import Row
from recipes.hybrid.training.timed import consensus_copies

HELD_OUT = "held_out.json"
_SHARE, _DRAWS, _SEED = 0.95, 2000, 0


class Point(NamedTuple):
    """One point of the curve: of the mean of all learners' weights.

    Attributes:
        steps: Steps of learner 0.
        seconds: Training time.
        samples: Samples of all learners.
        loss: Nats per frame.
    """

    steps: int
    seconds: float
    samples: int
    loss: float

    def row(self) -> Row:
        """The point as validations log theirs."""
        progress = {"global_samples": self.samples, "train_seconds": self.seconds}
        losses = {"val_loss": self.loss, "convergence/held_out_loss": self.loss}
        by_group = {
            f"{group}/{name}": value
            for group in ("learners", "convergence")
            for name, value in progress.items()
        }
        # As Lightning numbers steps.
        return {"step": self.steps - 1, **losses, **by_group}


class Spoken(NamedTuple):
    """The loss of one utterance: its frames with labels, and their loss in nats."""

    frames: int
    loss: float


class HeldOut(NamedTuple):
    """The contents of `held_out.json`.

    Attributes:
        curve: Points in the order of time; the last one is the end.
        utterances: Losses at the end, by the utterances' names.
    """

    curve: tuple[Point, ...]
    utterances: Mapping[str, Spoken]


def write_held_out(settings: Settings, output: Path, end: Point) -> list[Row]:
    """Evaluates the copies and the final model of the training in `output`.

    Args:
        settings: settings of the experiment.
        output: folder of the training, which gets `held_out.json`.
        end: the point that the validation at the end has found.

    Returns:
        The curve before the end, as rows of `metrics.csv`.
    """
    model = read_network(output / "model.ckpt")
    data = _held_out_data(settings)
    utterances = losses_of(model, data)
    curve = []
    for copy in consensus_copies(output, settings.train.all_learners):
        model.load_state_dict(copy.weights)
        curve.append(Point(*copy[:3], _mean(losses_of(model, data))))
    found = {"curve": [*curve, end], "utterances": utterances}
    write_json(output / HELD_OUT, found)
    return [point.row() for point in curve]


def _held_out_data(settings: Settings) -> SpeechData:
    return SpeechData(
        settings.directory("features"),
        settings.directory("states"),
        chunk=settings.train.chunk,
        streams=settings.streams,
    )


@torch.no_grad()
def losses_of(model: AcousticModel, data: SpeechData) -> dict[str, Spoken]:
    """The losses of all held-out utterances, on chunks as in validation."""
    model.eval()
    batches = [model.frame_losses(batch) for batch in data.val_dataloader()]
    losses = torch.cat([losses.sum(1) for losses, _ in batches]).double().numpy()
    frames = torch.cat([counted.sum(1) for _, counted in batches]).numpy()
    chunks = data.dataset("dev")
    position, _ = chunks.begins(np.arange(len(chunks)))
    return {
        str(chunks.store.ids[at]): Spoken(
            int(frames[position == at].sum()), float(losses[position == at].sum())
        )
        for at in np.unique(position)
    }


def read_held_out(path: Path) -> HeldOut:
    """The contents of a `held_out.json`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    utterances = {name: Spoken(*row) for name, row in found["utterances"].items()}
    return HeldOut(tuple(Point(*row) for row in found["curve"]), utterances)


def loss_interval(spoken: Mapping[str, Spoken]) -> Interval:
    """The interval of the loss per frame, 95 % of the draws."""
    return _central(_drawn([spoken])[:, 0])


def difference_interval(
    first: Mapping[str, Spoken], second: Mapping[str, Spoken]
) -> Interval:
    """The interval of the second loss less the first, on the same drawn utterances.

    Raises:
        ValueError: They are of other utterances.
    """
    if first.keys() != second.keys():
        apart = sorted(first.keys() ^ second.keys())
        raise ValueError(
            f"both trainings must have the same held-out utterances; {len(apart)} are "
            f"of one alone, the first: {apart[0]}"
        )
    drawn = _drawn([first, {name: second[name] for name in first}])
    return _central(drawn[:, 1] - drawn[:, 0])


def _mean(spoken: Mapping[str, Spoken]) -> float:
    frames = sum(one.frames for one in spoken.values())
    return sum(one.loss for one in spoken.values()) / max(1, frames)


def _drawn(systems: Sequence[Mapping[str, Spoken]]) -> np.ndarray:
    """Losses per frame [draws, systems], of the same utterances in each draw."""
    frames = np.array([one.frames for one in systems[0].values()])
    losses = np.array([[one.loss for one in own.values()] for own in systems])
    dice = np.random.default_rng(_SEED)
    weights = dice.multinomial(len(frames), [1 / len(frames)] * len(frames), _DRAWS)
    return weights @ losses.T / np.maximum(1, weights @ frames)[:, None]


def _central(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [(1 - _SHARE) / 2, (1 + _SHARE) / 2])
    return Interval(float(low), float(high))
