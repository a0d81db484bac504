"""Stage `train`: one acoustic model, trained by several learners.

On one machine the learners are forked from a fresh process with one thread each, so
that nothing that earlier stages left behind in this process, threads least of all, is
forked with them. On several, torchrun or srun have begun them. Runs that differ in the
strategy alone start from the same weights and see the same number of samples. The
output holds `model.ckpt` (the consensus model, enough to decode), `best.ckpt` (that of
the validation with the lowest loss), `metrics.csv` and `summary.json`. An interrupted
training goes on from its last checkpoint.
"""

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_adpsgd.files import write_json
from recipes.hybrid.pipeline.runner import StageError
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.training.learners import make_strategy, run_learners
from recipes.hybrid.training.metrics import gather_figures, summarize_run, write_rows
from recipes.hybrid.training.saving import (
    best_epoch,
    keep_checkpoints,
    passing_on_sigterm,
)


def train(settings: Settings, output: Path) -> None:
    """Trains the run `settings.run` and leaves its model and figures in `output`.

    Raises:
        StageError: A learner failed (its message stands above), or there is no such
            strategy.
    """
    try:
        make_strategy(settings.train)
    except ValueError as error:
        raise StageError(str(error)) from error
    if settings.crew.size > 1:
        _train_here(settings, output)
    else:
        _train_in_process(settings, output)
    if settings.crew.leads:
        _publish(settings, output)


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
        raise StageError(
            f"training `{settings.run}` ended with status {process.exitcode}; the "
            "reason stands above. The same command goes on from the last checkpoint"
        )


def _join(process: BaseProcess) -> None:
    try:
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()


def _publish(settings: Settings, output: Path) -> None:
    """Gathers the figures of all attempts; the checkpoint gets its final name."""
    rows = gather_figures(output)
    write_rows(output / "metrics.csv", rows)
    summary = {
        "run": settings.run,
        "strategy": settings.train.strategy,
        "num_learners": settings.train.all_learners,
        **summarize_run(rows),
        **best_epoch(output),
    }
    write_json(output / "summary.json", summary)
    keep_checkpoints(output)
