"""Whether the files of finished stages are still as the stages left them.

The stamp of a stage has the digests of its files. Only files that have changed since
the stamp was written are read for that: of others not a byte is another, unless the
disk has lost some. So after an unexpected error all files are read.

A copy of an experiment has all of its files changed since. Its shards of frames,
hundreds of gigabytes, are not read for that: their digests are of all their bytes.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from recipes.hybrid.pipeline.contents import (
    MOST_WHOLE,
    UNREADABLE,
    Contents,
    digests_in,
)
from recipes.hybrid.pipeline.fingerprint import CONTENTS, OUTPUTS, STAMP, read_stamp
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError, stage_in

# Folders whose files still change: what the program of one writes, and what learners
# on other machines write at their end, while the leader finishes the stage.
_OF_OTHERS = {"wandb", "timeline"}
_SHARDS = ".bin"  # of frames


def refuse_altered(stage: Stage, settings: Settings) -> None:
    """Refuses files that a stage reads and that were changed after they were made.

    Raises:
        StageError: A file was; names the first, and the stage that made it.
    """
    found = Contents(settings.out / "exp" / CONTENTS, settings.crew.leads)
    for name in _read_by(stage):
        for path in _altered(settings.directory(name), found):
            made_by = settings.stage_of(name)
            raise StageError(
                f"{path} is not as stage `{made_by}` left it, and stage `{stage.name}` "
                "reads it",
                f". Restore it, or run with --from {made_by} --to {made_by} --redo",
            )
    found.save()


def changes_since(stage: Stage, settings: Settings) -> Iterator[str]:
    """Names files that a stage reads and that are not as the stage before left them.

    One may be damaged, or changed on purpose: either may be why the stage failed.
    """
    for name in _read_by(stage):
        folder, made_by = settings.directory(name), settings.stage_of(name)
        with contextlib.suppress(OSError):  # the folder has gone
            left = (read_stamp(folder) or {}).get(OUTPUTS, {})
            for file, digest in digests_in(folder).items():
                if left.get(file, digest) != digest and not _is_of_others(file):
                    yield (
                        f"{folder / file} is not as stage `{made_by}` left it. If it "
                        f"is damaged, run with --from {made_by} --to {made_by} --redo"
                    )


def _read_by(stage: Stage) -> list[str]:
    return list(dict.fromkeys(map(stage_in, (*stage.inputs, *stage.needs))))


def _is_of_others(file: str) -> bool:
    return not _OF_OTHERS.isdisjoint(Path(file).parts)


def _altered(folder: Path, found: Contents) -> Iterator[Path]:
    """Files of a finished stage that are others; those that are gone are left out."""
    if (stamp := read_stamp(folder)) is None:
        return
    since = (folder / STAMP).stat().st_ctime_ns
    for name, digest in stamp.get(OUTPUTS, {}).items():
        path = folder / name
        if _is_of_others(name):
            continue
        with contextlib.suppress(OSError):
            now = path.stat()
            is_large = path.suffix == _SHARDS and now.st_size > MOST_WHOLE
            if now.st_ctime_ns < since or is_large:
                continue
            if found.of_output(path) not in (digest, UNREADABLE):
                yield path
