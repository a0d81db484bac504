"""`ckpt_path="last"` and `"hpc"`: the newest intact checkpoint.

Lightning takes the newest file, intact or not. Here a damaged file is skipped with a
warning that names it, and the next older one is tried. Files named `last`, or saved
when an island was preempted, come first, then all others in the same folders. The
newest file is the one with the most optimizer steps. File times only break ties,
because clocks may be set back. Files that no training can resume from come last.
Training never starts over if there are checkpoints and none is intact.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_adpsgd.strategy.checkpoints.format import DamagedCheckpoint, named
from lightning_adpsgd.strategy.checkpoints.io import (
    OF_NO_FILE,
    check_file,
    step_in_file,
)
from lightning_adpsgd.strategy.checkpoints.sharded import left_aside
from lightning_adpsgd.strategy.compatibility import callbacks_of

PREEMPTED = "preempted-"
"""The prefix of the files that an island saves when it is preempted."""


def whole_checkpoint_path(
    trainer: pl.Trainer,
    lightnings: Callable[..., Any],
    state_fn: Any,
    ckpt_path: Any,
    **arguments: Any,
) -> Any:
    """The path that a Trainer resumes from: Lightning's choice, or an intact one."""
    begins = ckpt_path is None and trainer.state.fn == "fit"
    # With this callback, Lightning takes no path for "last".
    is_asked = ckpt_path == "last" or (
        begins and bool(callbacks_of(trainer, OnExceptionCheckpoint))
    )
    lasts = _last_checkpoints(trainer) if is_asked else set()
    with warnings.catch_warnings():
        if lasts:
            # Lightning does not know the files that preempted islands save.
            warnings.filterwarnings("ignore", ".*no last checkpoint available")
        chosen = lightnings(state_fn, ckpt_path, **arguments)
    connector = trainer._checkpoint_connector
    # Its own path last: to know it, Lightning lists a folder, which may be far.
    if ckpt_path in (None, "hpc") and chosen and chosen == connector._hpc_resume_path:
        numbered = sorted(_numbered(trainer.default_root_dir), reverse=True)
        return newest_whole(path for _, path in numbered) if numbered else chosen
    return newest_whole(_in_order(lasts)) if lasts else chosen


def newest_whole(paths: Iterable[str]) -> str:
    """The first intact checkpoint; warns about each damaged one before it.

    Raises:
        DamagedCheckpoint: None is intact; the message says what is wrong with each.
        OSError: A file cannot be read for now, such as from a server that is away.
    """
    problems: list[str] = []
    for path in paths:
        try:
            check_file(path)
        except (DamagedCheckpoint, OSError) as error:
            if getattr(error, "errno", None) in OF_NO_FILE:
                raise named(error, path, "checked") from error
            what = str(error)
            if isinstance(error, FileNotFoundError) and os.path.islink(path):
                to = os.readlink(path)
                what = f"checkpoint {path} is a link to {to}, which is not there"
            problems.append(what)
            rank_zero_warn(f"Skipped: {problems[-1]}")
        else:
            return path
    raise DamagedCheckpoint(
        f"none of {len(problems)} checkpoints is intact: {'; '.join(problems)}. Remove "
        "them, or pass no `ckpt_path`, to start over"
    )


def _at_exceptions(trainer: pl.Trainer) -> list[str]:
    callbacks = callbacks_of(trainer, OnExceptionCheckpoint)
    found = (url_to_fs(str(one.ckpt_path)) for one in callbacks)
    # As a search of their folder names them.
    return [_with_protocol(fs, path) for fs, path in found if fs.exists(path)]


def _last_checkpoints(trainer: pl.Trainer) -> set[str]:
    """The files that may be meant.

    Dangling links count too, because they show that there was a checkpoint.
    """
    savers = callbacks_of(trainer, ModelCheckpoint)
    found = (
        _with_protocol(saver._fs, path)
        for saver in savers
        for path in saver._find_last_checkpoints(trainer)
    )
    aside = (
        str(path)
        for saver in savers
        for path in left_aside(_folder_of(saver, trainer), saver.CHECKPOINT_NAME_LAST)
    )
    return {*found, *aside, *_at_exceptions(trainer), *_preempted(trainer)}


def _in_order(lasts: set[str]) -> Iterator[str]:
    """Some files and all others in their folders, in the order of preference.

    What is remote is copied to be read, so the others are looked at in need alone.
    """
    unfit = list[str]()
    folders = {os.path.dirname(path) for path in lasts}
    beside = chain.from_iterable(_found(folder, "*.ckpt") for folder in folders)
    for paths in (lasts, {*beside} - lasts):
        ages = {path: _age(path) for path in paths}
        for path in sorted(ages, key=ages.__getitem__, reverse=True):
            if ages[path][0] < 0:
                unfit.append(path)
            else:
                yield path
    yield from unfit


def _preempted(trainer: pl.Trainer) -> list[str]:
    """The checkpoints that preempted islands saved."""
    savers = trainer.checkpoint_callbacks or [None]
    folders = {_folder_of(saver, trainer) for saver in savers}
    return [path for one in folders for path in _found(one, f"{PREEMPTED}*.ckpt")]


def _folder_of(saver: Checkpoint | None, trainer: pl.Trainer) -> str:
    """The folder into which a callback will save."""
    if isinstance(saver, ModelCheckpoint):  # which has no `dirpath` before its set-up
        name = f"_{ModelCheckpoint.__name__}__resolve_ckpt_dir"
        return str(getattr(saver, name)(trainer))
    return str(getattr(saver, "dirpath", None) or trainer.default_root_dir)


def _found(folder: str, pattern: str) -> list[str]:
    """The files of a folder, which may be a URL, whose names match."""
    system, place = url_to_fs(folder)
    if isinstance(system, LocalFileSystem):
        return [str(path) for path in Path(place).glob(pattern)]
    found = system.glob(f"{place}/{pattern}")
    return [_with_protocol(system, path) for path in found]


def _with_protocol(system: Any, path: str) -> str:
    is_local = isinstance(system, LocalFileSystem)
    return os.path.abspath(path) if is_local else system.unstrip_protocol(path)


def _age(path: str) -> tuple[float, int, str]:
    """Step, time and path, by which files are sorted.

    A damaged file is the newest, so that it is examined first and named.
    """
    try:
        step = step_in_file(path)
    except Exception:  # a damaged archive may raise anything
        number = math.inf
    else:
        number = -1 if step is None else step
    try:
        return number, os.lstat(path).st_mtime_ns, path
    except OSError:  # it is remote, or another process has removed it
        return number, 0, path


def _numbered(folder: str) -> Iterator[tuple[int, str]]:
    """The number and path of each checkpoint that was written at a SLURM signal."""
    for path in _found(folder, "hpc_ckpt_*.ckpt"):
        digits = Path(path).stem.removeprefix("hpc_ckpt_")
        if digits.isdecimal():
            yield int(digits), path
