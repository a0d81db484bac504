"""Which utterances are used: none twice, some held out, repeats thinned."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from recipes.hybrid.pipeline.groups import PrepareSettings
from recipes.hybrid.pipeline.stage import StageError


def distinct(utterances: Iterable[Utterance], skipped: Skipped) -> Iterator[Utterance]:
    """Pass on the first utterance of every id, that is of every side and time."""
    seen: set[str] = set()
    for utterance in utterances:
        if utterance.id in seen:
            reason = "transcribed a second time"
            skipped.add(reason, utterance.source, utterance.duration_s)
        else:
            seen.add(utterance.id)
            yield utterance


def first_utterances(
    utterances: list[Utterance], number: int
) -> tuple[list[Utterance], list[Utterance]]:
    """Split into training utterances and the first `number`, which are held out.

    Raises:
        StageError: None would remain for training.
    """
    if len(utterances) <= number:
        raise StageError(
            f"`prepare.dev_utterances` must be below the {len(utterances)} utterances "
            f"there are, got {number}; 0 holds speakers out instead"
        )
    return utterances[number:], utterances[:number]


def hold_out(
    utterances: list[Utterance], settings: PrepareSettings, *, other_way: str = ""
) -> tuple[list[Utterance], list[Utterance]]:
    """Split into training and held-out utterances, with no speaker in both.

    The last speakers by name are held out, until they have `dev_fraction` of the
    conversation sides and at least `min_dev_sides`.

    Args:
        utterances: utterances to divide.
        settings: how many are held out.
        other_way: what else a user can do where there are too few speakers.

    Raises:
        StageError: No speaker would remain for training.
    """
    sides = {(u.speaker, u.side) for u in utterances}
    per_speaker = Counter(speaker for speaker, _ in sides)
    wanted = max(settings.min_dev_sides, round(settings.dev_fraction * len(sides)))
    held_out: set[str] = set()
    for speaker in sorted(per_speaker, reverse=True):
        if sum(per_speaker[s] for s in held_out) >= wanted:
            break
        held_out.add(speaker)
    if not per_speaker.keys() - held_out:
        lower = "lower `prepare.min_dev_sides`" if len(per_speaker) > 1 else ""
        remedies = [one for one in (lower, other_way) if one] or ["add speakers"]
        raise StageError(
            f"expected speakers for training besides {wanted} held-out conversation "
            f"sides, found {len(sides)} sides of {len(per_speaker)} speakers in all; "
            + ", or ".join(remedies)
        )
    train = [u for u in utterances if u.speaker not in held_out]
    return train, [u for u in utterances if u.speaker in held_out]


def limit_repeats(
    utterances: Sequence[Utterance], limit: int, skipped: Skipped
) -> Iterator[Utterance]:
    """Thin out utterances of the same words to about `limit`; 0 passes on all.

    Which ones stay is drawn as in Kaldi's `remove_dup_utts.sh`: of a text heard n >=
    limit times, each with probability limit / n, over the whole corpus. The same
    utterances in the same order give the same choice as there.
    """
    counts = Counter(utterance.words for utterance in utterances)
    draws = _draws()
    for utterance in utterances:
        count = counts[utterance.words]
        if not limit or count < limit or next(draws) < limit / count:
            yield utterance
        else:
            reason = f"same words heard more than {limit} times"
            skipped.add(reason, utterance.source, utterance.duration_s)


def _draws() -> Iterator[float]:
    """The numbers in [0, 1) of Kaldi's script: k_{i+1} = (k_i + 103349) mod 71147."""
    step, modulus = 103_349, 71_147
    return (k * step % modulus / modulus for k in itertools.count(1))
