"""The command line: what its help says."""

import argparse
from collections.abc import Iterator

import pytest

from lightning_adpsgd import __main__ as core
from lightning_adpsgd.asr import __main__ as speech


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands, from the parser that chooses one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@pytest.mark.parametrize("parser", [core._parser(), speech.parser()], ids=["", "asr"])
def test_every_option_has_a_help_with_its_default(
    parser: argparse.ArgumentParser,
) -> None:
    chosen = [*commands(parser)]
    assert chosen
    for command in chosen:
        for action in command._actions:
            where = f"{command.prog} {action.dest}"
            assert action.help, where
            has_default = action.default not in (None, argparse.SUPPRESS)
            assert not has_default or "default" in action.help, where
