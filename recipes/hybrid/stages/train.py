"""Stage `train`: one acoustic model, trained by several learners on this machine.

The learners are forked from a fresh process with one thread each, so that nothing that
earlier stages left behind in this process, threads least of all, is forked with them.
Runs that differ in the strategy alone start from the same weights and see the same
number of samples. The output holds `model.ckpt` (the consensus model, enough to
decode), `best.ckpt` (that of the validation with the lowest loss), `metrics.csv` and
`summary.json`. An interrupted training goes on from its last checkpoint.
"""

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

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
    _publish(settings, output)


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
        "num_learners": settings.train.num_learners,
        **summarize_run(rows),
        **best_epoch(output),
    }
    write_json(output / "summary.json", summary)
    keep_checkpoints(output)
