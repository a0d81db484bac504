"""How far a word error rate may be trusted: intervals, and tests between two systems.

The interval is a bootstrap: speakers are drawn anew with repetition, and the rate is
counted of each draw. Utterances of one speaker stay together, because they are not
independent of each other.

Two systems are compared on the same segments (NIST's matched pairs): with d_i errors
more of one of them in segment i of n,

    z = mean(d) √n / deviation(d)

is about normal if neither is better.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.scoring.errors import Errors, ScoringError

_LEAST_SEGMENTS = 2


class Interval(NamedTuple):
    """A range of rates, as fractions; NaN where it cannot be told."""

    low: float
    high: float


class Comparison(NamedTuple):
    """Two systems on the same segments.

    Attributes:
        num_segments: Segments that were compared.
        difference: Word error rate of the second less that of the first.
        z: Standard normal variable of the test; NaN if all differences are equal.
        p: Probability of a |z| as large if neither is better (two-sided).
    """

    num_segments: int
    difference: float
    z: float
    p: float


def interval(
    groups: Sequence[Errors], *, share: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """The central interval of the word error rate.

    Args:
        groups: Errors of each speaker.
        share: Share of the draws that lie inside.
        draws: Number of draws.
        seed: Their seed.
    """
    counted = [one for one in groups if one.num_words or one.num_errors]
    if len(counted) < _LEAST_SEGMENTS:
        return Interval(math.nan, math.nan)
    wrong = np.array([one.num_errors for one in counted])
    words = np.array([one.num_words for one in counted])
    dice = np.random.default_rng(seed)
    # How often each speaker is drawn; so memory does not grow with the words.
    weights = dice.multinomial(len(counted), [1 / len(counted)] * len(counted), draws)
    totals = weights @ words
    rates = (weights @ wrong)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(rates, [(1 - share) / 2, (1 + share) / 2])
    return Interval(float(low), float(high))


def compare(first: Mapping[str, Errors], second: Mapping[str, Errors]) -> Comparison:
    """The matched-pairs test.

    Args:
        first: Errors of each segment, by a name that both share.
        second: The same of the other system.

    Raises:
        ScoringError: They do not have the same segments with as many words.
    """
    _check_same(first, second)
    differences = np.array(
        [second[name].num_errors - first[name].num_errors for name in first], float
    )
    words = sum(errors.num_words for errors in first.values())
    deviation = differences.std(ddof=1) if len(differences) > 1 else 0.0
    total = float(differences.sum())
    if not deviation:
        return Comparison(len(differences), total / words, math.nan, math.nan)
    z = float(differences.mean() * math.sqrt(len(differences)) / deviation)
    p = math.erfc(abs(z) / math.sqrt(2))
    return Comparison(len(differences), total / words, z, p)


def _check_same(first: Mapping[str, Errors], second: Mapping[str, Errors]) -> None:
    if not first:
        raise ScoringError("there is no segment to compare")
    if different := sorted(first.keys() ^ second.keys()):
        raise ScoringError(
            f"both systems must have the same segments; {len(different)} are of one "
            f"alone, the first: {different[0]}"
        )
