"""`python -m recipes.hybrid.planning`: hours, disk and memory of the real corpora.

`--measure RUN` reads from the stamps of a run how long the stages named took, of how
many frames, and keeps the costs of one core in `costs.json`. `--rates RUN` measures
there the parts of stages that depend on models (`rates`). Without either, the tables of
docs/switchboard.md are computed from that file and from what the papers report of their
GPUs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_adpsgd.files import written_whole
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.planning.costs import UNITS, keep_costs, measured
from recipes.hybrid.planning.tables import page, with_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the tables."""
    given = parser().parse_args(arguments)
    if given.measure:
        costs = {
            stage: measured(given.measure / "exp", stage, given.cores, given.iterations)
            for stage in given.stages
        }
        keep_costs(costs, given.machine)
    if given.rates:
        from recipes.hybrid.planning.rates import rates  # loads torch and a decoder

        keep_costs(dict(rates(_as_the_papers(given.rates))), given.machine)
    if given.page:
        text = with_tables(given.page.read_text(encoding="utf-8"))
        with written_whole(given.page) as file:
            file.write(text)
    else:
        print("\n".join(page()))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(prog="python -m recipes.hybrid.planning")
    add = arguments.add_argument
    add("--measure", type=Path, metavar="RUN", help="folder of a run")
    add("--rates", type=Path, metavar="RUN", help="folder of a run with `adapt` done")
    stages = "stages to measure (all of them)"
    add("--stages", nargs="+", choices=UNITS, default=[*UNITS], help=stages)
    add("--cores", type=int, default=1, help="cores that the run used (%(default)s)")
    flat = "iterations of its flat start (%(default)s)"
    add("--iterations", type=int, default=14, help=flat)
    add("--page", type=Path, help="put the tables into this page")
    add("--machine", default="", help="machine and date, in words (none)")
    return arguments


def _as_the_papers(folder: Path) -> Settings:
    """A run with the papers' streams and width of the search; one core."""
    settings = Settings(corpus=folder, out=folder, states="triphone")
    return override(settings, "adapt.streams=both", "decode.max_active=7000", "cores=1")


if __name__ == "__main__":
    sys.exit(main())
