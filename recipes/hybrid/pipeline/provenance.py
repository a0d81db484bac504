"""Where a result comes from: date, command, commit, machine."""

import datetime
import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def provenance() -> dict[str, str]:
    """When, how, from which commit and on which machine."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "command": " ".join([Path(sys.executable).name, *_command()]),
        "commit": _commit(),
        "machine": _machine(),
    }


def _command() -> list[str]:
    """What the user began; a learner is a process that another one has spawned."""
    if multiprocessing.parent_process() is None:
        return sys.orig_argv[1:]
    main, *arguments = sys.argv  # those of the process that spawned it
    path = Path(main)
    if path.name != "__main__.py" or not path.is_relative_to(_ROOT):
        return sys.argv
    return ["-m", ".".join(path.parent.relative_to(_ROOT).parts), *arguments]


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "not in a git checkout"
    return commit + (", with changes that are not committed" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
