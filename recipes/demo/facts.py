"""Where and from what a result comes: machine, versions, commit, command."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from recipes.hybrid.pipeline.groups import TrainSettings
from recipes.hybrid.pipeline.runner import STAMP
from recipes.hybrid.pipeline.settings import RUN_STAGES, Settings
from recipes.hybrid.stages import STAGES

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "lightning", "torchaudio", "kaldifst", "kaldi-decoder")


def facts_of(runs: Sequence[Settings], corpus: str) -> dict[str, str]:
    """Everything that a reader needs to measure again.

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


def provenance() -> dict[str, str]:
    """When, how, from which commit and on which machine."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "command": " ".join([Path(sys.executable).name, *_command()]),
        "commit": _commit(),
        "machine": _machine(),
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


def _command() -> list[str]:
    return sys.orig_argv[1:]


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "not in a git checkout"
    return commit + (", with changes that are not committed" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
