"""Builds the wheels of this project: those of setuptools, and one module more.

torch imports that module in the middle of its own import. An editable wheel of
setuptools holds no modules, only the way to the clone, and once the clone is moved
`import torch` would fail. So the module itself goes into every wheel.
"""

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools

# The hooks that stay setuptools' own.
build_sdist = _setuptools.build_sdist
get_requires_for_build_editable = _setuptools.get_requires_for_build_editable
get_requires_for_build_sdist = _setuptools.get_requires_for_build_sdist
get_requires_for_build_wheel = _setuptools.get_requires_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel

_MODULE = Path(__file__).with_name("lightning_adpsgd_names.py")


def build_wheel(wheel_directory: str, *arguments: Any, **options: Any) -> str:
    """Builds a wheel; PEP 517."""
    name = _setuptools.build_wheel(wheel_directory, *arguments, **options)
    return _with_module(wheel_directory, name)


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
