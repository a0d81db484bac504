"""Writes what the command lines say of themselves into a page.

A block of the language `help` names a program. Its help takes the place of the block,
followed by a section for each of its commands.
"""

import argparse
import importlib
import os
import re
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

BLOCK = re.compile(r"^```help\npython -m (?P<module>[\w.]+)\n```$", re.M)


def with_help(markdown: str) -> str:
    """The page with the help of all programs that it names."""
    return BLOCK.sub(lambda block: "\n\n".join(_sections(block["module"])), markdown)


def _sections(module: str) -> Iterator[str]:
    program = _parser_of(module)
    yield _help(program)
    for name, command in _commands_of(program).items():
        yield f"### {name}\n\n{_help(command)}"


class _Found(Exception):
    """Carries a parser out of the program that has made it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def _parser_of(module: str) -> argparse.ArgumentParser:
    """The parser of a program, which has no other way to it in common with the rest."""

    def stop(self: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Found(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            importlib.import_module(f"{module}.__main__").main([])
        except _Found as found:
            return found.parser
    raise ValueError(f"`python -m {module}` reads no command line with argparse")


def _commands_of(
    parser: argparse.ArgumentParser,
) -> dict[str, argparse.ArgumentParser]:
    kind = argparse._SubParsersAction
    return {
        name: command
        for action in parser._actions
        if isinstance(action, kind)
        for name, command in action.choices.items()
    }


def _help(parser: argparse.ArgumentParser) -> str:
    with mock.patch.dict(os.environ, COLUMNS="88"):
        return f"```text\n{parser.format_help().rstrip()}\n```"
