"""The corpora for training and testing: their contents and file names.

A source is recognised by the names of its files, whatever their folders, so that discs
may be copied, linked or mounted in any way:

    switchboard  LDC97S62    swb1_d1/data/sw02001.sph, conv.tab
                 MS-State    20/2001/sw2001A-ms98-a-trans.text, sw-ms98-dict.text
    fisher       LDC2004S13  fe_03_p1_sph1/audio/000/fe_03_00001.sph  (and LDC2005S13)
                 LDC2004T19  data/trans/000/fe_03_00001.txt, doc/fe_03_p1_calldata.tbl
    callhome     LDC97S42    data/train/en_4065.sph
                 LDC97T14    transcrpt/train/en_4065.txt
    hub5         LDC2002S09  english/sw_4390.sph, english/en_4156.sph, hub5e_00.pem
                 LDC2002T43  hub5e00.english.000405.stm, en20000405_hub5.glm

CallHome and one half of the test set have names of the same form. A call that the pem
or stm names, or that lies in the same folder as the pem, belongs to the test set and is
never used for training.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_adpsgd.asr.corpora.callhome import read_callhome
from lightning_adpsgd.asr.corpora.corpus import Caller, CorpusError, Skipped
from lightning_adpsgd.asr.corpora.discs import DiscFile, find_files
from lightning_adpsgd.asr.corpora.fisher import read_calldata, read_fisher
from lightning_adpsgd.asr.corpora.hub5 import read_pem, read_stm
from lightning_adpsgd.asr.corpora.transcripts import read_speakers, read_transcript
from lightning_adpsgd.asr.corpora.turns import COPY_AGAIN, Turn

_ARCHIVE = re.compile(
    r".*\.(tar|tgz|tar\.gz|tar\.bz2|zip|iso|7z"
    r"|(sph|text|txt|tbl|tab|csv|stm|pem|glm)\.(gz|bz2|xz|z))"
)

Callers = dict[tuple[str, int], Caller]


@dataclass(frozen=True)
class Source:
    """A corpus.

    Attributes:
        name: Name in settings.
        audio: Catalogue numbers of the sound.
        text: Origin of the transcripts.
        recording: Names of its SPHERE files in lower case, the call's number in the
            first group.
        transcript: Names of its transcripts, likewise.
        conversation: The stem of a recording, from that number.
        num_recordings: Number of recordings, or several valid numbers; empty if
            unknown.
        hours: Hours of its recordings, counting both sides once; None if unknown.
        read: The turns of a transcript.
        callers: Names of the tables of callers.
        read_callers: Function that reads such a table.
    """

    name: str
    audio: str
    text: str
    recording: re.Pattern[str]
    transcript: re.Pattern[str] | None = None
    conversation: str = "{}"
    num_recordings: tuple[int, ...] = ()
    hours: float | None = None
    read: Callable[[Path, Skipped, Mapping[str, str]], Iterator[Turn]] | None = None
    callers: re.Pattern[str] | None = None
    read_callers: Callable[[Path, Skipped], Callers] | None = None

    def conversation_of(self, name: str) -> str | None:
        """The recording that a transcript belongs to, by the name of its file."""
        match = self.transcript.fullmatch(name) if self.transcript else None
        return self.conversation.format(int(match[1])) if match else None


SWITCHBOARD = Source(
    name="switchboard",
    audio="LDC97S62",
    text="MS-State transcripts of LDC97S62",
    recording=re.compile(r"sw(\d{4,5})\.sph"),
    transcript=re.compile(r"sw(\d{4,5})[ab]-ms98-a-trans\.text"),
    conversation="sw{:05d}",
    num_recordings=(2435, 2438),
    hours=260,
    read=read_transcript,
    callers=re.compile(r"conv\.tab|conv_tab\.csv"),
    read_callers=read_speakers,
)
FISHER = Source(
    name="fisher",
    audio="LDC2004S13 and LDC2005S13",
    text="LDC2004T19 and LDC2005T19",
    recording=re.compile(r"fe_03_(\d{5})\.sph"),
    transcript=re.compile(r"fe_03_(\d{5})\.txt"),
    conversation="fe_03_{:05d}",
    num_recordings=(11699,),
    hours=1960,
    read=lambda path, skipped, _: read_fisher(path, skipped),
    callers=re.compile(r"fe_03_p[12]_calldata\.tbl"),
    read_callers=read_calldata,
)
CALLHOME = Source(
    name="callhome",
    audio="LDC97S42",
    text="LDC97T14",
    recording=re.compile(r"en_(\d{4})\.sph"),
    transcript=re.compile(r"en_(\d{4})\.txt"),
    conversation="en_{:04d}",
    num_recordings=(120,),
    hours=60,
    read=lambda path, skipped, _: read_callhome(path, skipped),
)
HUB5 = Source(
    name="hub5",
    audio="LDC2002S09",
    text="LDC2002T43",
    recording=re.compile(r"(sw|en)_\d{4}\.sph"),
    num_recordings=(40,),
)
TRAINING = {source.name: source for source in (SWITCHBOARD, FISHER, CALLHOME)}


@dataclass(frozen=True)
class Holding:
    """The files of one source on the discs.

    Attributes:
        source: The source.
        recordings: The copies of each recording by its stem, `sw02001`.
        transcripts: Files of each conversation, by the stem of its recording.
        callers: Tables of callers.
    """

    source: Source
    recordings: dict[str, tuple[Path, ...]]
    transcripts: dict[str, tuple[DiscFile, ...]]
    callers: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Discs:
    """Everything of use on the discs.

    Attributes:
        holdings: Holdings by name of the source; the test set is `hub5`.
        dictionary: MS-State dictionary.
        pem: Segments of the evaluation.
        stm: Their reference.
        glm: Rules of scoring.
        archives: Packed files, which may contain more.
    """

    holdings: dict[str, Holding]
    dictionary: Path | None
    pem: Path | None
    stm: Path | None
    glm: Path | None
    archives: tuple[Path, ...] = ()

    def holding(self, name: str) -> Holding:
        """The holding of one source; empty if nothing was found."""
        sources = {**TRAINING, HUB5.name: HUB5}
        return self.holdings.get(name) or Holding(sources[name], {}, {})


def find_discs(roots: Iterable[Path], skipped: Skipped) -> Discs:
    """Looks for all sources below the folders; counts obstacles.

    Raises:
        CorpusError: One of `roots` is not a folder.
    """
    files = find_files(roots, skipped)
    pem = _one(files, r"hub5e_00\.pem", skipped)
    stm = _one(files, r"hub5e00.*\.stm", skipped)
    is_test = _test_of(pem, stm)
    found = [_holding(source, files, is_test, skipped) for source in TRAINING.values()]
    found.append(_test_holding(files, is_test))
    return Discs(
        holdings={holding.source.name: holding for holding in found},
        dictionary=_one(files, r"sw-ms98-dict\.text", skipped),
        pem=pem,
        stm=stm,
        glm=_one(files, r"en20000405_hub5\.glm", skipped)
        or _one(files, r".*\.glm", skipped),
        archives=tuple(f.path for f in files if _ARCHIVE.fullmatch(f.name)),
    )


def _one(files: list[DiscFile], pattern: str, skipped: Skipped) -> Path | None:
    """The file of that kind with the shortest name, as on the disc."""
    found = [file for file in files if re.fullmatch(pattern, file.name)]
    found.sort(key=lambda file: len(file.name))
    for other in found[1:]:
        remedy = f"{found[0].path} is used; remove the others"
        skipped.add("second file of one kind", str(other.path), remedy=remedy)
    return found[0].path if found else None


def _test_of(pem: Path | None, stm: Path | None) -> Callable[[DiscFile], bool]:
    """A predicate for files of the test set."""
    named: set[str] = set()
    for path, read in ((pem, read_pem), (stm, read_stm)):
        # `check` reads both again and reports the problem
        with contextlib.suppress(CorpusError):
            named |= {s.recording for s in read(path, Skipped())} if path else set()
    beside = pem.parent if pem else None

    def is_test(file: DiscFile) -> bool:
        if file.stem.startswith("sw_") or file.stem in named:
            return True
        if pem or stm:
            return file.path.parent == beside
        split = {"train", "devtest", "evltest", "evaltest"}
        return not split & {folder.lower() for folder in file.path.parts[:-1]}

    return is_test


def _holding(
    source: Source,
    files: list[DiscFile],
    is_test: Callable[[DiscFile], bool],
    skipped: Skipped,
) -> Holding:
    recordings: dict[str, list[Path]] = {}
    transcripts: dict[str, dict[str, list[DiscFile]]] = {}
    callers = []
    for file in files:
        conversation = source.conversation_of(file.name)
        if source is CALLHOME and is_test(file):
            continue
        if match := source.recording.fullmatch(file.name):
            stem = source.conversation.format(int(match[1]))
            recordings.setdefault(stem, []).append(file.path)
        elif conversation is not None:
            known = transcripts.setdefault(conversation, {})
            known.setdefault(file.name, []).append(file)
        elif source.callers and source.callers.fullmatch(file.name):
            callers.append(file.path)
    return Holding(
        source,
        {stem: tuple(copies) for stem, copies in recordings.items()},
        {
            stem: tuple(_chosen(copies, skipped) for copies in named.values())
            for stem, named in transcripts.items()
        },
        tuple(callers),
    )


def _chosen(copies: list[DiscFile], skipped: Skipped) -> DiscFile:
    """The first copy of a transcript that has lines; counts the others."""
    if len(copies) == 1:
        return copies[0]
    chosen = next((file for file in copies if _has_lines(file.path)), copies[0])
    remedy = f"{chosen.path} and such are used; remove the others"
    for file in copies:
        if file is not chosen:
            reason = "second transcript of the same name"
            skipped.add(reason, str(file.path), remedy=remedy)
    return chosen


def _has_lines(path: Path) -> bool:
    with contextlib.suppress(OSError):  # `check` tells of it
        return bool(path.read_bytes().strip())
    return False


def _test_holding(
    files: list[DiscFile], is_test: Callable[[DiscFile], bool]
) -> Holding:
    recordings: dict[str, list[Path]] = {}
    for file in files:
        if HUB5.recording.fullmatch(file.name) and is_test(file):
            recordings.setdefault(file.stem, []).append(file.path)
    return Holding(HUB5, {s: tuple(copies) for s, copies in recordings.items()}, {})


def read_callers(holding: Holding, skipped: Skipped) -> Callers:
    """All callers by recording and channel; counts unreadable tables."""
    callers: Callers = {}
    for path in holding.callers:
        assert holding.source.read_callers is not None
        try:
            callers |= holding.source.read_callers(path, skipped)
        except CorpusError as error:
            remedy = "each side counts as a speaker of its own; " + COPY_AGAIN
            skipped.add("unreadable table of callers", str(error), remedy=remedy)
    return callers


def read_turns(
    source: Source, file: DiscFile, skipped: Skipped, acronyms: Mapping[str, str]
) -> list[Turn]:
    """The turns of one transcript; an unreadable file yields none and is counted."""
    assert source.read is not None
    try:
        return list(source.read(file.path, skipped, acronyms))
    except CorpusError as error:
        remedy = "its conversation is left out; " + COPY_AGAIN
        skipped.add("unreadable transcript", str(error), remedy=remedy)
        return []


def missing_numbers(
    stems: Iterable[str], wanted: Iterable[int]
) -> list[tuple[int, int]]:
    """Runs of numbers that no stem ends with, as (first, last)."""
    present = {int(stem[-5:]) for stem in stems}
    runs: list[tuple[int, int]] = []
    for number in wanted:
        if number in present:
            continue
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs
