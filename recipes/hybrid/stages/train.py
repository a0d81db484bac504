"""Stage `train`: one acoustic model, trained by several learners.

On one machine the learners, with one thread each, are forked from a fresh process, so
that they inherit no threads or other state from earlier stages. On several machines,
torchrun or srun has started them. Runs that differ only in the strategy start from the
same weights and see the same number of samples. The output has `model.ckpt` (the
consensus model, which suffices for decoding), `best.ckpt` (from the validation with the
lowest loss), `metrics.csv` and `summary.json`. An interrupted training continues from
its last checkpoint.

A training for a fixed time (`race.seconds`) also writes `held_out.json`. It starts over
when interrupted, because a pause would change the learners' relative positions.
"""

import dataclasses
import multiprocessing
import shutil
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_adpsgd.files import write_json
from recipes.hybrid.pipeline.crew import FinishedError
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError, say
from recipes.hybrid.training.beside import others_since_now
from recipes.hybrid.training.held_out import Point, write_held_out
from recipes.hybrid.training.learners import make_strategy, run_learners
from recipes.hybrid.training.metrics import (
    by_step,
    gather_figures,
    summarize_run,
    write_rows,
)
from recipes.hybrid.training.saving import (
    best_epoch,
    has_ended,
    keep_checkpoints,
    passing_on_sigterm,
)
from recipes.hybrid.training.timed import COPIES


def train(settings: Settings, output: Path) -> None:
    """Trains the run `settings.run` and leaves its model and figures in `output`.

    Raises:
        StageError: A learner failed (its message was printed before), or the strategy
            does not exist.
        FinishedError: The leader found the training at its end, and finished the stage.
    """
    try:
        make_strategy(settings.train)
    except ValueError as error:
        raise StageError(str(error)) from error
    if settings.timed is not None and settings.crew.leads:
        _forget(output)
    _warn_of_lost_epochs(settings)
    busy = None
    if not has_ended(output):
        # The leader found the end, and comes to no rendezvous.
        if not settings.crew.leads and not output.exists():
            raise FinishedError
        others = others_since_now()
        _learn(settings, output)
        busy = others() if settings.crew.size == 1 else None
    if settings.crew.leads:
        _publish(settings, output, busy)


def _learn(settings: Settings, output: Path) -> None:
    if settings.crew.size > 1:
        _train_here(settings, output)
    else:
        _train_in_process(settings, output)


def _warn_of_lost_epochs(settings: Settings) -> None:
    epochs, every = settings.train.epochs, settings.train.validate_every
    if settings.crew.leads and epochs % every:
        left = epochs - epochs % every
        say(
            [
                f"WARNING: `train.validate_every` ({every}) does not divide "
                f"`train.epochs` ({epochs}): the model of epoch {left} will be left"
            ]
        )


def _forget(output: Path) -> None:
    """Removes what an interrupted attempt has left."""
    for path in output.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix == ".ckpt":
            path.unlink()


def _train_here(settings: Settings, output: Path) -> None:
    """This process is a learner, which torchrun or srun have begun."""
    try:
        run_learners(settings, output)
    except SIGTERMException as error:
        raise StageError(f"training `{settings.run}` got SIGTERM") from error


def _train_in_process(settings: Settings, output: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=run_learners, args=(settings, output), name="train"
    )
    process.start()
    with passing_on_sigterm(process):
        _join(process)
    if process.exitcode != 0:
        goes_on = "goes on from the last checkpoint"
        raise StageError(
            f"training `{settings.run}` ended with status {process.exitcode}; the "
            "reason stands above. The same command "
            f"{'begins it anew' if settings.timed else goes_on}"
        )


def _join(process: BaseProcess) -> None:
    try:
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()


def _publish(settings: Settings, output: Path, others: float | None) -> None:
    """Gathers the figures of all attempts; the checkpoint gets its final name.

    Args:
        settings: settings of the experiment.
        output: folder of the training.
        others: cores that other programs kept busy during the last attempt.
    """
    rows = gather_figures(output)
    summary = {
        "run": settings.run,
        "strategy": settings.train.strategy,
        "num_learners": settings.train.all_learners,
        **summarize_run(rows),
        **best_epoch(output),
        "other_cores": others,
    }
    if (race := settings.timed) is not None:
        summary |= dataclasses.asdict(race)
    write_rows(output / "metrics.csv", rows)
    write_json(output / "summary.json", summary)
    keep_checkpoints(output)
    if race is not None:
        curve = write_held_out(settings, output, _end(summary))
        write_rows(output / "metrics.csv", by_step([*rows, *curve]))
        shutil.rmtree(output / COPIES, ignore_errors=True)


def _end(summary: Mapping[str, Any]) -> Point:
    names = ("steps", "train_seconds", "global_samples", "frame_loss")
    return Point(*(summary[name] for name in names))
