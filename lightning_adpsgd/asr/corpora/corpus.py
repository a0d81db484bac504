"""The utterances of a conversational corpus, and a count of omissions."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.files import written_whole


class CorpusError(ValueError):
    """A corpus file cannot be used; the message has the path and the line."""

    @classmethod
    def at(cls, path: Path, line: int, problem: str) -> "CorpusError":
        """The error for one line of a file."""
        return cls(f"{path}:{line}: {problem}")


class Caller(NamedTuple):
    """The speaker of one conversation side.

    Attributes:
        name: Name, the same in all calls of a person.
        sex: "m", "f", or empty if unknown.
    """

    name: str
    sex: str = ""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One stretch of speech of one speaker.

    Attributes:
        id: Unique id that sorts by speaker and time: `sw02001-A_000030-000773`.
        recording: Sound file.
        channel: 0 for side A, 1 for side B.
        start_s: Start in the recording, in seconds.
        end_s: End in the recording, in seconds.
        words: Normalised words; empty if unknown.
        speaker: Name of the speaker; the conversation side if the corpus has none.
        source: `file:line` of the transcript, for messages.
        speed: Playback speed relative to the recording; 1 except for copies.
    """

    id: str
    recording: Path
    channel: int
    start_s: float
    end_s: float
    words: tuple[str, ...]
    speaker: str
    source: str = ""
    speed: float = 1.0

    @property
    def duration_s(self) -> float:
        """The length in seconds, as played."""
        return (self.end_s - self.start_s) / self.speed

    @property
    def side(self) -> str:
        """The conversation side it belongs to, by recording and channel.

        Copies at one speed form a separate side.
        """
        side = f"{self.recording} {'AB'[self.channel]}"
        return side if self.speed == 1 else f"{side} sp{self.speed:g}"

    def at_speed(self, speed: float) -> "Utterance":
        """A copy that is played faster or slower, with the names that Kaldi gives it.

        Its pitch changes too, so it counts as another speaker's.
        """
        prefix = f"sp{speed:g}-"
        return dataclasses.replace(
            self, id=prefix + self.id, speaker=prefix + self.speaker, speed=speed
        )

    @property
    def conversation(self) -> str:
        """The name of the recording in references, whatever the name of its file."""
        return self.id.rsplit("-", 2)[0]


def utterance_id(recording: str, channel: int, start_s: float, end_s: float) -> str:
    """The id in the form of the Switchboard recipes, with times in 1/100 s."""
    start, end = round(start_s * 100), round(end_s * 100)
    return f"{recording}-{'AB'[channel]}_{start:06d}-{end:06d}"


def misfit(
    start_s: float, end_s: float, sound_s: float, clip_s: float, shortest_s: float
) -> str:
    """The reason why a stretch of a recording cannot be used; empty if it can.

    Args:
        start_s: Start of the stretch, in seconds.
        end_s: End of the stretch.
        sound_s: Length of the recording, to which a later end is clipped.
        clip_s: Seconds by which it may end later.
        shortest_s: Least length after clipping.
    """
    if end_s > sound_s + clip_s:
        return "transcript beyond the end of its audio"
    if min(end_s, sound_s) - start_s < shortest_s:
        return f"shorter than {shortest_s} s"
    return ""


def write_utterances(path: Path, utterances: Iterable[Utterance]) -> None:
    """Writes one JSON object per line, whole or not at all."""
    with written_whole(path) as file:
        for utterance in utterances:
            values = dataclasses.asdict(utterance)
            values["recording"] = str(utterance.recording)
            # ASCII, because a path may hold bytes that are not valid text
            file.write(json.dumps(values) + "\n")


def read_utterances(path: Path) -> list[Utterance]:
    """Reads a file of `write_utterances`.

    Raises:
        CorpusError: A line is not a complete utterance.
    """
    return list(iterate_utterances(path))


def iterate_utterances(path: Path) -> Iterator[Utterance]:
    """Yields the utterances of a file that need not fit into memory.

    Raises:
        CorpusError: A line is no utterance; the message has the file and the line.
    """
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
    """Omissions by reason: their number, seconds of speech, and examples.

    Attributes:
        counts: Number of omissions.
        seconds: Total seconds of speech.
        examples: Places of the first omissions, each once.
        remedies: Remedies for the reader, if known.
        num_examples: Number of places to keep.
    """

    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    remedies: dict[str, str] = field(default_factory=dict)
    num_examples: int = 3

    def add(
        self, reason: str, where: str, seconds: float = 0.0, remedy: str = ""
    ) -> None:
        """Counts an omission."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.seconds[reason] = self.seconds.get(reason, 0.0) + max(0.0, seconds)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < self.num_examples and where not in examples:
            examples.append(where)
        if remedy:
            self.remedies[reason] = remedy

    def merge(self, other: "Skipped") -> None:
        """Adds the counts of another one."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            seconds = self.seconds.get(reason, 0.0) + other.seconds[reason]
            self.seconds[reason] = seconds
            examples = self.examples.setdefault(reason, [])
            examples += other.examples[reason][: self.num_examples - len(examples)]
        self.remedies.update(other.remedies)

    def report(self) -> list[str]:
        """One line per reason, the most frequent first."""
        ranked = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return [self._line(reason) for reason in ranked]

    def _line(self, reason: str) -> str:
        hours = self.seconds[reason] / 3600
        lost = f" ({hours:.2f} h)" if hours else ""
        examples = ", ".join(self.examples[reason])
        remedy = f"; {self.remedies[reason]}" if reason in self.remedies else ""
        return f"{reason}: {self.counts[reason]}{lost}, for example {examples}{remedy}"
