"""The programs in examples/, as functions from arguments to what they return."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples"


def module_of(name: str) -> ModuleType:
    """A program's module, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program_of(name: str) -> Callable[[list[str]], Any]:
    """The `main` of a program, which takes a command line."""
    return module_of(name).main
