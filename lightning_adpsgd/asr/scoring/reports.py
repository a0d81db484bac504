"""Tables and alignments to read, as people know them from NIST's sclite."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from lightning_adpsgd.asr.scoring.aligner import CORRECT, DELETED, INSERTED, Pair
from lightning_adpsgd.asr.scoring.errors import Errors
from lightning_adpsgd.asr.scoring.glm import to_upper
from lightning_adpsgd.asr.scoring.scorer import ScoredSegment, Scores
from lightning_adpsgd.asr.scoring.words import Word

_COLUMNS = ("Corr", "Sub", "Del", "Ins", "Err", "S.Err")


def table(title: str, rows: Mapping[str, Errors], sum_name: str | None = None) -> str:
    """Percentages, a line for each entry of `rows`.

    Args:
        title: Name of the data that was scored.
        rows: Names of parts or speakers, and their errors.
        sum_name: Name of the last row, which is set apart; None for no such row.
    """
    width = max(5, *(len(name) for name in rows))
    header = f"| {'':{width}} | # Snt  # Wrd |" + "".join(f"{c:>7}" for c in _COLUMNS)
    header += " |"
    rule = "|" + "-" * (len(header) - 2) + "|"
    lines = [f"| {title:<{len(header) - 4}} |", rule, header, rule]
    for name, errors in rows.items():
        if name == sum_name:
            lines.append(rule.replace("-", "="))
        lines.append(_row(name, width, errors))
    return "\n".join([rule.replace("|", ","), *lines, rule.replace("|", "'")])


def _row(name: str, width: int, errors: Errors) -> str:
    counts = f"{errors.num_segments:>5} {errors.num_words:>6}"
    cells = "".join(f"{cell:>7}" for cell in _cells(errors))
    return f"| {name:<{width}} | {counts} |{cells} |"


def _cells(errors: Errors) -> list[str]:
    wrong = _percent(errors.wrong_segments, errors.num_segments)
    counts = (
        errors.num_correct,
        errors.substitutions,
        errors.deletions,
        errors.insertions,
        errors.num_errors,
    )
    if errors.num_words == 0:  # counts in place of percents, as in sclite's tables
        return [*(f"{count}*" for count in counts), wrong]
    return [*(_percent(count, errors.num_words) for count in counts), wrong]


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}" if total else "0.0"


def alignments(scores: Scores) -> str:
    """Reference over hypothesis for every segment, errors in upper case.

    The same text as in sclite's report `pra`.
    """
    blocks = []
    numbers: Counter[str] = Counter()
    for scored in sorted(scores.segments, key=_speaker_order(scores)):
        speaker = scored.segment.speaker
        blocks.append(_block(scored, numbers[speaker]))
        numbers[speaker] += 1
    return "\n".join(blocks)


def _speaker_order(scores: Scores) -> Callable[[ScoredSegment], int]:
    order = {name: place for place, name in enumerate(scores.by_speaker)}
    return lambda scored: order[scored.segment.speaker]


def _block(scored: ScoredSegment, number: int) -> str:
    segment = scored.segment
    file, channel = segment.side
    counts = [sum(pair.kind == kind for pair in scored.pairs) for kind in "CSDI"]
    lines = [f"id: ({segment.speaker}-{number:03d})"]
    lines += [f"Labels: {segment.labels}"] if segment.labels else []
    lines += [
        f"File: {file}",
        f"Channel: {channel}",
        f"Scores: (#C #S #D #I) {' '.join(map(str, counts))}",
    ]
    rows = [_column(pair) for pair in scored.pairs]
    names = ("REF:  ", "HYP:  ", "Eval: ")
    lines += (
        [
            name
            + "".join(
                f"{column[place]:<{max(map(len, column[:2]))}} " for column in rows
            )
            for place, name in enumerate(names)
        ]
        if rows
        else []
    )
    return "\n".join([*lines, ""])


def _column(pair: Pair) -> tuple[str, str, str]:
    reference, hypothesis = _shown(pair.reference), _shown(pair.hypothesis)
    if pair.kind == CORRECT:
        return reference, hypothesis, ""
    if pair.kind == DELETED:
        hypothesis = "*" * len(reference)
    if pair.kind == INSERTED:
        reference = "*" * len(hypothesis)
    return to_upper(reference), to_upper(hypothesis), pair.kind


def _shown(word: Word | None) -> str:
    return "" if word is None else word.text


def confusions(scores: Scores) -> str:
    """Substitutions, deletions and insertions, by frequency."""
    pairs = [pair for scored in scores.segments for pair in scored.pairs]
    substituted = (
        f"{_shown(pair.reference)} ==> {_shown(pair.hypothesis)}"
        for pair in pairs
        if pair.kind == "S"
    )
    deleted = (_shown(pair.reference) for pair in pairs if pair.kind == DELETED)
    inserted = (_shown(pair.hypothesis) for pair in pairs if pair.kind == INSERTED)
    named = {
        "CONFUSION PAIRS": substituted,
        "DELETIONS": deleted,
        "INSERTIONS": inserted,
    }
    return "\n".join(_ranking(name, items) for name, items in named.items())


def _ranking(name: str, items: Iterable[str]) -> str:
    counts = Counter(items)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    lines = [f"{count:>6}  {item}" for item, count in ranked]
    return "\n".join(
        [f"{name}: {counts.total()} ({len(counts)} different)", *lines, ""]
    )
