"""Where and from what a result comes: machine, versions, commit, command."""

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from recipes.switchboard.settings import TrainSettings

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "lightning", "torchaudio", "kaldifst", "kaldi-decoder", "jiwer")


def facts_of(
    train: TrainSettings, corpus: str, seconds: Mapping[str, float]
) -> dict[str, str]:
    """Everything that a reader needs to measure again.

    Args:
        train: How the runs were trained.
        corpus: What the speech is, in words.
        seconds: Time of each part of the demo.
    """
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "command": " ".join([Path(sys.executable).name, *_command()]),
        "commit": _commit(),
        "machine": _machine(),
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
        "time": ", ".join(f"{name} {s:.0f} s" for name, s in seconds.items())
        + f"; together {sum(seconds.values()):.0f} s",
    }


def _schedule(train: TrainSettings) -> str:
    global_batch = train.batch_size * train.num_learners
    peak = train.base_rate * global_batch / train.base_batch
    return (
        f"global batch {global_batch}; rate {train.base_rate:g} to {peak:g} in "
        f"{train.warmup_epochs:g} epochs, then x {train.decay:.3g} per epoch"
    )


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
