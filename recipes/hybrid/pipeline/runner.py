"""The machinery of resumable stages: skip what is finished, continue what is not.

A stage is a function `stage(settings, output)`. It writes its files into `output`, a
temporary folder, and reads those of other stages from `settings.directory(name)`. When
the function returns, the folder gets a `.done` stamp and its final name, so a finished
stage exists whole or not at all. An interrupted stage finds its files in `output` at
its next attempt, if its fingerprint (`fingerprint.py`) is the same. It may continue
from them, or write everything again. If it has changed, files that it would have
continued from are not thrown away: the run stops and says so.
"""

import contextlib
import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.corpora.corpus import CorpusError
from lightning_adpsgd.files import write_json, written_whole
from recipes.hybrid.pipeline.contents import digests_in
from recipes.hybrid.pipeline.crew import PARTS, CrewError, FinishedError
from recipes.hybrid.pipeline.fingerprint import (
    KNOWN_AS,
    OUTPUTS,
    STAMP,
    check_earlier,
    differences,
    fingerprint_of,
    is_finished,
    known_as,
    read_alone,
    stamp_of,
)
from recipes.hybrid.pipeline.outputs import changes_since, refuse_altered
from recipes.hybrid.pipeline.preflight import problems
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError
from recipes.lock import locked

_CLAIM = ".fingerprint"
# What a disk says that has lost bytes, or has no room for them.
_LOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT}


def run_stages(
    settings: Settings,
    stages: Sequence[Stage],
    first: str | None = None,
    last: str | None = None,
    redo: bool = False,
) -> None:
    """Run the stages from `first` to `last`, both included, that are not finished.

    Args:
        settings: what to run, and where.
        stages: all stages, in the order in which they run.
        first: name of the first stage to run. The earlier ones must be finished if the
            chosen ones read them.
        last: name of the last stage to run.
        redo: whether the chosen stages run even if they are finished.

    Raises:
        StageError: An input is missing or was changed by hand, or a finished stage does
            not fit `settings`.
    """
    chosen = _chosen(stages, first, last)
    if redo and settings.crew.size > 1:
        raise StageError("`redo` must be off with several processes; use one for it")
    _check_before(settings, [stage for _, stage in chosen], redo)
    for stage in stages[: chosen[0][0]]:
        if stage.wanted(settings):
            check_earlier(stage, settings)
    for position, stage in chosen:
        label = f"[{position + 1}/{len(stages)}] {stage.name}"
        if not stage.wanted(settings):
            _say(settings, f"{label}: not asked for, skipped")
            continue
        fingerprint = fingerprint_of(stage, settings)
        refuse_altered(stage, settings)
        if not redo and is_finished(stage, settings, fingerprint):
            _say(settings, f"{label}: finished, skipped")
            if settings.crew.leads:
                _tidy(settings.directory(stage.name))
            continue
        for name in stage.needs:
            stamp_of(name, stage, settings)
        _say(settings, f"{label}: {stage.purpose}")
        if settings.crew.leads:
            seconds = _run(stage, settings, fingerprint, redo)
        else:
            seconds = _follow(stage, settings, fingerprint)
        _say(settings, f"{label}: done in {seconds:.1f} s")


def _check_before(settings: Settings, stages: Iterable[Stage], redo: bool) -> None:
    """Refuses problems that would stop a late stage, if that stage will run.

    Raises:
        StageError: Packages, devices or files are missing.
    """
    left = [
        stage.name
        for stage in stages
        if stage.wanted(settings)
        and (redo or not (settings.directory(stage.name) / STAMP).exists())
    ]
    if found := "; ".join(problems(settings, left)):
        raise StageError(found)


def _say(settings: Settings, line: str) -> None:
    if settings.crew.leads:
        print(line, flush=True)


def _chosen(
    stages: Sequence[Stage], first: str | None, last: str | None
) -> list[tuple[int, Stage]]:
    names = [stage.name for stage in stages]
    for argument, name in (("first", first), ("last", last)):
        if name is not None and name not in names:
            raise StageError(f"`{argument}` must be one of {names}, got {name!r}")
    start = names.index(first) if first else 0
    end = names.index(last) if last else len(names) - 1
    if start > end:
        raise StageError(f"stage {first!r} comes after {last!r}: nothing to run")
    return list(enumerate(stages))[start : end + 1]


def _run(
    stage: Stage, settings: Settings, fingerprint: dict[str, Any], redo: bool
) -> float:
    start = time.monotonic()
    target = settings.directory(stage.name)
    partial = target.parent / f".{target.name}.partial"
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f".{target.name}.lock"
    with locked(lock, _taken(lock)):
        # Another process may have finished it since it was looked for.
        if not redo and is_finished(stage, settings, fingerprint):
            return time.monotonic() - start
        if not redo:
            _refuse_to_lose(stage, partial, fingerprint)
        _claim(stage, partial, fingerprint)
        try:
            stage.run(settings, partial)
        except CrewError as error:
            raise StageError(str(error)) from error
        except (StageError, CorpusError, OSError):  # of which a reader sees one line
            raise
        except Exception as error:
            for note in changes_since(stage, settings):
                error.add_note(note)
            raise
        seconds = time.monotonic() - start
        _publish(stage, settings, partial, fingerprint, seconds)
    return seconds


