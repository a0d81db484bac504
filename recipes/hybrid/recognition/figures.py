"""The figures of a scored run, and its comparison with other runs."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.scoring import Errors, Scores, ScoringError
from lightning_adpsgd.asr.scoring.characters import character_errors
from lightning_adpsgd.asr.scoring.significance import compare, interval
from lightning_adpsgd.files import write_json

# Results of Kaldi and ESPnet print 4,459 segments, 1,831 of SWB and 2,628 of CH; others
# count 4,458 utterances. The words are 42,989 with all of them: 21,395 and 21,594.
HUB5_SEGMENTS, HUB5_WORDS = (4458, 4459), 42_989


def figures_of(
    errors: dict[str, Errors],
    by_speaker: Mapping[tuple[str, str], Errors],
    part_of: Mapping[str, str],
    scores: Scores,
) -> dict[str, dict[str, Any]]:
    """Rates of each part: of words with their interval, and of characters.

    Args:
        errors: Errors of each part, and of all as "total".
        by_speaker: Errors of each speaker and file.
        part_of: Part that each file belongs to.
        scores: Aligned segments.
    """
    figures = {}
    for part, sums in errors.items():
        is_total = part == "total"
        own = {
            key: one
            for key, one in by_speaker.items()
            if is_total or part_of[key[1]] == part
        }
        aligned = (
            scored.pairs
            for scored in scores.segments
            if is_total or part_of[scored.segment.side[0]] == part
        )
        low, high = (_json_number(end) for end in interval(_of_speakers(own)))
        figures[part] = {
            "wer": sums.wer,
            "wer_low": low,
            "wer_high": high,
            "cer": _json_number(character_errors(aligned).cer),
            **sums._asdict(),
        }
    return figures


def _of_speakers(by_file: Mapping[tuple[str, str], Errors]) -> list[Errors]:
    """The errors of each speaker, of all files together.

    An utterance may be a file of its own, and those of one speaker are not independent.
    """
    sums: dict[str, Errors] = {}
    for (speaker, _), one in by_file.items():
        sums[speaker] = sums.get(speaker, Errors()).plus(one)
    return list(sums.values())


def _json_number(value: float) -> float | None:
    return None if math.isnan(value) else value


def compared_with(
    others: Path, output: Path, run: str, scores: Scores
) -> dict[str, dict[str, float | None]]:
    """The matched-pairs tests against runs that were scored before.

    Prints which runs cannot be compared, and why.

    Args:
        others: Folder of the scored runs.
        output: Folder of this one, which gets `segments.json`.
        run: Name of this run, whose earlier score is left out.
        scores: Aligned segments.
    """
    mine = _by_segment(scores)
    written = {segment: list(errors) for segment, errors in mine.items()}
    write_json(output / "segments.json", written)
    compared = {}
    for other, path in _scored(others, output):
        if other == run:
            continue
        theirs = json.loads(path.read_text())
        try:
            found = compare({k: Errors(*v) for k, v in theirs.items()}, mine)
            _check_alike(path.parent, output)
        except ScoringError as error:  # another reference
            print(f"  against {other}: not compared: {error}", flush=True)
            continue
        told = {key: _json_number(value) for key, value in found._asdict().items()}
        compared[other] = told
    return compared


def _check_alike(other: Path, output: Path) -> None:
    """Refuses errors that were counted against other words of the same segments.

    Raises:
        ScoringError: They were.
    """
    theirs, mine = (folder / "reference.stm" for folder in (other, output))
    if not theirs.exists() or theirs.read_bytes() != mine.read_bytes():
        raise ScoringError(
            f"{theirs} has other words for the same segments, or they were compared in "
            "another way; score both again"
        )


def _scored(others: Path, output: Path) -> Iterator[tuple[str, Path]]:
    """What was scored before, by name; not what is unfinished in a hidden folder."""
    for path in sorted(others.glob("[!.]*/segments.json")):
        yield path.parent.name, path
    if (last := output.parent / "segments.json").exists():
        yield "the last epoch", last  # of the same run, beside its best one


def _by_segment(scores: Scores) -> dict[str, Errors]:
    """The errors of each segment, by its side, begin and line of the reference."""
    return {
        f"{' '.join(one.segment.side)} {one.segment.start_s:.2f} "
        f"{one.segment.line}": one.errors
        for one in scores.segments
    }


def say(summary: dict[str, Any]) -> None:
    """Prints rates, comparisons with other runs, and the size of the test set."""
    for part, figures in summary["parts"].items():
        line = f"  {part}: WER {figures['wer']:.1%}"
        if figures["wer_low"] is not None:
            ends = f"{figures['wer_low']:.1%} to {figures['wer_high']:.1%}"
            line += f" ({ends}, 95 % by a bootstrap over speakers)"
        if figures["cer"] is not None:
            line += f", CER {figures['cer']:.1%}"
        print(line)
    for run, test in summary["compared"].items():
        p = "" if test["p"] is None else f", p = {test['p']:.2g} by matched pairs"
        print(f"  against {run}: {test['difference']:+.1%} WER{p}")
    if summary["parts"].keys() >= {"SWB", "CH"}:
        print(f"  {hub5_size(summary['parts']['total'])}", flush=True)


def hub5_size(total: Mapping[str, Any]) -> str:
    """The size of the scored test set beside that of all of Hub5'00."""
    found = total["num_segments"], total["num_words"]
    if found[0] in HUB5_SEGMENTS and found[1] == HUB5_WORDS:
        return f"all of Hub5'00: {found[0]:,} segments, {found[1]:,} words"
    return (
        f"NOT all of Hub5'00: {found[0]:,} segments of {HUB5_SEGMENTS[0]:,} and "
        f"{found[1]:,} words of {HUB5_WORDS:,}; the figures of papers are of all"
    )
