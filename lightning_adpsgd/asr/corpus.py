"""What a conversational corpus is made of: utterances, and the files that hold them.

The layout is that of the LDC's discs, all below one root: LDC97S62 (two-channel SPHERE
files, MS-State transcripts and dictionary), LDC2002S09 (Hub5'00 audio and pem) and
LDC2002T43 (its stm and glm). Nothing is required of the folders' names in between.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_adpsgd.files import written_whole


class CorpusError(ValueError):
    """A corpus file cannot be used; the message has the path and the line."""

    @classmethod
    def at(cls, path: Path, line: int, problem: str) -> "CorpusError":
        """The error for one line of a file."""
        return cls(f"{path}:{line}: {problem}")


@dataclass(frozen=True, slots=True)
class Utterance:
    """One stretch of speech of one speaker.

    Attributes:
        id: Unique, and sorts by speaker and time: `sw02001-A_000030-000773`.
        recording: The SPHERE file.
        channel: 0 for side A, 1 for side B.
        start_s: Begin in the recording, in seconds.
        end_s: End in the recording, in seconds.
        words: Normalised words; empty where none are known.
        speaker: Who speaks; the conversation side where the corpus does not say.
        source: `file:line` of the transcript, for messages.
    """

    id: str
    recording: Path
    channel: int
    start_s: float
    end_s: float
    words: tuple[str, ...]
    speaker: str
    source: str = ""

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s

    @property
    def side(self) -> tuple[Path, int]:
        """The conversation side it belongs to: recording and channel."""
        return self.recording, self.channel


def utterance_id(recording: str, channel: int, start_s: float, end_s: float) -> str:
    """The id in the form of the Switchboard recipes, with times in 1/100 s."""
    start, end = round(start_s * 100), round(end_s * 100)
    return f"{recording}-{'AB'[channel]}_{start:06d}-{end:06d}"


def write_utterances(path: Path, utterances: Iterable[Utterance]) -> None:
    """Write one JSON object per line, whole or not at all."""
    with written_whole(path) as file:
        for utterance in utterances:
            values = dataclasses.asdict(utterance)
            values["recording"] = str(utterance.recording)
            file.write(json.dumps(values, ensure_ascii=False) + "\n")


def read_utterances(path: Path) -> list[Utterance]:
    """Read what `write_utterances` wrote.

    Raises:
        CorpusError: A line is not a complete utterance.
    """
    return list(iterate_utterances(path))


def iterate_utterances(path: Path) -> Iterator[Utterance]:
    """The same one by one, of a file that need not fit into memory."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            yield _utterance(path, number, line)


def _utterance(path: Path, number: int, line: str) -> Utterance:
    try:
        values = json.loads(line)
        values["recording"] = Path(values["recording"])
        values["words"] = tuple(values["words"])
        return Utterance(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise CorpusError.at(path, number, f"not an utterance: {error!r}") from error


@dataclass
class Skipped:
    """What was left out, by reason: how often, how many seconds, where for example."""

    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    num_examples: int = 3

    def add(self, reason: str, where: str, seconds: float = 0.0) -> None:
        """Count one thing that is left out."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.seconds[reason] = self.seconds.get(reason, 0.0) + max(0.0, seconds)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < self.num_examples:
            examples.append(where)

    def report(self) -> list[str]:
        """One line per reason, the most frequent first."""
        ranked = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return [self._line(reason) for reason in ranked]

    def _line(self, reason: str) -> str:
        hours = self.seconds[reason] / 3600
        lost = f" ({hours:.2f} h)" if hours else ""
        examples = ", ".join(self.examples[reason])
        return f"{reason}: {self.counts[reason]}{lost}, for example {examples}"


@dataclass(frozen=True)
class CorpusTree:
    """The files of a corpus that matter, found by their names.

    Attributes:
        recordings: SPHERE files by stem: `sw02001`, `sw_4390`, `en_4156`.
        transcripts: MS-State transcripts, one per conversation side.
        dictionary: MS-State dictionary.
        speakers: Table of the callers' numbers, `conv.tab`.
        pem: Segments of the evaluation.
        stm: Their reference.
        glm: Rules of scoring.
        duplicates: Recordings that are left out because one of that name exists.
    """

    recordings: dict[str, Path]
    transcripts: tuple[Path, ...]
    dictionary: Path | None
    speakers: Path | None
    pem: Path | None
    stm: Path | None
    glm: Path | None
    duplicates: tuple[Path, ...] = ()


_RECORDING = re.compile(r"(sw\d+|(sw|en)_\d+)\.sph", re.IGNORECASE)
_TRANSCRIPT = re.compile(r"sw\d+[AB]-ms98-a-trans\.text")


def find_tree(root: Path) -> CorpusTree:
    """Look for the files of a corpus anywhere below `root`.

    Raises:
        CorpusError: `root` is not a folder.
    """
    if not root.is_dir():
        raise CorpusError(f"{root}: expected the folder of a corpus, there is none")
    files = sorted(p for p in root.rglob("*") if p.is_file())
    recordings: dict[str, Path] = {}
    audio = [p for p in files if _RECORDING.fullmatch(p.name)]
    for path in audio:
        recordings.setdefault(path.stem.lower(), path)
    return CorpusTree(
        recordings=recordings,
        transcripts=tuple(p for p in files if _TRANSCRIPT.fullmatch(p.name)),
        dictionary=_first(files, r"sw-ms98-dict\.text"),
        speakers=_first(files, r"conv\.tab"),
        pem=_first(files, r"hub5e_00\.pem"),
        stm=_first(files, r"hub5e00.*\.stm"),
        glm=_first(files, r"en20000405_hub5\.glm") or _first(files, r".*\.glm"),
        duplicates=tuple(p for p in audio if recordings[p.stem.lower()] != p),
    )


def _first(files: list[Path], pattern: str) -> Path | None:
    return next((p for p in files if re.fullmatch(pattern, p.name)), None)
