"""The command line that the recipes of the papers share."""

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from recipes.hybrid.pipeline import command
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages import STAGES
from recipes.switchboard.papers import RUNS, with_papers


class Recipe(NamedTuple):
    """What a recipe of the papers chooses.

    Attributes:
        name: name of the package: `python -m recipes.<name>`.
        description: one line.
        sources: sources of the training speech.
        folders: options that name further folders of discs, with their help.
        settings: assignments beside those of `papers.py`.
    """

    name: str
    description: str
    sources: tuple[str, ...]
    folders: dict[str, str]
    settings: tuple[str, ...] = ()


def parser(recipe: Recipe) -> argparse.ArgumentParser:
    """The command line of one recipe; its help lists runs and stages."""
    arguments = command.parser(
        command.Recipe(
            name=recipe.name,
            description=recipe.description,
            corpus="folder of the discs, all or some",
            stages=STAGES,
            cores=16,
        )
    )
    runs = command.listed("runs", {name: run.meaning for name, run in RUNS.items()})
    arguments.epilog = f"{runs}\n\n{arguments.epilog}"
    add = arguments.add_argument
    for option, meaning in recipe.folders.items():
        add(f"--{option}", type=Path, nargs="+", default=[], help=meaning)
    add("--learners", type=int, default=8, help="GPUs of each machine (%(default)s)")
    add(
        "--super-learners",
        type=int,
        default=4,
        help="groups that they make under hadpsgd (%(default)s)",
    )
    add("--cmudict", type=Path, help="CMUdict, for words that MS-State's lacks")
    return arguments


def settings_from(recipe: Recipe, options: argparse.Namespace) -> Settings:
    """The settings that the recipe and its command line ask for.

    Raises:
        ValueError: A setting does not exist, or a value is out of range.
    """
    folders = [f for name in recipe.folders for f in getattr(options, name)]
    settings = dataclasses.replace(
        command.experiment(options),
        discs=tuple(folder.resolve() for folder in folders),
        sources=recipe.sources,
    )
    settings = with_papers(
        settings, options.learners, options.super_learners, options.nodes
    )
    if options.cmudict is not None:
        settings = override(settings, f"lexicon.cmudict={options.cmudict.resolve()}")
    return override(settings, *recipe.settings, *options.set)


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 when they finished, 1 with a message when they cannot."""
    chosen = partial(settings_from, recipe)
    return command.run(parser(recipe), chosen, STAGES, arguments)
