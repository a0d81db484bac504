"""The fingerprint of a stage: all that decides its output.

It holds the settings that the stage depends on, digests of the stages that it reads,
and digests of the files that settings name (`contents.py`). The stamp of a finished
stage keeps it. If it differs at a later call, the run stops and says which. A file that
is gone by then, or of which an older stamp has no digest, is not compared.

The digest of a stage is that of its fingerprint and its files, so that what is made
again, and is the same, leaves later stages valid. Stamps of version 0.2.0 have no
digests of files: a stage that reads one depends on all of it, with its times.

An earlier version took down a fingerprint in another form. A stage of it that is made
again, and is the same, keeps the digest by which later stages know it (`known_as`).
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.discs import find_files
from recipes.hybrid.pipeline.contents import (
    SOUND,
    WHAT_IS_READ,
    Contents,
    digest_of,
    digests_in,
    read_of,
)
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError, stage_in

STAMP, OUTPUTS = ".done", "outputs"
"""The file of a finished stage, and its entry with the digests of the stage's files."""
KNOWN_AS = "known_as"
"""The entry of a stamp with the digests of the stage ("") and of files of it that later
stages know, where the stamp itself gives others."""
_RECORDINGS = "recordings"
_NAMED = 3  # files of a corpus
CONTENTS = ".contents.json"
"""The file, beside the stages, of the digests that were found before."""


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
    found = Contents(settings.out / "exp" / CONTENTS, crew.leads)
    digests = {
        label: found.of(path, patterns)
        for name in stage.depends
        for label, path, patterns in read_of(settings, name)
        if label.partition("[")[0] not in stage.apart
    }
    if corpus is not None and stage.of_corpus is None:
        digests["corpus"] = found.of_files(corpus)
    elif corpus is not None:
        if stage.of_sound is not None:
            digests[_RECORDINGS] = found.of_files(stage.of_sound(settings.corpus))
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


def _input_digest(name: str, stage: Stage, settings: Settings) -> str:
    content = stamp_of(stage_in(name), stage, settings).read_bytes()
    return _digest_in(content, name.partition("/")[2])


def _digest_in(content: bytes, file: str) -> str:
    """The digest of a stage, or of a file of it, by the content of its stamp."""
    stamp = json.loads(content)
    if OUTPUTS not in stamp:  # of an earlier version
        return digest_of(content)
    if file in (known := stamp.get(KNOWN_AS, {})):
        return known[file]
    if file:
        return stamp[OUTPUTS].get(file, "absent")
    read = json.dumps([stamp["fingerprint"], stamp[OUTPUTS]], sort_keys=True)
    return digest_of(read.encode())


def stamp_of(name: str, stage: Stage, settings: Settings) -> Path:
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


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The stamp of a stage's folder; None: the stage is not finished."""
    stamp = folder / STAMP
    return json.loads(stamp.read_text()) if stamp.exists() else None


def is_finished(stage: Stage, settings: Settings, wanted: dict[str, Any]) -> bool:
    """Whether a stage is finished, with the fingerprint that is wanted.

    Raises:
        StageError: It is, with another one; names what is different.
    """
    folder = settings.directory(stage.name)
    if (stamp := read_stamp(folder)) is None:
        return False
    if (before := _as_before(stage, stamp)) != stage:
        wanted = fingerprint_of(before, settings)
    wanted = _without_gone_sound(stage, settings, wanted)
    newer = partial(_newer, stage, settings, folder / STAMP)
    _refuse_changes(stage, folder, stamp["fingerprint"], wanted, newer)
    return True


def known_as(
    stage: Stage, settings: Settings, stamp: dict[str, Any], own: Collection[str]
) -> dict[str, str]:
    """The digests by which later stages know a stage that is made again and the same.

    It is the same if its files are, and if it would have counted as finished. Files of
    the corpus without a digest in the stamp of before must be older than that.

    Args:
        stage: the stage.
        settings: settings of the experiment.
        stamp: its stamp that is due.
        own: names of files in its folder that are not its output.

    Returns:
        Those that `stamp` itself does not give; empty if the stage is another.
    """
    folder = settings.directory(stage.name)
    if (before := read_stamp(folder)) is None:
        return {}
    try:
        is_finished(stage, settings, stamp["fingerprint"])
        if not _is_compared(stage, settings, before):
            return {}
    except StageError:
        return {}
    if _outputs_of(folder, before, own) != stamp[OUTPUTS]:
        return {}
    old, new = (folder / STAMP).read_bytes(), json.dumps(stamp).encode()
    digests = {name: _digest_in(old, name) for name in ("", *stamp[OUTPUTS])}
    return {k: one for k, one in digests.items() if one != _digest_in(new, k)}


