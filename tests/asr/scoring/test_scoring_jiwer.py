"""The scorer beside jiwer, which counts the fewest edits and knows no rules."""

import random

import jiwer
import pytest

from lightning_adpsgd.asr.scoring import Errors, score

WORDS: tuple[str, ...] = ("one", "two", "three", "four", "five")


def cost(errors: Errors) -> int:
    """That which sclite's alignments make least."""
    return 4 * errors.substitutions + 3 * (errors.deletions + errors.insertions)


def of_jiwer(reference: list[str], hypothesis: list[str]) -> Errors:
    found = jiwer.process_words(" ".join(reference), " ".join(hypothesis))
    counts = found.substitutions, found.deletions, found.insertions
    return Errors(len(reference), *counts)


@pytest.mark.parametrize("seed", range(40))
def test_no_alignment_is_cheaper_and_none_has_fewer_edits_than_the_fewest(
    seed: int,
) -> None:
    dice = random.Random(seed)
    reference = dice.choices(WORDS, k=dice.randint(1, 12))
    hypothesis = dice.choices(WORDS, k=dice.randint(0, 12))
    mine = score({"u": reference}, {"u": hypothesis})
    theirs = of_jiwer(reference, hypothesis)
    assert mine.num_words == theirs.num_words
    assert cost(mine) <= cost(theirs)
    assert sum(theirs[1:4]) <= sum(mine[1:4])
    # More words on one side are more of one kind of error, however they are aligned.
    surplus = len(hypothesis) - len(reference)
    assert mine.insertions - mine.deletions == surplus
