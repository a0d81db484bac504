"""Recognised words against the reference, by the rules of Hub5 or as they are.

For Hub5, NIST's `hubscr.pl` counts where it is installed, and the package's own scorer
elsewhere. With both, both count and must agree. As in Kaldi's recipes, noises,
hesitations and broken-off words are first taken out of the hypothesis; elsewhere
(`scoring=plain`) noises alone.

The output is `score.json`, `speakers.txt`, `alignments.txt`, `confusions.txt`,
`segments.json` and `utterances.json` (the worst, with their sound), beside what was
compared: `reference.stm` and `hypothesis.ctm`. Runs that were scored before on the same
reference are compared with this one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance, read_utterances
from lightning_adpsgd.asr.corpora.hub5 import read_stm, repaired
from lightning_adpsgd.asr.corpora.turns import all_lines
from lightning_adpsgd.asr.corpora.utf8 import composed
from lightning_adpsgd.asr.scoring import (
    Errors,
    Glm,
    Scores,
    ScoringError,
    read_glm,
    score_files,
    total_of,
)
from lightning_adpsgd.asr.scoring.glm import NO_RULES
from lightning_adpsgd.asr.scoring.nist import (
    NistError,
    find_hubscr,
    read_sgml,
    run_hubscr,
)
from lightning_adpsgd.asr.scoring.reports import alignments, confusions, table
from lightning_adpsgd.asr.scoring.utterances import (
    marks_of,
    reference_text,
    written_words,
)
from lightning_adpsgd.files import write_json, written_whole
from recipes.hybrid.pipeline.contents import digest_of
from recipes.hybrid.pipeline.settings import TEST_SPLITS, Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition.figures import compared_with, figures_of, say
from recipes.hybrid.recognition.worst import Sides, Sound, write_worst

PART_NAMES = {"swb": "SWB", "ch": "CH"}
_LABEL = re.compile(r';;\s*LABEL\s+"([^"]*)"', re.IGNORECASE)
_LABELS = re.compile(r"\s*\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+<([^>]*)>")

Spoken = dict[str, list[Utterance]]
"""The utterances of each test set."""

BySpeaker = dict[tuple[str, str], Errors]
"""Errors of each speaker and file."""


def read_rules(settings: Settings) -> Glm | None:
    """The rules of the test set's GLM, empty if it has none; None outside of Hub5.

    Raises:
        StageError: A rule cannot be read.
    """
    if settings.scoring != "hub5":
        return None
    path = _glm_path(settings)
    try:
        return NO_RULES if path is None else read_glm(path)
    except ScoringError as error:
        raise StageError(str(error)) from error


def _glm_path(settings: Settings) -> Path | None:
    path = settings.directory("prepare") / "eval.glm"
    return path if path.exists() else None


def score_decoded(
    settings: Settings, decoded: Path, output: Path, run: str, epoch: str = ""
) -> None:
    """Scores the `*.ctm` of a folder of decoded test sets; writes nothing if none.

    Args:
        run: name of what is scored; an earlier score of it is not compared.
        epoch: which of its epochs, if not the last.

    Raises:
        StageError: A test set cannot be scored.
    """
    spoken = _spoken(settings, decoded)
    if not spoken:
        print("  there is no test set: nothing is scored", flush=True)
        return
    name = f"{run}, {epoch}" if epoch else run
    stm, ctm = output / "reference.stm", output / "hypothesis.ctm"
    rules = read_rules(settings)
    _write(stm, [*_reference(settings, spoken, rules), *_told_of(settings)])
    _write(ctm, _hypothesis(decoded, spoken, rules))
    try:
        scores = score_files(stm, ctm, rules, marks_of(rules))
    except ScoringError as error:
        raise StageError(f"the test set cannot be scored: {error}") from error
    counted = _counted(settings, stm, ctm, scores)
    errors = _by_part(counted.errors, spoken)
    _write_reports(output, name, scores, errors)
    write_worst(output, scores.segments, ctm, _sides(spoken))
    report = json.loads((decoded / "decode.json").read_text())
    summary = {
        "name": name,
        "scorer": counted.by,
        "parts": figures_of(errors, counted.errors, _part_of(spoken), scores),
        "compared": compared_with(
            settings.directory("score").parent, output, run, scores
        ),
    }
    write_json(output / "score.json", {**summary, **report})
    print(f"  counted by {counted.by}")
    print(_indented(table(name, errors, "total")), flush=True)
    say(summary)


def _told_of(settings: Settings) -> tuple[str, ...]:
    """A comment that tells references apart whose words are compared in two ways."""
    if settings.scoring != "hub5":
        return (";; words are compared as they are",)
    if (path := _glm_path(settings)) is None:
        return ()
    return (f";; words are compared by the rules {digest_of(path.read_bytes())}",)


def _spoken(settings: Settings, decoded: Path) -> Spoken:
    prepared = settings.directory("prepare")
    return {
        split: _with_words(decoded / f"{split}.txt", split, prepared)
        for split in settings.splits()
        if split in TEST_SPLITS
    }


def _with_words(path: Path, split: str, prepared: Path) -> list[Utterance]:
    """The utterances that were decoded; others, whose sound was lost, are told."""
    spoken = read_utterances(prepared / f"{split}.jsonl")
    if not path.exists():
        return spoken
    # Words may have characters at which `splitlines` splits, too.
    lines = path.read_text(encoding="utf-8").split("\n")
    names = {line.split(maxsplit=1)[0] for line in lines if line.strip()}
    found = [one for one in spoken if one.id in names]
    if len(found) < len(spoken):
        lost = next(one for one in spoken if one.id not in names)
        print(
            f"  WARNING: {split}: {len(spoken) - len(found)} of {len(spoken)} "
            f"utterances have no features, for example {lost.id}; they are left out, "
            "so this is not the figure of the whole test set",
            flush=True,
        )
    return found


def _write(path: Path, lines: Iterable[str]) -> None:
    with written_whole(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _reference(settings: Settings, spoken: Spoken, rules: Glm | None) -> Iterator[str]:
    """The lines of the reference for the sides that could be decoded.

    Test sets without a reference of their own have that of their utterances.
    """
    path = settings.directory("prepare") / "eval.stm"
    with_stm = PART_NAMES.keys() & spoken.keys() if path.exists() else set()
    if with_stm:
        sides = {_side(one) for split in with_stm for one in spoken[split]}
        yield from _official(path, sides)
    # In a fixed order: the name of a segment has its line in the reference.
    for split in spoken:
        if split not in with_stm:
            yield from (_as_reference(one, rules) for one in spoken[split])


def _as_reference(utterance: Utterance, rules: Glm | None) -> str:
    file, channel = _side(utterance)
    times = f"{utterance.start_s:.3f} {utterance.end_s:.3f}"
    words = " ".join(reference_text(utterance.words, rules))
    return f"{file} {channel.upper()} {utterance.speaker} {times} <O> {words}"


def _official(path: Path, sides: set[tuple[str, str]]) -> Iterator[str]:
    """The lines of these sides; malformed ones are left out with a warning."""
    left_out = Skipped()
    usable = {segment.line for segment in read_stm(path, left_out)}
    _warn_of_malformed(left_out)
    lines = [
        _repaired(line)
        for number, line in enumerate(all_lines(path, Skipped()), start=1)
        if number in usable or not _is_data(line)
    ]
    missing = {_line_side(line) for line in lines if _is_data(line)} - sides
    _warn_of_missing(sorted(missing))
    yield from _undefined_labels(lines)
    for line in lines:
        if not _is_data(line) or _line_side(line) in sides:
            yield line


def _side(utterance: Utterance) -> tuple[str, str]:
    return utterance.conversation.lower(), "ab"[utterance.channel]


def _sides(spoken: Spoken) -> Sides:
    return {
        _side(one): Sound(PART_NAMES.get(split, split), one.recording, one.channel)
        for split in spoken
        for one in spoken[split]
    }


def _is_data(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(";;")


def _line_side(line: str) -> tuple[str, str]:
    file, channel, *_ = [*line.lower().split(), ""]
    return file, channel


def _repaired(line: str) -> str:
    """Without asides and doubled parentheses, as in Kaldi; channels A and B; NFC."""
    if not _is_data(line):
        return line
    fields = repaired(composed(line)).split(maxsplit=2)
    channel = {"1": "A", "2": "B"}.get(fields[1]) if len(fields) == 3 else None
    file = fields[0].lower()
    return " ".join([file, channel or "".join(fields[1:2]), *fields[2:]])


def _warn_of_missing(sides: Sequence[tuple[str, str]]) -> None:
    if sides:
        print(
            f"  WARNING: {len(sides)} sides of the reference have no utterance that "
            f"could be decoded, for example {sides[0][0]} {sides[0][1].upper()}; they "
            "are left out, so this is not the figure of the whole test set",
            flush=True,
        )


def _warn_of_malformed(left_out: Skipped) -> None:
    for reason, count in left_out.counts.items():
        where = left_out.examples[reason][0]
        print(
            f"  WARNING: {reason}: {count}, for example {where}; not scored, "
            "so this is not the figure of the whole test set",
            flush=True,
        )


def _undefined_labels(lines: Sequence[str]) -> Iterator[str]:
    """Definitions of the labels that have none, without which hubscr.pl breaks off."""
    defined = {match[1].lower() for line in lines if (match := _LABEL.match(line))}
    used = (match[1] for line in lines if (match := _LABELS.match(line)))
    names = dict.fromkeys(name for several in used for name in several.split(","))
    for name in names:
        if name.lower() not in defined:
            yield f';; LABEL "{name}" "{name}" "{name}"'


def _hypothesis(
    decoded: Path, parts: Iterable[str], rules: Glm | None
) -> Iterator[str]:
    """The recognised words that are scored."""
    for part in parts:
        path = decoded / f"{part}.ctm"
        for line in path.read_text(encoding="utf-8").splitlines():
            file, channel, start, duration, word, *sure = line.split()
            written = written_words(word, rules)
            share = float(duration) / max(1, len(written))
            for place, one in enumerate(written):
                begin = float(start) + place * share
                times = f"{begin:.3f} {share:.3f}"
                yield " ".join((file.lower(), channel, times, one, *sure))


class _Counted(NamedTuple):
    """The errors that are reported, and who has counted them."""

    errors: BySpeaker
    by: str


def _counted(settings: Settings, stm: Path, ctm: Path, scores: Scores) -> _Counted:
    own = _Counted(scores.by_speaker_of_file, "our scorer")
    if settings.scoring != "hub5":
        return _Counted(own.errors, f"{own.by}; words are compared as they are")
    hubscr = find_hubscr()
    if hubscr is None:
        return _Counted(own.errors, f"{own.by}; NIST's hubscr.pl is not installed")
    try:
        errors = read_sgml(run_hubscr(hubscr, stm, ctm, _glm_path(settings)))
    except NistError as error:
        print(f"  WARNING: {error}", flush=True)
        return _Counted(own.errors, f"{own.by}, because hubscr.pl failed")
    different = [key for key in own.errors if own.errors[key] != errors.get(key)]
    if different or errors.keys() != own.errors.keys():
        print(
            f"  WARNING: our scorer and hubscr.pl disagree on {len(different)} "
            f"speakers, the first: {different[:1]}; please report it",
            flush=True,
        )
        return _Counted(errors, f"NIST's {hubscr}; our scorer DISAGREES")
    return _Counted(errors, f"NIST's {hubscr}; our scorer agrees")


def _part_of(spoken: Spoken) -> dict[str, str]:
    """The name of the part that each file belongs to."""
    return {
        _side(one)[0]: PART_NAMES.get(split, split)
        for split in spoken
        for one in spoken[split]
    }


def _by_part(errors: BySpeaker, spoken: Spoken) -> dict[str, Errors]:
    part_of = _part_of(spoken)
    sums = {
        part: total_of(
            counts for (_, file), counts in errors.items() if part_of[file] == part
        )
        for part in dict.fromkeys(part_of.values())
    }
    total = total_of(sums.values())
    if total.num_words == 0:
        raise StageError("the reference of the test sets has no word that counts")
    return {**sums, "total": total}


def _write_reports(
    output: Path, name: str, scores: Scores, errors: dict[str, Errors]
) -> None:
    speakers = {**scores.by_speaker, "total": scores.total}
    tables = [table(name, errors, "total"), "", table(name, speakers, "total")]
    _write(output / "speakers.txt", tables)
    _write(output / "alignments.txt", [alignments(scores)])
    _write(output / "confusions.txt", [confusions(scores)])
