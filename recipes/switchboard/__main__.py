"""The driver: `python -m recipes.switchboard --corpus TREE --out DIR`."""

import argparse
import sys
from pathlib import Path

from recipes.switchboard.command import run
from recipes.switchboard.settings import Settings, override
from recipes.switchboard.stages import STAGES


def parser() -> argparse.ArgumentParser:
    """The command line; its help lists the stages."""
    lines = "\n".join(f"  {stage.name:<9}{stage.purpose}" for stage in STAGES)
    names = [stage.name for stage in STAGES]
    arguments = argparse.ArgumentParser(
        prog="python -m recipes.switchboard",
        description="From a corpus of Switchboard's shape to a word error rate.",
        epilog=f"stages:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("--corpus", type=Path, required=True, help="folder that holds LDC97S62 etc.")
    add("--out", type=Path, required=True, help="experiment folder, made if absent")
    add("--from", dest="first", choices=names, metavar="STAGE", help="first stage")
    add("--to", dest="last", choices=names, metavar="STAGE", help="last stage")
    add("--redo", action="store_true", help="run these stages even if finished")
    add("--run", default="hadpsgd", help="name of the training run (%(default)s)")
    add("--seed", type=int, default=0, help="default %(default)s")
    add("--cores", type=int, default=2, help="processes to use (%(default)s)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.NAME=VALUE",
        help="change one setting of settings.py, for instance lm.order=2; repeatable",
    )
    return arguments


def settings_from(options: argparse.Namespace) -> Settings:
    """The settings that the command line asks for."""
    settings = Settings(
        corpus=options.corpus.resolve(),
        out=options.out.resolve(),
        run=options.run,
        seed=options.seed,
        cores=options.cores,
    )
    return override(settings, *options.set)


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 when they finished, 1 with a message when they cannot."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    try:
        settings = settings_from(options)
    except ValueError as error:
        command_line.error(str(error))
    return run(settings, options)


if __name__ == "__main__":
    sys.exit(main())
