"""The command line that all recipes of speech share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import CorpusError
from recipes.hybrid.pipeline.crew import Crew, environment_crew, shard_of
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError


class Recipe(NamedTuple):
    """What one recipe chooses.

    Attributes:
        name: name of the package: `python -m recipes.<name>`.
        description: one line.
        corpus: help of `--corpus`.
        stages: stages in the order in which they run.
        settings: assignments `group.name=value` beside the defaults.
        cores: default of `--cores`.
        unread: settings that no stage of it reads, which `--set` may not name.
    """

    name: str
    description: str
    corpus: str
    stages: Sequence[Stage]
    settings: tuple[str, ...] = ()
    cores: int = 2
    unread: tuple[str, ...] = ()


def parser(recipe: Recipe) -> argparse.ArgumentParser:
    """The command line of one recipe; its help lists the stages."""
    names = [stage.name for stage in recipe.stages]
    arguments = argparse.ArgumentParser(
        prog=f"python -m recipes.{recipe.name}",
        description=recipe.description,
        epilog=listed("stages", {s.name: s.purpose for s in recipe.stages}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("--corpus", type=Path, required=True, help=recipe.corpus)
    add("--out", type=Path, required=True, help="experiment folder, made if absent")
    named = "name of the training run (%(default)s); under torchrun only --name works"
    add("--run", "--name", default="hadpsgd", help=named)
    add("--from", dest="first", choices=names, metavar="STAGE", help="first stage")
    add("--to", dest="last", choices=names, metavar="STAGE", help="last stage")
    add("--redo", action="store_true", help="run these stages even if finished")
    add("--seed", type=int, default=0, help="draws everything (%(default)s)")
    cores = "processes of a stage (%(default)s)"
    add("--cores", type=int, default=recipe.cores, help=cores)
    add(
        "--nodes",
        type=int,
        default=1,
        help="machines on which torchrun or srun starts this command (%(default)s)",
    )
    add("--shard", metavar="K/N", help="run share K, from 0, of N")
    add(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.NAME=VALUE",
        help="change one setting of recipes/hybrid/pipeline/groups, for instance "
        "lm.order=2; repeatable",
    )
    return arguments


def listed(title: str, lines: dict[str, str]) -> str:
    """Names and what they mean, for the end of a help."""
    return "\n".join([f"{title}:", *(f"  {n:<17}{m}" for n, m in lines.items())])


def experiment(options: argparse.Namespace) -> Settings:
    """The settings that the options name, without those of `--set`."""
    return Settings(
        corpus=options.corpus.resolve(),
        out=options.out.resolve(),
        run=options.run,
        seed=options.seed,
        cores=options.cores,
        crew=_crew_of(options),
    )


def _crew_of(options: argparse.Namespace) -> Crew:
    if options.shard and options.nodes > 1:
        raise ValueError("`shard` and `nodes` must not be given together")
    return shard_of(options.shard) if options.shard else environment_crew(options.nodes)


def settings_from(recipe: Recipe, options: argparse.Namespace) -> Settings:
    """The settings that the recipe and its command line ask for.

    Raises:
        ValueError: A setting does not exist or is not read, or a value does not fit.
    """
    for name in (assignment.partition("=")[0] for assignment in options.set):
        if name in recipe.unread:
            raise ValueError(f"recipes.{recipe.name} does not read `{name}`: leave it")
    nodes = f"train.num_nodes={options.nodes}"
    return override(experiment(options), nodes, *recipe.settings, *options.set)


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 when they finished, 1 with a message when they cannot."""
    chosen = partial(settings_from, recipe)
    return run(parser(recipe), chosen, recipe.stages, arguments)


def run(
    command_line: argparse.ArgumentParser,
    settings_from: Callable[[argparse.Namespace], Settings],
    stages: Sequence[Stage],
    arguments: Sequence[str] | None,
) -> int:
    """Run the stages that a command line chooses; the exit status."""
    options = command_line.parse_args(arguments)
    try:
        settings = settings_from(options)
        _refuse_out_within(settings)
    except ValueError as error:
        command_line.error(str(error))
    first, last, redo = options.first, options.last, options.redo
    return status_of(lambda: run_stages(settings, stages, first, last, redo))


def _refuse_out_within(settings: Settings) -> None:
    """Refuses a folder of results that the next command would take for the corpus.

    Raises:
        ValueError: It lies in a folder of discs, and is not hidden there.
    """
    for root in settings.roots:
        if settings.out.is_relative_to(root):
            within = settings.out.relative_to(root)
            if not any(part.startswith(".") for part in within.parts):
                raise ValueError(
                    f"`out` must not lie in the corpus {root}, whose files are "
                    f"compared at each call, got {settings.out}"
                )


def status_of(work: Callable[[], object], *refusals: type[Exception]) -> int:
    """The exit status of a command that can be continued.

    Args:
        work: function that does the command's work.
        refusals: errors whose message is all that a reader needs, besides those of
            stages, of a corpus and of the system, such as a full disk.
    """
    try:
        work()
    except (StageError, CorpusError, OSError, *refusals) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0
