"""The command line that the recipes of the papers share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.switchboard.papers import RUNS, with_papers
from recipes.switchboard.pipeline import StageError, run_stages
from recipes.switchboard.settings import Settings, override
from recipes.switchboard.stages import STAGES


class Recipe(NamedTuple):
    """What one recipe chooses.

    Attributes:
        name: Of the package: `python -m recipes.<name>`.
        description: One line.
        sources: What is trained on.
        folders: Options that name further folders of discs, with their help.
        settings: Assignments beside those of `papers.py`.
    """

    name: str
    description: str
    sources: tuple[str, ...]
    folders: dict[str, str]
    settings: tuple[str, ...] = ()


def parser(recipe: Recipe) -> argparse.ArgumentParser:
    """The command line of one recipe; its help lists runs and stages."""
    runs = "\n".join(f"  {name:<15}{run.meaning}" for name, run in RUNS.items())
    stages = "\n".join(f"  {stage.name:<15}{stage.purpose}" for stage in STAGES)
    names = [stage.name for stage in STAGES]
    arguments = argparse.ArgumentParser(
        prog=f"python -m recipes.{recipe.name}",
        description=recipe.description,
        epilog=f"runs:\n{runs}\n\nstages:\n{stages}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("--corpus", type=Path, required=True, help="folder of the discs, all or some")
    for option, meaning in recipe.folders.items():
        add(f"--{option}", type=Path, nargs="+", default=[], help=meaning)
    add("--out", type=Path, required=True, help="experiment folder, made if absent")
    add("--run", default="hadpsgd", choices=RUNS, metavar="RUN", help="(%(default)s)")
    add("--learners", type=int, default=8, help="GPUs of this machine (%(default)s)")
    add(
        "--super-learners",
        type=int,
        default=4,
        help="groups that they make under hadpsgd (%(default)s)",
    )
    add("--cmudict", type=Path, help="CMUdict, for words that MS-State's lacks")
    add("--from", dest="first", choices=names, metavar="STAGE", help="first stage")
    add("--to", dest="last", choices=names, metavar="STAGE", help="last stage")
    add("--redo", action="store_true", help="run these stages even if finished")
    add("--seed", type=int, default=0, help="default %(default)s")
    add("--cores", type=int, default=16, help="processes of a stage (%(default)s)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.NAME=VALUE",
        help="change one setting of recipes/switchboard/settings.py; repeatable",
    )
    return arguments


def settings_from(recipe: Recipe, options: argparse.Namespace) -> Settings:
    """The settings that the recipe and its command line ask for.

    Raises:
        ValueError: A setting that does not exist, or a value out of range.
    """
    folders = [f for name in recipe.folders for f in getattr(options, name)]
    settings = Settings(
        corpus=options.corpus.resolve(),
        discs=tuple(folder.resolve() for folder in folders),
        out=options.out.resolve(),
        sources=recipe.sources,
        run=options.run,
        seed=options.seed,
        cores=options.cores,
    )
    settings = with_papers(settings, options.learners, options.super_learners)
    if options.cmudict is not None:
        settings = override(settings, f"lexicon.cmudict={options.cmudict.resolve()}")
    return override(settings, *recipe.settings, *options.set)


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 when they finished, 1 with a message when they cannot."""
    command_line = parser(recipe)
    options = command_line.parse_args(arguments)
    try:
        settings = settings_from(recipe, options)
    except ValueError as error:
        command_line.error(str(error))
    return run(settings, options)


def run(settings: Settings, options: argparse.Namespace, stages=STAGES) -> int:
    """Run the chosen stages and say what is wrong, if anything is."""

    def work() -> None:
        run_stages(settings, stages, options.first, options.last, options.redo)

    return status_of(work)


def status_of(work: Callable[[], object], *refusals: type[Exception]) -> int:
    """Does the work of a command that can be continued; its exit status.

    Args:
        work: What the command does.
        refusals: Errors whose message is all that a reader needs, besides those of
            stages and of the system: a full disk, a folder that may not be written to.
    """
    try:
        work()
    except (StageError, OSError, *refusals) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0
