"""Builds the wheels of this project: those of setuptools, and one module more.

torch imports that module in the middle of its own import. An editable wheel of
setuptools holds no modules, only the way to the clone, and once the clone is moved
`import torch` would fail. So the module itself goes into every wheel.

What setuptools leaves in the clone (`*.egg-info`) is taken away: it names that module
as an entry point, which torch would look for in vain wherever the clone is on the path
and no wheel is installed.
"""

import base64
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from setuptools import build_meta as _setuptools

_CLONE = Path(__file__).parents[1]
_MODULE = Path(__file__).with_name("lightning_adpsgd_names.py")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _tidy(hook: Callable[_P, _R]) -> Callable[_P, _R]:
    """A hook that leaves no entry point in the clone."""

    @wraps(hook)
    def tidied(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return hook(*args, **kwargs)
        finally:
            for left in _CLONE.glob("*.egg-info"):
                shutil.rmtree(left, ignore_errors=True)

    return tidied


# The hooks that stay setuptools' own.
build_sdist = _tidy(_setuptools.build_sdist)
get_requires_for_build_editable = _tidy(_setuptools.get_requires_for_build_editable)
get_requires_for_build_sdist = _tidy(_setuptools.get_requires_for_build_sdist)
get_requires_for_build_wheel = _tidy(_setuptools.get_requires_for_build_wheel)
prepare_metadata_for_build_editable = _tidy(
    _setuptools.prepare_metadata_for_build_editable
)
prepare_metadata_for_build_wheel = _tidy(_setuptools.prepare_metadata_for_build_wheel)


@_tidy
def build_wheel(wheel_directory: str, *arguments: Any, **options: Any) -> str:
    """Builds a wheel; PEP 517."""
    name = _setuptools.build_wheel(wheel_directory, *arguments, **options)
    return _with_module(wheel_directory, name)


@_tidy
def build_editable(wheel_directory: str, *arguments: Any, **options: Any) -> str:
    """Builds an editable wheel; PEP 660."""
    name = _setuptools.build_editable(wheel_directory, *arguments, **options)
    return _with_module(wheel_directory, name)


def _with_module(folder: str, name: str) -> str:
    old, new = Path(folder, name), Path(folder, f"{name}.new")
    content = _MODULE.read_bytes()
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        target.writestr(_MODULE.name, content, zipfile.ZIP_DEFLATED)
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data = _row(content) + data
            target.writestr(entry, data)
    os.replace(new, old)
    return name


def _row(content: bytes) -> bytes:
    """What a wheel's table of contents says of the module."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return b"%s,sha256=%s,%d\n" % (_MODULE.name.encode(), digest, len(content))
