"""Writes docs/licences.md: under which licence is what this package needs.

    python installation/licences.py

What is read are the metadata of the installed packages: those that the core and the
extras for users need, and what these need in turn. Tools of developers are left out.
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
EXTRAS = ("asr", "onnx", "wandb", "notebooks")
_LONGEST = 60  # longer texts are whole licences, of which the classifier has the name
_NOTES = {
    "espeakng-loader": "not stated; it carries eSpeak NG, which is GPL-3.0-or-later",
    "soundfile": "its wheels carry libsndfile, which is LGPL-2.1-or-later",
}
_HEAD = """\
# Licences of what it needs

lightning-adpsgd itself is under the Apache License 2.0, and its wheel holds no code of
others. `pip` installs the packages below, each under its own licence, as their metadata
state it. `python installation/licences.py` writes this page from its environment.

- torch for NVIDIA GPUs installs libraries of NVIDIA, which are proprietary. Its builds
  for CPUs need none of them.
- The extra `asr` installs eSpeak NG, which is under the GPL. The package never imports
  it; recipes do, to speak the generated corpus and to pronounce words that a dictionary
  lacks.
"""


def main() -> int:
    """Writes the page."""
    PAGE.write_text("\n".join(lines()) + "\n", "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def lines() -> Iterator[str]:
    """The page."""
    yield _HEAD
    yield from ("| package | needed by | licence |", "|---|---|---|")
    seen: set[str] = set()
    for extra, direct in groups().items():
        for name in sorted(closure(direct) - seen):
            by = extra if name in direct else f"{extra}, through others"
            yield f"| {name} | {by} | {licence_of(name)} |"
            seen.add(name)


def groups() -> dict[str, set[str]]:
    """Direct needs of the core and of each extra for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    return {
        "core": names_of(project["dependencies"]),
        **{extra: names_of(extras[extra]) for extra in EXTRAS},
    }


def names_of(needs: Sequence[str]) -> set[str]:
    """Names of requirements that apply here, as indexes write them."""
    return {canonicalize_name(need.name) for need in applying(needs, "")}


def applying(needs: Sequence[str], extra: str) -> Iterator[Requirement]:
    """Those of a package's requirements that apply here with one of its extras."""
    for need in map(Requirement, needs):
        if need.marker is None or need.marker.evaluate({"extra": extra}):
            yield need


def closure(names: set[str]) -> set[str]:
    """These packages and all that they need, of those that are installed."""
    found: set[str] = set()
    left = [Requirement(name) for name in names]
    seen: set[str] = set()
    while left:
        need = left.pop()
        name = canonicalize_name(need.name)
        if str(need) in seen or (name not in names and not is_installed(name)):
            continue
        seen.add(str(need))
        found.add(name)
        for extra in ("", *need.extras):
            left += applying(needs_of(name), extra)
    return found


def needs_of(name: str) -> list[str]:
    """What an installed package needs, with all of its extras."""
    return (requires(name) or []) if is_installed(name) else []


def is_installed(name: str) -> bool:
    """Whether the environment has a package."""
    try:
        return bool(metadata(name))
    except PackageNotFoundError:
        return False


def licence_of(name: str) -> str:
    """What a package's metadata say of its licence, and what is known beside."""
    try:
        stated = stated_in(metadata(name))
    except PackageNotFoundError:
        stated = "not installed here"
    note = _NOTES.get(name, "")
    if not stated:
        return note or "not stated"
    return f"{stated}; {note}" if note else stated


def stated_in(found: Any) -> str:
    """An expression, else a short text, else the names of classifiers."""
    for key in ("License-Expression", "License"):
        text = found.get(key) or ""
        if text and text != "UNKNOWN" and len(text) <= _LONGEST and "\n" not in text:
            return text
    kinds = (one for one in found.get_all("Classifier") or [])
    return ", ".join(k.split(" :: ")[-1] for k in kinds if k.startswith("License ::"))


if __name__ == "__main__":
    sys.exit(main())
