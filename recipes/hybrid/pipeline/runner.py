"""The machinery of resumable stages: skip what is finished, continue what is not.

A stage is a function `stage(settings, output)`. It writes its files into `output`, a
temporary folder, and reads those of other stages from `settings.directory(name)`. When
the function returns, the folder gets a `.done` stamp and its final name, so a finished
stage exists whole or not at all. An interrupted stage finds its files in `output` at
its next attempt, if its dependencies have not changed. It may continue from them, or
write everything again. If they have changed, files that it would have continued from
are not thrown away: the run stops and says so.

The stamp holds a fingerprint: the settings that the stage depends on, digests of the
stages that it reads, and digests of the files that settings name (`contents.py`). If
they differ at a later call, the run stops and says which. A file that is gone by then,
or of which an older stamp has no digest, is not compared.

The digest of a stage is that of its fingerprint and its files, so that what is made
again, and is the same, leaves later stages valid. Stamps of version 0.2.0 have no
digests of files: a stage that reads one depends on all of it, with its times.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.discs import find_files
from lightning_adpsgd.files import printable, write_json, written_whole
from recipes.hybrid.pipeline.contents import (
    SOUND,
    WHAT_IS_READ,
    Contents,
    digest_of,
    digests_in,
    read_of,
)
from recipes.hybrid.pipeline.crew import PARTS, CrewError, FinishedError
from recipes.hybrid.pipeline.preflight import problems
from recipes.hybrid.pipeline.settings import Settings

STAMP = ".done"
_CLAIM = ".fingerprint"
_CONTENTS = ".contents.json"
_OUTPUTS = "outputs"
Together = Literal["leader", "machines", "all"]


class StageError(RuntimeError):
    """A stage cannot run: missing inputs, changed settings, or another process.

    Args:
        problem: what is wrong.
        remedy: what to do, by options of `command.py`. A command that has none of them
            replaces it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem + remedy)
        self.problem, self.remedy = problem, remedy


class Stage(NamedTuple):
    """One step of the way from audio to word error rate.

    Attributes:
        name: name of the stage and of its folder below `exp`.
        purpose: one line for the screen.
        run: function that writes the stage's files into the given folder.
        inputs: names of the stages whose output it reads. `lm/lm.arpa` means: of stage
            `lm`, only that file.
        depends: names of the settings that it depends on, besides its inputs:
            `kaldi`, a group, or `kaldi.graph`, one value.
        wanted: whether the settings ask for the stage; it is skipped otherwise.
        together: who of a crew runs it: "leader", "machines" (the first process of
            each, which does a share) or "all".
        edition: label to change when its code makes other output from the same inputs;
            finished stages of another edition count as changed.
        is_last: whether no other stage reads it, so that it can be run again alone.
        apart: single values, such as `kaldi.graph`, of the groups in `depends` that it
            does not read.
        needs: names of stages that must be finished, and that may be made again
            without making this one out of date.
        of_corpus: function for the files of the corpus that it reads beside sound;
            none: all files of the corpus count.
        work: glob pattern of the files from which an interrupted one continues, where
            they are hours of work; empty: starting over is cheap.
    """

    name: str
    purpose: str
    run: Callable[[Settings, Path], None]
    inputs: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    wanted: Callable[[Settings], bool] = lambda _: True
    together: Together = "leader"
    edition: str = ""
    is_last: bool = False
    apart: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    of_corpus: Callable[[Path], Iterable[Path]] | None = None
    work: str = ""


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
        StageError: An input is missing, or a finished stage does not fit `settings`.
    """
    chosen = _chosen(stages, first, last)
    if redo and settings.crew.size > 1:
        raise StageError("`redo` must be off with several processes; use one for it")
    _check_before(settings, [stage for _, stage in chosen])
    for stage in stages[: chosen[0][0]]:
        if stage.wanted(settings):
            _check_earlier(stage, settings)
    for position, stage in chosen:
        label = f"[{position + 1}/{len(stages)}] {stage.name}"
        if not stage.wanted(settings):
            _say(settings, f"{label}: not asked for, skipped")
            continue
        fingerprint = fingerprint_of(stage, settings)
        if not redo and _is_finished(stage, settings, fingerprint):
            _say(settings, f"{label}: finished, skipped")
            if settings.crew.leads:
                _tidy(settings.directory(stage.name))
            continue
        for name in stage.needs:
            _stamp_of(name, stage, settings)
        _say(settings, f"{label}: {stage.purpose}")
        if settings.crew.leads:
            seconds = _run(stage, settings, fingerprint, redo)
        else:
            seconds = _follow(stage, settings, fingerprint)
        _say(settings, f"{label}: done in {seconds:.1f} s")


def _check_before(settings: Settings, stages: Iterable[Stage]) -> None:
    """Refuses problems that would stop a late stage, unless that stage is finished.

    Raises:
        StageError: Packages or devices are missing.
    """
    left = [
        stage.name
        for stage in stages
        if stage.wanted(settings)
        and not (settings.directory(stage.name) / STAMP).exists()
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


def say(lines: Iterable[str]) -> None:
    """Print the lines of a stage's report; undecodable bytes of a path are escaped."""
    text = "\n".join(f"  {line}" for line in lines)
    print(printable(text), flush=True)


