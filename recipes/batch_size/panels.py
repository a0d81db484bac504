"""Loss against batch size across runs, as a run of Weights & Biases with its charts.

    python -m recipes.batch_size.panels runs/demo
    python -m recipes.batch_size.panels --project me/lightning-adpsgd

The rows come from the `*.run.csv` below a folder, or from a project on the server. The
run has a table of them (`runs`), and a line for each algorithm of its lowest loss at
each global batch. It has the same of the word error rate where there are some. It is
offline unless the user is logged in, as every run of this package.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning_adpsgd.callbacks.loggers import PROJECT, make_wandb_logger
from lightning_adpsgd.callbacks.runs import Run, fetch_runs, read_runs
from recipes.hybrid.training.tracking import offline_runs, sync_line

Points = dict[str, list[tuple[int, float]]]
CHARTS = {"best_loss": "held-out loss", "wer": "word error rate"}


def best_by_batch(runs: Iterable[Run], figure: str) -> Points:
    """Global batch and lowest value of a figure, by algorithm; without diverged runs.

    Args:
        runs: Rows of runs.
        figure: Name of a field of `Run`, such as "best_loss".
    """
    lowest: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        value = getattr(run, figure)
        if run.global_batch is None or value is None or run.diverged:
            continue
        known = lowest[run.algorithm].get(run.global_batch, value)
        lowest[run.algorithm][run.global_batch] = min(known, value)
    return {name: sorted(points.items()) for name, points in sorted(lowest.items())}


def write_panels(runs: Sequence[Run], folder: Path, project: str = PROJECT) -> bool:
    """Writes the run with the table and the charts.

    Args:
        runs: Rows of runs, at least one.
        folder: Folder for its files.
        project: Name of the project that it belongs to.

    Returns:
        Whether it was written; False without the package.

    Raises:
        ValueError: There is no run.
    """
    if not runs:
        raise ValueError("`runs` must hold at least one, got none")
    logger = make_wandb_logger(folder, "loss against batch", project, job_type="report")
    if logger is None:
        return False
    run: Any = logger.experiment
    run.log({"runs": _table(runs), **_charts(runs)})
    run.finish()
    return True


def _table(runs: Iterable[Run]) -> Any:
    import wandb

    names: list[Any] = [field.name for field in fields(Run)]
    rows = [list(asdict(run).values()) for run in runs]
    return wandb.Table(columns=names, data=rows, allow_mixed_types=True)


def _charts(runs: Sequence[Run]) -> dict[str, Any]:
    import wandb

    charts = {}
    for figure, title in CHARTS.items():
        if points := best_by_batch(runs, figure):
            charts[f"{figure}_against_batch"] = wandb.plot.line_series(
                xs=[[batch for batch, _ in several] for several in points.values()],
                ys=[[value for _, value in several] for several in points.values()],
                keys=[*points],
                title=f"{title} against batch",
                xname="global batch",
            )
    return charts


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the run; 1 with a message where there is nothing to show."""
    given = _parser().parse_args(arguments)
    found = fetch_runs(given.project) if given.project else read_runs(given.folder)
    if not found:
        print("error: no rows of runs were found", file=sys.stderr)
        return 1
    _, _, name = (given.project or PROJECT).rpartition("/")
    if not write_panels(found, given.folder, name):
        print("error: the package wandb is needed", file=sys.stderr)
        return 1
    print(f"{len(found)} runs; {sync_line(offline_runs([given.folder])[-1:])}")
    return 0


def _parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m recipes.batch_size.panels")
    add = arguments.add_argument
    add(
        "folder",
        type=Path,
        nargs="?",
        default=Path("runs"),
        help="folder of runs (%(default)s)",
    )
    add("--project", help="entity/project on the server, in place of the folder")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
