"""What the pages tell a reader to write and to type fits the code."""

import argparse
import ast
import contextlib
import importlib.util
import inspect
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn, get_args
from unittest import mock

import pytest

pytest.importorskip("mkdocs")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
# The log names commands as they were called at the time.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
PAGES += [*ROOT.glob("recipes/**/README.md"), *ROOT.glob("examples/**/*.md")]
PAGES += [ROOT / "notebooks" / "README.md", ROOT / "benchmarks" / "README.md"]
PAGES.remove(ROOT / "docs" / "log.md")
NAMES = [page.relative_to(ROOT).as_posix() for page in sorted(PAGES)]

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
IN_LINE = re.compile(r"`([^`\n]+)`")
# What a shell sets for a command alone, and the place of an interpreter.
PREFIX = re.compile(r"^(?:[A-Z_]+=\S+ +)*(?:\$ )?(?:\.venv/bin/)?")
OURS = ("lightning_adpsgd", "recipes", "benchmarks", "notebooks", "tests")


def blocks(page: str, *languages: str) -> Iterator[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for _, language, block in FENCED.findall(text):
        if language in languages:
            yield textwrap.dedent(block)


def commands(page: str) -> Iterator[str]:
    """The lines of a page that begin with a command of ours, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    shell = [*blocks(page, "bash", "sh", "console"), *INDENTED.findall(text)]
    code = re.sub(r"\s*\\\n\s*", " ", "\n".join(shell))
    for line in (*code.splitlines(), *IN_LINE.findall(FENCED.sub("", text))):
        command = PREFIX.sub("", line.strip())
        if re.match(r"(make [a-z]|python -m \w|python \w+/|pip install )", command):
            yield re.split(r"\s{2,}|\s#", command)[0]


# --- programs


def programs() -> Iterator[tuple[str, ast.Module]]:
    """Every program of a page, which must compile, with the page's name."""
    for page in NAMES:
        for block in blocks(page, "python", "py"):
            compile(block, page, "exec")
            yield page, ast.parse(block, page)


def test_programs_of_pages_are_python() -> None:
    assert len(list(programs())) > 20


def test_programs_of_pages_import_what_exists() -> None:
    for page, program in programs():
        for node in ast.walk(program):
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
                exec(compile(ast.unparse(node), page, "exec"), {})


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def test_arguments_in_the_programs_of_pages_exist() -> None:
    for page, program in programs():
        assert unknown_arguments(program) == set(), page


def test_an_argument_that_does_not_exist_is_told() -> None:
    call = "Trainer(strategy=HADPSGDStrategy('ring', lag=2, find_unused_parameters=1))"
    assert unknown_arguments(ast.parse(call)) == {"lag"}


def unknown_arguments(program: ast.Module) -> set[str]:
    """Arguments that a program gives to what users call most, and that do not exist."""
    found: set[str] = set()
    for call in ast.walk(program):
        if isinstance(call, ast.Call):
            known = _arguments_of(ast.unparse(call.func))
            given = {word.arg for word in call.keywords if word.arg}
            found |= given - known if known else set()
    return found


@cache
def _arguments_of(name: str) -> frozenset[str] | None:
    """The arguments of what users call most; none of other things."""
    homes = ("lightning_adpsgd", "lightning_adpsgd.callbacks", "lightning.pytorch")
    if name.rpartition(".")[2] == "Trainer":
        name = "Trainer"
    found = (getattr(import_module(home), name, None) for home in homes)
    callable_ = next((each for each in found if callable(each)), None)
    if callable_ is None:
        return None
    parameters = inspect.signature(callable_).parameters
    arguments = set(parameters)
    if "options" in arguments:  # what a simulated cluster takes by name
        (named,) = get_args(parameters["options"].annotation)
        arguments |= set(named.__annotations__)
    if "ddp" in arguments:  # what a strategy hands to Lightning's
        ddp = import_module("lightning.pytorch.strategies").DDPStrategy
        distributed = import_module("torch.nn.parallel").DistributedDataParallel
        arguments |= set(inspect.signature(ddp).parameters)
        arguments |= set(inspect.signature(distributed).parameters)
    return frozenset(arguments)


@pytest.mark.parametrize(
    "page", ["docs/add-your-corpus.md", "docs/prediction.md", "docs/work-sharing.md"]
)
def test_a_short_program_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones run in tests of their own pages."""
    pytest.importorskip("soundfile")  # the extra `asr`
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(page, "python")
    exec(program, {"__name__": "program"})


def test_settings_of_pages_are_yaml() -> None:
    for page in NAMES:
        for block in blocks(page, "yaml", "yml"):
            assert list(yaml.safe_load_all(block)), page


# --- commands


def test_commands_of_pages_are_understood() -> None:
    told = ((page, c, complaint_about(c)) for page in NAMES for c in commands(page))
    assert [each for each in told if each[-1] is not None] == []


def complaint_about(command: str) -> str | None:
    """What is wrong with a command; none if it is understood."""
    if "..." in command or "…" in command:  # a part of one
        command = command.partition("...")[0].partition("…")[0]
    match shlex.split(command, comments=True):
        case ["make", *words]:
            return _about_make(words)
        case ["pip", "install", *words]:
            return _about_extras(words)
        case ["python", "-m", module, *words] if _is_ours(module):
            return _about_program(module, words)
        case ["python", path, *_] if "/" in path and not (ROOT / path).exists():
            return f"{path} is not there"
    return None


def _about_make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = {*re.findall(r"^([a-z-]+):", text, re.M)}
    known |= {*re.findall(r"^([A-Z]+) \??:?=", text, re.M)}
    unknown = {word.partition("=")[0] for word in words} - known
    return f"no target or variable {sorted(unknown)}" if unknown else None


def _about_extras(words: list[str]) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = set(project["project"]["optional-dependencies"])
    ours = re.compile(r"(?:\.|lightning-adpsgd)\[([\w,]+)\]")
    named = {n for w in words if (m := ours.match(w)) for n in m[1].split(",")}
    return f"no extra {sorted(named - known)}" if named - known else None


def _about_program(module: str, words: list[str]) -> str | None:
    spec = importlib.util.find_spec(module)
    if spec is None:
        return "no such module"
    if not spec.submodule_search_locations or not words:
        return None
    try:
        _parse(module, words)
    except ValueError as error:
        # In a sentence a command stands for what it does, without what it needs.
        is_name = "are required" in str(error) and "--" not in " ".join(words)
        return None if is_name else str(error)
    if module == "benchmarks" and "race" not in words:
        known = import_module("benchmarks.__main__").names()
        unknown = [word for word in words if not word.startswith("-")]
        return f"no benchmark {unknown}" if set(unknown) - set(known) else None
    return None


class _Parsed(Exception):
    """Ends a program that has understood its command line."""


def _parse(module: str, words: list[str]) -> None:
    """Lets a program read its command line; raises a ValueError if it refuses it."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, given: list[str] | None) -> None:
        parse(parser, given)
        raise _Parsed

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(message)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        mock.patch.object(argparse.ArgumentParser, "error", error),
        contextlib.suppress(_Parsed),
    ):
        import_module(f"{module}.__main__").main(words)
        pytest.fail(f"`python -m {module}` reads no command line with argparse")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("make lunch", "lunch"),
        ("make demo KORPUS=x", "KORPUS"),
        ("pip install -e .[dve]", "dve"),
        ("python -m benchmarks.gone", "no such module"),
        ("python -m lightning_adpsgd credentials --uot x", "--out"),
        ("python -m benchmarks race --quik", "--quik"),
        ("python -m benchmarks tree lunch", "lunch"),
        ("python examples/gone.py", "not there"),
    ],
)
def test_commands_that_do_not_exist_are_told(command: str, part: str) -> None:
    assert part in (complaint_about(command) or "")
