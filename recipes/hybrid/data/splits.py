"""The utterances of a split: as `prepare` lists them, and with copies at other speeds.

`prepare` lists what was recorded, whose words are counted once. Frames, labels and
streams also cover a copy of every training utterance at each of `features.speeds`,
with a name, a speaker and a conversation side of its own. The copies come after what
was recorded, so that the versions of an utterance lie far apart.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import (
    Skipped,
    Utterance,
    iterate_utterances,
    read_utterances,
    write_utterances,
)
from lightning_adpsgd.files import write_json
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import say

LONG_S = 60.0


def write_splits(output: Path, splits: Mapping[str, list[Utterance]]) -> None:
    """Write `train.jsonl` and so on."""
    for split, utterances in splits.items():
        write_utterances(output / f"{split}.jsonl", utterances)


def utterances(settings: Settings, split: str) -> list[Utterance]:
    """The utterances of one split, as `prepare` wrote them."""
    return read_utterances(settings.directory("prepare") / f"{split}.jsonl")


def speeds_of(settings: Settings, split: str) -> tuple[float, ...]:
    """The speeds of a split's copies; none but for `train`."""
    return settings.features.speeds if split == "train" else ()


def with_copies(settings: Settings, split: str) -> Iterator[Utterance]:
    """The utterances of a split and their copies, in the order of the features."""
    path = settings.directory("prepare") / f"{split}.jsonl"
    yield from iterate_utterances(path)
    for speed in speeds_of(settings, split):
        for utterance in iterate_utterances(path):
            yield utterance.at_speed(speed)


def say_splits(
    output: Path,
    splits: Mapping[str, list[Utterance]],
    skipped: Skipped,
    warnings: Sequence[str] = (),
) -> None:
    """Print what is in the splits and what was left out; write `summary.json`."""
    lines = [_describe(split, utterances) for split, utterances in splits.items()]
    lines += [line for several in splits.items() for line in _long(*several)]
    lines += warnings
    lines += [f"WARNING: left out: {line}" for line in skipped.report()]
    say(lines)
    counts = {"counts": skipped.counts, "seconds": skipped.seconds}
    write_json(output / "summary.json", {"report": lines, "skipped": counts})


def _long(split: str, utterances: Iterable[Utterance]) -> Iterator[str]:
    """Warns of utterances that take much memory: as a recording without segments."""
    long = [one for one in utterances if one.duration_s > LONG_S]
    if long:
        longest = max(long, key=lambda one: one.duration_s)
        yield (
            f"WARNING: {split}: {len(long)} utterances are longer than {LONG_S:.0f} s, "
            f"the longest {longest.duration_s:.0f} s, {longest.source}: the scores of "
            "an utterance are in memory as a whole, a number for each state and frame; "
            "cut it"
        )


def _describe(split: str, utterances: list[Utterance]) -> str:
    hours = sum(u.duration_s for u in utterances) / 3600
    sides = len({u.side for u in utterances})
    words = sum(len(u.words) for u in utterances)
    return (
        f"{split}: {len(utterances)} utterances, {sides} conversation sides, "
        f"{words} words, {hours:.2f} h"
    )