def fingerprint_of(stage: Stage, settings: Settings) -> dict[str, Any]:
    """Everything that decides the output of `stage`, as plain JSON values.

    Raises:
        StageError: A stage that it reads is not finished.
    """
    values = _settings_of(stage, settings)
    files = _corpus_files(stage, settings) if "corpus" in values else None
    if files is not None:
        values["corpus"] = {"path": str(settings.corpus)}
        if stage.of_corpus is None:
            values["corpus"]["files"] = _names_and_sizes(files)
    inputs = {
        stage_in(name): _input_digest(name, stage, settings) for name in stage.inputs
    }
    # What names no files has the fingerprint of before: an interrupted one goes on.
    contents = _contents_of(stage, settings, files)
    known = {"contents": contents} if contents else {}
    return {"settings": values, "inputs": inputs, **known}


def _contents_of(
    stage: Stage, settings: Settings, corpus: Sequence[Path] | None
) -> dict[str, str]:
    """Digests of the corpus, if it counts, and of the files that settings name.

    A corpus without files has one, too: the first file may be added later.
    """
    crew = settings.crew
    found = Contents(settings.out / "exp" / _CONTENTS, crew.leads)
    digests = {
        label: found.of(path, patterns)
        for name in stage.depends
        for label, path, patterns in read_of(settings, name)
        if label.partition("[")[0] not in stage.apart
    }
    if corpus is not None and stage.of_corpus is None:
        digests["corpus"] = found.of_files(corpus)
    elif corpus is not None:
        both = f"{found.of_files(corpus)} {_names_and_sizes(corpus)}"
        digests[f"corpus{WHAT_IS_READ}"] = digest_of(both.encode())
    found.save()
    return {label: one for label, one in digests.items() if one is not None}


def _settings_of(stage: Stage, settings: Settings) -> dict[str, Any]:
    values = {name: _plain(attrgetter(name)(settings)) for name in stage.depends}
    for name in stage.apart:
        group, _, value = name.partition(".")
        del values[group][value]
    values["edition"] = stage.edition or None
    # Without values of None, so that a new optional setting makes no stamp invalid.
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.loads(json.dumps(value, default=str))


def _corpus_files(stage: Stage, settings: Settings) -> list[Path]:
    try:
        files = find_files(settings.roots, Skipped())
    except CorpusError as error:
        raise StageError(f"--corpus: {error}") from error
    if stage.of_corpus is None:
        return [file.path for file in files]
    sound = {file.path for file in files if Path(file.name).suffix in SOUND}
    # By the names under which the stage opens them: `find_files` may have entered a
    # folder of several names by another one.
    read = {path for path in stage.of_corpus(settings.corpus) if path.is_file()}
    return sorted(sound | read)


def _names_and_sizes(files: Iterable[Path]) -> str:
    lines = [f"{path} {path.stat().st_size}" for path in files]
    content = "\n".join(lines).encode(errors="surrogateescape")
    return digest_of(content)


def stage_in(name: str) -> str:
    """The stage of an element of `Stage.inputs`, which may name one of its files."""
    return name.partition("/")[0]


def _input_digest(name: str, stage: Stage, settings: Settings) -> str:
    content = _stamp_of(stage_in(name), stage, settings).read_bytes()
    stamp, (_, _, file) = json.loads(content), name.partition("/")
    if _OUTPUTS not in stamp:  # of an earlier version
        return digest_of(content)
    if file:
        return stamp[_OUTPUTS].get(file, "absent")
    read = json.dumps([stamp["fingerprint"], stamp[_OUTPUTS]], sort_keys=True)
    return digest_of(read.encode())


def _stamp_of(name: str, stage: Stage, settings: Settings) -> Path:
    """The stamp of a stage that another one reads.

    Raises:
        StageError: It is not finished.
    """
    stamp = settings.directory(name) / STAMP
    made_by = settings.stage_of(name)
    if not stamp.exists():
        raise StageError(
            f"stage `{stage.name}` reads `{made_by}`, which is not finished in "
            f"{settings.directory(name)}",
            f"; start with --from {made_by}",
        )
    return stamp


def _is_finished(stage: Stage, settings: Settings, wanted: dict[str, Any]) -> bool:
    stamp = settings.directory(stage.name) / STAMP
    if not stamp.exists():
        return False
    content = json.loads(stamp.read_text())
    if (before := _as_before(stage, content)) != stage:
        wanted = fingerprint_of(before, settings)
    _refuse_changes(stage, stamp, content["fingerprint"], wanted)
    return True


def _as_before(stage: Stage, stamp: dict[str, Any]) -> Stage:
    """The stage as a stamp of an earlier version knows it."""
    if _OUTPUTS not in stamp:  # it read groups as a whole
        groups = tuple(name for name in stage.depends if "." not in name)
        stage = stage._replace(depends=groups, apart=())
    if "files" in stamp["fingerprint"]["settings"].get("corpus", {}):
        stage = stage._replace(of_corpus=None)
    return stage


