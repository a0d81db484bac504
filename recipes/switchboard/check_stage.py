"""Stage `check`: look at every file of the corpus before anything is computed.

Every recording's header is read and compared with the size of its file, so that a
missing disc or a copy that was cut short is known in the first minute and not in the
tenth hour. What is usable is written down for `prepare`, with the length of the audio.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lightning_adpsgd.asr.corpus import CorpusError, CorpusTree, Skipped, find_tree
from lightning_adpsgd.asr.hub5 import part_of
from lightning_adpsgd.asr.sphere import SphereError, read_header
from lightning_adpsgd.asr.transcripts import side_of
from lightning_adpsgd.files import write_json
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings

REPORT = "report.json"
_PARTS = {
    "train": "LDC97S62, training audio",
    "swb": "LDC2002S09, SWB part of the test set",
    "ch": "LDC2002S09, CallHome part of the test set",
}
_FILES = {
    "dictionary": "LDC97S62, sw-ms98-dict.text: pronunciations",
    "pem": "LDC2002S09, hub5e_00.pem: segments of the test set",
    "stm": "LDC2002T43, hub5e00*.stm: reference of the test set",
    "glm": "LDC2002T43, en20000405_hub5.glm: rules of scoring",
}


class Recording(NamedTuple):
    """A recording whose header and size are right.

    Attributes:
        path: The SPHERE file.
        seconds: Its length.
        num_channels: Usually two.
    """

    path: Path
    seconds: float
    num_channels: int


def check(settings: Settings, output: Path) -> None:
    """Report what is there, what is missing and what is broken.

    Raises:
        StageError: There is nothing to train on, or no dictionary.
    """
    tree = _find(settings.corpus)
    problems = Skipped()
    recordings = _usable(tree, problems)
    _compare_with_transcripts(tree, recordings, problems)
    lines = [*_describe(tree, recordings), *_warnings(problems)]
    print("\n".join(f"  {line}" for line in lines), flush=True)
    _stop_if_useless(settings.corpus, tree, recordings)
    _write(output / REPORT, recordings, lines)


def read_recordings(settings: Settings) -> dict[str, Recording]:
    """The usable recordings by stem, as `check` found them."""
    report = json.loads((settings.directory("check") / REPORT).read_text())
    return {
        stem: Recording(Path(path), seconds, num_channels)
        for stem, (path, seconds, num_channels) in report["recordings"].items()
    }


def _find(corpus: Path) -> CorpusTree:
    try:
        return find_tree(corpus)
    except CorpusError as error:
        raise StageError(f"--corpus: {error}") from error


def _usable(tree: CorpusTree, problems: Skipped) -> dict[str, Recording]:
    usable = {}
    for stem, path in tqdm(tree.recordings.items(), desc="headers", unit="file"):
        try:
            header = read_header(path)
        except SphereError as error:
            problems.add("unusable recording", str(error))
            continue
        if header.is_shortened and shutil.which("sph2pipe") is None:
            problems.add(
                "recording compressed with shorten; put the program sph2pipe on PATH",
                str(path),
                header.duration_s,
            )
            continue
        usable[stem] = Recording(path, header.duration_s, header.num_channels)
    for path in tree.duplicates:
        problems.add("second recording of the same name", str(path))
    return usable


def _compare_with_transcripts(
    tree: CorpusTree, recordings: dict[str, Recording], problems: Skipped
) -> None:
    transcribed = {side_of(path)[0]: path for path in tree.transcripts}
    for stem, path in transcribed.items():
        if stem not in tree.recordings:
            problems.add(f"transcript without its recording ({stem}.sph)", str(path))
    for stem, recording in recordings.items():
        if part_of(stem) is None and stem not in transcribed:
            where, seconds = str(recording.path), recording.seconds
            problems.add("recording without a transcript", where, seconds)


def _describe(tree: CorpusTree, recordings: dict[str, Recording]) -> list[str]:
    lines = []
    for part, meaning in _PARTS.items():
        lengths = [r.seconds for stem, r in recordings.items() if _part(stem) == part]
        hours = f"{len(lengths)} files, {sum(lengths) / 3600:.2f} h"
        lines.append(f"{meaning}: {hours if lengths else 'MISSING'}")
    number = len(tree.transcripts) or "MISSING"
    lines.append(f"LDC97S62, MS-State transcripts: {number}")
    for name, meaning in _FILES.items():
        lines.append(f"{meaning}: {getattr(tree, name) or 'MISSING'}")
    return lines


def _part(stem: str) -> str:
    return part_of(stem) or "train"


def _warnings(problems: Skipped) -> list[str]:
    return [f"WARNING: {line}" for line in problems.report()]


def _stop_if_useless(
    corpus: Path, tree: CorpusTree, recordings: dict[str, Recording]
) -> None:
    transcribed = {side_of(path)[0] for path in tree.transcripts}
    if not transcribed & recordings.keys():
        raise StageError(
            f"{corpus}: expected recordings sw*.sph with transcripts "
            f"sw*-ms98-a-trans.text; of {len(transcribed)} transcribed conversations "
            "none has a usable recording, so there is nothing to train on"
        )
    if tree.dictionary is None:
        raise StageError(
            f"{corpus}: expected the dictionary sw-ms98-dict.text, which belongs to "
            "the MS-State transcripts; without it no word has a pronunciation"
        )


def _write(path: Path, recordings: dict[str, Recording], lines: list[str]) -> None:
    values = {stem: [str(r.path), *r[1:]] for stem, r in recordings.items()}
    write_json(path, {"recordings": values, "report": lines})
