"""The choice between Lightning's import names, `lightning` and `pytorch_lightning`.

Lightning is published twice, as `lightning` and as `pytorch_lightning` with
`lightning_fabric`. The code is the same, but a Trainer of one accepts no strategy of
the other, so a process uses the strategies of only one. The modules of this package
import `lightning`. If a program uses the other name, they are compiled with that name
instead. `ImportNames` chooses when the first of them is imported.

This module is loaded in the middle of torch's own import: standard library only.
"""

import ast
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import version
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

LIGHTNING, OTHER = "lightning", "pytorch_lightning"
ROOTS = {LIGHTNING: LIGHTNING, OTHER: OTHER, "lightning_fabric": OTHER}
"""The packages that a program may import, each with the name that it belongs to."""

_RENAMED = (
    ("lightning.pytorch", OTHER),
    ("lightning.fabric", "lightning_fabric"),
    (LIGHTNING, OTHER),
)
_PACKAGE = __name__.partition(".")[0]
_INSIDE = (_PACKAGE, "importlib", "_frozen_importlib", "pkgutil")
_IMPORTS_LIGHTNING = re.compile(rb"^\s*(?:from|import) lightning\b", re.MULTILINE)


class ImportNames(MetaPathFinder):
    """An import hook that chooses a name once, then finds the modules that use it.

    Attributes:
        chosen: `LIGHTNING` or `OTHER`; None until a module needs the choice.
    """

    chosen: str | None = None

    def choose(self, asked: str | None = None) -> str:
        """Chooses the name that this process uses.

        It is the name asked for, else the only one in the file that imports this
        package, else the only one already imported, else the first one installed. A
        choice of `lightning` warns if the other name is imported, too.

        Raises:
            ImportError: The other name is in use, or neither is installed.
        """
        if self.chosen is None:
            self.chosen = asked or _only(_named_by_the_importer()) or _only(sys.modules)
            self.chosen = self.chosen or _installed()
            if asked is None and OTHER in sys.modules and self.chosen == LIGHTNING:
                warnings.warn(refusal(LIGHTNING, OTHER), stacklevel=2)
        if asked not in (None, self.chosen):
            raise ImportError(refusal(self.chosen, asked))
        return self.chosen

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Finds a module for Python's import system; None: the next finder does."""
        if self.chosen == LIGHTNING or not fullname.startswith(f"{_PACKAGE}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        loader = _RenamingLoader(fullname, spec.loader.path)
        if not loader.imports_lightning() or self.choose() == LIGHTNING:
            return None
        spec.loader = loader
        return spec


def import_names() -> ImportNames:
    """The import hook of this process; the first call puts it before all others."""
    for finder in sys.meta_path:
        if isinstance(finder, ImportNames):
            return finder
    sys.meta_path.insert(0, finder := ImportNames())
    return finder


@cache  # 2 ms of each start of a learner are the metadata of what is installed
def lightning_version() -> str:
    """The version of Lightning that this process uses."""
    return version(import_names().choose().replace("_", "-"))


def refusal(chosen: str | None, other: str | None) -> str:
    """The message for a Trainer that the strategies do not fit, with the remedy."""
    return (
        f"lightning_adpsgd uses `{chosen}` in this process, and its strategies do not "
        f"fit a Trainer or Fabric of `{other}`: use only one of them in a program, "
        "and import it before lightning_adpsgd"
    )


class _RenamingLoader(SourceFileLoader):
    """Compiles a module with the other import names, without caching its bytecode."""

    def imports_lightning(self) -> bool:
        return bool(_IMPORTS_LIGHTNING.search(self.get_data(self.path)))

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                node.module = _renamed(node.module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    alias.name = _renamed(alias.name)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _renamed(module: str) -> str:
    for old, new in _RENAMED:
        if module == old or module.startswith(f"{old}."):
            return new + module[len(old) :]
    return module


def _only(names: Iterable[str]) -> str | None:
    given = set(names)
    found = {root for name, root in ROOTS.items() if name in given}
    return found.pop() if len(found) == 1 else None


def _named_by_the_importer() -> Iterator[str]:
    """The names in the file that imports this package, above that import or below.

    Below matters, because sorted imports have this package before `pytorch_lightning`.
    """
    frame: Any = sys._getframe()
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        frame = frame.f_back
    names = frame.f_code.co_names if frame else ()
    return (name.partition(".")[0] for name in names)


def _installed() -> str:
    for name in (LIGHTNING, OTHER):
        if find_spec(name) is not None:
            return name
    raise ImportError("lightning_adpsgd needs Lightning: `pip install lightning`")