def _follow(stage: Stage, settings: Settings, fingerprint: dict[str, Any]) -> float:
    """Does the share of a process that does not lead, and waits for the stamp.

    Raises:
        StageError: The leader does not begin, or does not finish.
    """
    start, crew = time.monotonic(), settings.crew
    target = settings.directory(stage.name)
    partial, stamp = target.parent / f".{target.name}.partial", target / STAMP
    about = f"process 0 to {{}} stage `{stage.name}` in {partial}"
    takes_part = stage.together == "all" or (
        stage.together == "machines" and crew.shares
    )
    try:
        if takes_part:
            claimed = functools.partial(_is_claimed, partial, fingerprint)
            with contextlib.suppress(FinishedError):
                crew.await_until(claimed, about.format("begin"), stamp.exists)
                _run_share(stage, settings, partial)
        crew.await_until(stamp.exists, about.format("finish"))
    except CrewError as error:
        raise StageError(str(error)) from error
    return time.monotonic() - start


def _run_share(stage: Stage, settings: Settings, partial: Path) -> None:
    """Runs the stage beside the leader, who may finish it and move its files."""
    try:
        stage.run(settings, partial)
    except FileNotFoundError:
        if partial.exists():
            raise


def _is_claimed(partial: Path, fingerprint: dict[str, Any]) -> bool:
    claim = partial / _CLAIM
    try:
        return claim.read_text() == json.dumps(fingerprint, sort_keys=True)
    except OSError:  # not there, or being replaced
        return False


def _refuse_to_lose(stage: Stage, partial: Path, fingerprint: dict[str, Any]) -> None:
    """Refuses to start over where an attempt with something else has left its work.

    Raises:
        StageError: It has; names what is different.
    """
    found = _claimed(partial, fingerprint)
    if found is None or not _has_work(stage, partial):
        return
    if changes := "; ".join(differences(found, fingerprint)):
        raise StageError(
            f"stage `{stage.name}` was interrupted with other settings or inputs, and "
            f"has left its work in {partial}: {changes}",
            f". Restore them to continue it; start over with --from {stage.name} "
            "--redo, or delete the folder",
        )


def _has_work(stage: Stage, partial: Path) -> bool:
    found = partial.glob(stage.work) if stage.work else ()
    return any(path.stat().st_size for path in found)


def _claim(stage: Stage, partial: Path, fingerprint: dict[str, Any]) -> None:
    if partial.exists() and _claimed(partial, fingerprint) != fingerprint:
        shutil.rmtree(partial)  # left by an attempt with other settings or inputs
    partial.mkdir(exist_ok=True)
    # Whole even on a full disk: without it, the next attempt removes the work.
    with written_whole(partial / _CLAIM) as file:
        file.write(json.dumps(fingerprint, sort_keys=True))


def _claimed(partial: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The fingerprint of an interrupted attempt, of what the stage depends on now."""
    try:
        found = json.loads((partial / _CLAIM).read_text())
        return read_alone(found, wanted)
    except (OSError, ValueError):  # none, or cut short
        return None


def _publish(
    stage: Stage,
    settings: Settings,
    partial: Path,
    fingerprint: dict[str, Any],
    seconds: float,
) -> None:
    """Stamps an attempt and gives it its final name.

    Claim and shares go last: cut off before, the next attempt continues from them.
    """
    own = (_CLAIM, STAMP, PARTS)  # a stamp, where an attempt was cut off after it
    stamp = {
        "fingerprint": fingerprint,
        OUTPUTS: digests_in(partial, own),
        "seconds": seconds,
        "finished": time.time(),
    }
    if known := known_as(stage, settings, stamp, own):
        stamp[KNOWN_AS] = known
    _sync_files(partial)
    write_json(partial / STAMP, stamp)
    target = settings.directory(stage.name)
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _tidy(target)


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _tidy(target: Path) -> None:
    """Removes what a finished stage needs no more, also if it was cut off before."""
    with contextlib.suppress(OSError):  # none, or a folder that can only be read
        (target / _CLAIM).unlink()
    for folder in (target / PARTS, _old(target)):
        shutil.rmtree(folder, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Writes all files to the disk: a stamp must not reach it before them."""
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            # Others write, and take away; or the bytes have no place.
            if error.errno in _LOST:
                error.filename = str(path)
                raise


def _taken(lock: Path) -> StageError:
    return StageError(
        f"another process runs this stage (it holds {lock}). Wait until that has "
        "ended, or choose another --out"
    )
