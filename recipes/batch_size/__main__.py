"""Command line: `python -m recipes.batch_size [--out FOLDER] [--quick]`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from recipes.batch_size.settings import (
    ALGORITHMS,
    CLASSIFIER,
    EXTRA,
    QUICK,
    SPEECH,
    Settings,
)
from recipes.hybrid.pipeline.command import status_of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(
        prog="python -m recipes.batch_size",
        description="How large a batch does each algorithm scale to? Trains virtual "
        "learners on one core. Interrupted, the same command goes on; finished, it "
        "writes tables and plots again.",
    )
    add = arguments.add_argument
    folder = "folder of runs and tables (%(default)s)"
    add("--out", type=Path, default=Path("runs/batch_size"), help=folder)
    workloads, trained = ("speech", "classifier"), "what is trained (%(default)s)"
    add("--workload", choices=workloads, default="speech", help=trained)
    add("--quick", action="store_true", help="a small sweep of the classifier")
    add(
        "--data",
        type=Path,
        help="folder of a finished recipes.demo or recipes.switchboard, for its "
        "features and alignment; prepared below --out if left out",
    )
    speech = "minutes of speech to generate (%(default)s)"
    add("--minutes", type=float, default=24.0, help=speech)
    add(
        "--layers", type=int, default=1, help="layers of the speech model (%(default)s)"
    )
    add(
        "--hidden",
        type=int,
        default=32,
        help="cells of each layer per direction (%(default)s)",
    )
    add("--cores", type=int, default=2, help="cores that prepare speech (%(default)s)")
    for name, kind, what in _DIALS:
        add(f"--{name.replace('_', '-')}", type=kind, help=what)
    return arguments


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_DIALS: tuple[tuple[str, Callable[[str], object], str], ...] = (
    (
        "algorithms",
        _names,
        f"default {','.join(ALGORITHMS)}; also rdpsgd, {','.join(EXTRA)}; "
        "+clip at the end of a name searches a norm too",
    ),
    ("baseline_batch", int, "global batch of SSGD that all are compared with"),
    ("batches", _numbers, "global batches, 128,256 say"),
    ("seeds", int, "number of seeds"),
    ("min_rate", float, "lowest peak learning rate"),
    ("max_rate", float, "highest peak learning rate"),
    ("num_learners", int, "number of learners of each algorithm"),
    ("super_learner_size", int, "learners in each super-learner of hadpsgd"),
    ("epochs", int, "passes over the samples"),
    ("warmup_epochs", float, "epochs of warm-up, of these passes"),
    ("rise", int, "peak rate over the first; 1: no warm-up"),
    ("min_clip", float, "lowest norm of clipped algorithms"),
    ("max_clip", float, "highest norm of clipped algorithms"),
    ("decay", float, "factor of the rate per epoch after the warm-up"),
    ("margins", _rates, "parts by which a loss may be larger, 0.1,0.2 say"),
    ("mixing_gain", float, "part of each average that is taken, if asynchronous"),
    ("exchange", float, "time for the weights to cross a link, in steps"),
    ("spread", float, "standard deviation of the logarithm of step times"),
)


def settings_of(options: argparse.Namespace) -> Settings:
    """The workload's settings, with what the command line changes.

    Raises:
        ValueError: A value is out of its bounds.
    """
    chosen = CLASSIFIER if options.workload == "classifier" else SPEECH
    settings = QUICK if options.quick else chosen
    given = {name: getattr(options, name) for name, *_ in _DIALS}
    return replace(settings, **{k: v for k, v in given.items() if v is not None})


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; 0 when the report is written, 1 with a message if it cannot be."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    try:
        settings = settings_of(options)
    except ValueError as error:
        command_line.error(str(error))
    return status_of(lambda: _run(options, settings), ValueError)


def _run(options: argparse.Namespace, settings: Settings) -> None:
    import torch  # not needed for the help, as what these import

    from recipes.batch_size.prepare import prepared_speech
    from recipes.batch_size.report import write_report
    from recipes.batch_size.sweep import run_sweep
    from recipes.batch_size.workloads import classifier, speech

    torch.set_num_threads(1)  # the gradients are too small for two
    if options.quick:
        workload = classifier(num_train=2048, num_held_out=256)
    elif options.workload == "classifier":
        workload = classifier()
    else:
        folders = prepared_speech(
            options.data, options.out, options.minutes, options.cores
        )
        workload = speech(*folders, options.layers, options.hidden)
    sweep = run_sweep(workload, settings, options.out)
    write_report(options.out, sweep, workload)


if __name__ == "__main__":
    sys.exit(main())
