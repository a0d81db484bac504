"""Command line: `python -m recipes.demo [--corpus TREE] [--out runs/demo]`."""

import argparse
import dataclasses
import sys
from pathlib import Path

from recipes.hybrid.pipeline.command import status_of
from recipes.hybrid.pipeline.groups import (
    DecodeSettings,
    RaceSettings,
    TrainSettings,
)
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings

# Generated speech gains nothing in epochs 11 to 16: held-out losses of 0.932 and 0.937
# after ten (ddp, hadpsgd), 0.927 and 0.929 after sixteen, and no fewer word errors.
SHORT_TRAINING = TrainSettings(epochs=10)
# The last epoch is the best or close to it, and to decode another takes ten seconds.
SHORT_DECODING = DecodeSettings(best_epoch=False)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(
        prog="python -m recipes.demo",
        description="From audio to word error rate, trained by DDP and by H-ADPSGD, "
        "and a race of the same seconds with a slow learner. "
        "Interrupted, the same command goes on; finished, it writes the report again.",
    )
    add = arguments.add_argument
    add(
        "--corpus", type=Path, help="tree of Switchboard's shape; generated if left out"
    )
    folder = "folder of the demo (%(default)s)"
    add("--out", type=Path, default=Path("runs/demo"), help=folder)
    add(
        "--minutes",
        type=float,
        default=24.0,
        help="generated minutes of training (%(default)s)",
    )
    add(
        "--test-minutes",
        type=float,
        default=5.0,
        help="generated minutes of test (%(default)s)",
    )
    add(
        "--race-seconds",
        type=float,
        default=45.0,
        help="training time of each method with a slow learner; 0: no race "
        "(%(default)s)",
    )
    add("--seed", type=int, default=1, help="draws everything (%(default)s)")
    add("--cores", type=int, default=2, help="processes of a stage (%(default)s)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.NAME=VALUE",
        help="change a setting, for instance train.epochs=4; repeatable",
    )
    return arguments


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when the report is written, 1 with a message if it cannot be."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    try:
        RaceSettings(seconds=options.race_seconds)  # before an hour of stages
        settings = override(settings_of(options), *options.set)
    except ValueError as error:
        command_line.error(str(error))
    minutes = None if options.corpus else (options.minutes, options.test_minutes)
    return _run(settings, minutes, options.race_seconds)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings before those of `--set`; generated speech has a short training."""
    out = options.out.resolve()
    settings = Settings(
        corpus=(options.corpus or out / "corpus").resolve(),
        out=out,
        seed=options.seed,
        cores=options.cores,
    )
    if options.corpus:
        return settings
    return dataclasses.replace(settings, train=SHORT_TRAINING, decode=SHORT_DECODING)


def _run(
    settings: Settings, minutes: tuple[float, float] | None, race_seconds: float
) -> int:
    from recipes.demo.demo import run_demo  # torch is not needed for the help

    return status_of(lambda: run_demo(settings, minutes, race_seconds), ValueError)


if __name__ == "__main__":
    sys.exit(main())
