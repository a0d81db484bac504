"""The provenance of a result: machine, versions, commit, command."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from recipes.hybrid.pipeline.fingerprint import STAMP
from recipes.hybrid.pipeline.groups import TrainSettings
from recipes.hybrid.pipeline.provenance import provenance
from recipes.hybrid.pipeline.settings import RUN_STAGES, Settings
from recipes.hybrid.stages import STAGES

_PACKAGES = ("torch", "lightning", "torchaudio", "kaldifst", "kaldi-decoder")


def facts_of(runs: Sequence[Settings], corpus: str) -> dict[str, str]:
    """Everything that a reader needs to repeat the measurement.

    Args:
        runs: settings of each run; they differ in name and strategy alone.
        corpus: description of the speech.
    """
    train = runs[0].train
    return {
        **provenance(),
        "packages": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        "corpus": corpus,
        "model": (
            f"{train.num_layers} bidirectional LSTM layers of 2 x {train.hidden_size}, "
            f"bottleneck {train.bottleneck_size}, chunks of {train.chunk} frames"
        ),
        "training": (
            f"{train.epochs} epochs, {train.num_learners} learners of one thread, "
            f"{train.batch_size} chunks per learner and step, momentum {train.momentum}"
        ),
        "schedule": _schedule(train),
        "time": _times(runs),
    }


def _schedule(train: TrainSettings) -> str:
    global_batch = train.batch_size * train.num_learners
    peak = train.base_rate * global_batch / train.base_batch
    return (
        f"global batch {global_batch}; rate {train.base_rate:g} to {peak:g} in "
        f"{train.warmup_epochs:g} epochs, then x {train.decay:.3g} per epoch"
    )


def _times(runs: Sequence[Settings]) -> str:
    """Seconds of every finished stage, as its stamp has them."""
    parts = []
    for stage in STAGES:
        repeated = stage.name in RUN_STAGES
        for run in runs if repeated else runs[:1]:
            seconds = _seconds(run.directory(stage.name) / STAMP)
            name = f"{stage.name} ({run.run})" if repeated else stage.name
            parts += [f"{name} {seconds:.0f} s"] if seconds >= 0.5 else []
    return ", ".join(parts)


def _seconds(stamp: Path) -> float:
    return json.loads(stamp.read_text())["seconds"] if stamp.exists() else 0.0