def _check_earlier(stage: Stage, settings: Settings) -> None:
    """Refuse changed settings of a stage before the chosen ones, if it is finished.

    Its corpus may be gone by then, and so may stages that are no longer read.
    """
    stamp = settings.directory(stage.name) / STAMP
    if not stamp.exists():
        return
    content = json.loads(stamp.read_text())
    found, stage = content["fingerprint"], _as_before(stage, content)
    wanted = {
        "settings": {**_settings_of(stage, settings), "corpus": None},
        "inputs": {
            stage_in(name): _input_digest(name, stage, settings)
            for name in stage.inputs
            if (settings.directory(stage_in(name)) / STAMP).exists()
        },
        "contents": _contents_of(stage, settings, None),
    }
    comparable = {
        "settings": {**found["settings"], "corpus": None},
        "inputs": {name: found["inputs"].get(name) for name in wanted["inputs"]},
        "contents": found.get("contents", {}),
    }
    _refuse_changes(stage, stamp, comparable, wanted)


def _refuse_changes(
    stage: Stage, stamp: Path, found: dict[str, Any], wanted: dict[str, Any]
) -> None:
    if changes := "; ".join(_differences(_read_alone(found, wanted), wanted)):
        raise StageError(
            f"stage `{stage.name}` in {stamp.parent} was made with other settings or "
            f"inputs: {changes}",
            f". Run it again with {_again(stage)}, or choose another --out",
        )


def _again(stage: Stage) -> str:
    """How to run it again: alone where no later one reads it, or if that is wanted."""
    if stage.is_last:
        return f"--from {stage.name} --to {stage.name} --redo"
    return (
        f"--from {stage.name} --redo (add --to {stage.name} to keep later stages that "
        "do not read it)"
    )


def _read_alone(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Without what the stage depended on in an earlier version, and does no more.

    Files without a digest then are taken for those of now.
    """
    of_settings = {
        group: _known_to(wanted["settings"].get(group), values)
        for group, values in found["settings"].items()
    }
    alone = {
        "settings": of_settings,
        "inputs": _known_to(wanted["inputs"], found["inputs"]),
    }
    if "contents" in wanted:
        now = wanted["contents"]
        alone["contents"] = now | _known_to(now, found.get("contents", {}))
    return alone


def _known_to(wanted: Any, values: Any) -> Any:
    """The values of a group without those that it no longer has."""
    if not isinstance(values, dict) or not isinstance(wanted, dict):
        return values
    return {name: value for name, value in values.items() if name in wanted}


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        if found != wanted:
            yield f"{name} was {found}, is {wanted}"
        return
    for key in sorted({*found, *wanted}):
        path = f"{name}.{key}" if name else key
        yield from _differences(
            found.get(key, "absent"), wanted.get(key, "absent"), path
        )


def _run(
    stage: Stage, settings: Settings, fingerprint: dict[str, Any], redo: bool
) -> float:
    start = time.monotonic()
    target = settings.directory(stage.name)
    partial = target.parent / f".{target.name}.partial"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{target.name}.lock"):
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
            for note in _changes_since(stage, settings):
                error.add_note(note)
            raise
        seconds = time.monotonic() - start
        _publish(partial, target, fingerprint, seconds)
    return seconds


def _changes_since(stage: Stage, settings: Settings) -> Iterator[str]:
    """Names files that a stage reads and that are not as the stage before left them.

    One may be damaged, or changed on purpose: either may be why the stage failed.
    """
    for name in dict.fromkeys(map(stage_in, (*stage.inputs, *stage.needs))):
        folder, made_by = settings.directory(name), settings.stage_of(name)
        with contextlib.suppress(OSError):  # the folder has gone
            left = json.loads((folder / STAMP).read_text()).get(_OUTPUTS, {})
            for file, digest in digests_in(folder, ("wandb",)).items():
                if left.get(file, digest) != digest:
                    yield (
                        f"{folder / file} is not as stage `{made_by}` left it. If it "
                        f"is damaged, run with --from {made_by} --to {made_by} --redo"
                    )


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
    if changes := "; ".join(_differences(found, fingerprint)):
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
        return _read_alone(found, wanted)
    except (OSError, ValueError):  # none, or cut short
        return None


def _publish(
    partial: Path, target: Path, fingerprint: dict[str, Any], seconds: float
) -> None:
    """Stamps an attempt and gives it its final name.

    Claim and shares go last: cut off before, the next attempt continues from them.
    """
    own = (_CLAIM, STAMP, PARTS)  # a stamp, where an attempt was cut off after it
    stamp = {
        "fingerprint": fingerprint,
        _OUTPUTS: digests_in(partial, own),
        "seconds": seconds,
        "finished": time.time(),
    }
    _sync_files(partial)
    write_json(partial / STAMP, stamp)
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
        with contextlib.suppress(OSError):  # what others write, and take away
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(
                f"another process runs this stage (it holds {lock})"
            ) from None
        yield
