"""`python -m recipes.librispeech --corpus data --out runs/librispeech`."""

import argparse
import sys
from collections.abc import Sequence

from recipes.librispeech.stages import STAGES
from recipes.switchboard import __main__ as switchboard
from recipes.switchboard.command import run
from recipes.switchboard.settings import Settings, override

SETTINGS = ("prepare.max_repeats=0", "lexicon.synthesise=true", "lexicon.min_count=1")


def parser() -> argparse.ArgumentParser:
    """The command line, that of recipes/switchboard."""
    arguments = switchboard.parser()
    arguments.prog = "python -m recipes.librispeech"
    arguments.description = (
        "From LibriSpeech, at 8 kHz, to the word error rates of its test splits."
    )
    return arguments


def settings_from(options: argparse.Namespace) -> Settings:
    """The settings that the command line asks for.

    Raises:
        ValueError: A setting that does not exist, or a value that does not fit.
    """
    assignments, options.set = options.set, []
    return override(switchboard.settings_from(options), *SETTINGS, *assignments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 when they finished, 1 with a message when they cannot."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    try:
        settings = settings_from(options)
    except ValueError as error:
        command_line.error(str(error))
    return run(settings, options, STAGES)


if __name__ == "__main__":
    sys.exit(main())