def _is_compared(stage: Stage, settings: Settings, stamp: dict[str, Any]) -> bool:
    """Whether each file that a stage reads has a digest in its stamp, or is older."""
    wanted = fingerprint_of(_as_before(stage, stamp), settings)
    without = {*wanted.get("contents", {})} - {
        *stamp["fingerprint"].get("contents", {})
    }
    of_corpus = {"corpus", f"corpus{WHAT_IS_READ}", _RECORDINGS}
    if without <= of_corpus:
        stamped = settings.directory(stage.name) / STAMP
        return not without or not _newer(stage, settings, stamped)
    return False


def _outputs_of(
    folder: Path, stamp: dict[str, Any], own: Collection[str]
) -> dict[str, str]:
    found = stamp.get(OUTPUTS)
    return digests_in(folder, own) if found is None else found


def _without_gone_sound(
    stage: Stage, settings: Settings, wanted: dict[str, Any]
) -> dict[str, Any]:
    """The fingerprint without the sound elsewhere, if a file of it is out of reach.

    A disc of it may be put away once there are features.
    """
    found = stage.of_sound(settings.corpus) if stage.of_sound is not None else ()
    if all(path.is_file() for path in found):
        return wanted
    others = {k: v for k, v in wanted["contents"].items() if k != _RECORDINGS}
    return {**wanted, "contents": others}


def _newer(stage: Stage, settings: Settings, stamp: Path) -> str:
    """Names files of the corpus that changed after a stage was stamped, if it reads it.

    The time is that at which the system last noted a change: a copy may keep the other.
    """
    if "corpus" not in stage.depends:
        return ""
    read = _corpus_files(stage, settings)
    if stage.of_sound is not None:
        read = list(dict.fromkeys([*read, *stage.of_sound(settings.corpus)]))
    since, newer = stamp.stat().st_ctime_ns, list[str]()
    for path in read:
        with suppress(OSError):
            if path.stat().st_ctime_ns > since:
                newer.append(str(path))
    more = f" and {len(newer) - _NAMED} more" if len(newer) > _NAMED else ""
    named = ", ".join(newer[:_NAMED])
    return f" (changed since: {named}{more})" if newer else ""


def _as_before(stage: Stage, stamp: dict[str, Any]) -> Stage:
    """The stage as a stamp of an earlier version knows it."""
    if OUTPUTS not in stamp:  # it read groups as a whole
        groups = tuple(name for name in stage.depends if "." not in name)
        stage = stage._replace(depends=groups, apart=())
    if "files" in stamp["fingerprint"]["settings"].get("corpus", {}):
        stage = stage._replace(of_corpus=None)
    return stage


def check_earlier(stage: Stage, settings: Settings) -> None:
    """Refuse changed settings of a stage before the chosen ones, if it is finished.

    Its corpus may be gone by then, and so may stages that are no longer read.
    """
    folder = settings.directory(stage.name)
    if (stamp := read_stamp(folder)) is None:
        return
    found, stage = stamp["fingerprint"], _as_before(stage, stamp)
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
    _refuse_changes(stage, folder, comparable, wanted)


def _refuse_changes(
    stage: Stage,
    folder: Path,
    found: dict[str, Any],
    wanted: dict[str, Any],
    newer: Callable[[], str] = str,
) -> None:
    if changes := "; ".join(differences(read_alone(found, wanted), wanted)):
        raise StageError(
            f"stage `{stage.name}` in {folder} was made with other settings or inputs: "
            f"{changes}{newer()}",
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


def read_alone(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without what the stage no longer depends on.

    An earlier version may have. Files without a digest then are taken for those of now.
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


def differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Says of each value of a fingerprint that is another what it was and is."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        if found != wanted:
            yield f"{name} was {found}, is {wanted}"
        return
    for key in sorted({*found, *wanted}):
        path = f"{name}.{key}" if name else key
        yield from differences(
            found.get(key, "absent"), wanted.get(key, "absent"), path
        )
