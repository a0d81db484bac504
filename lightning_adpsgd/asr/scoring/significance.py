"""The significance of word error rates: intervals, and tests between two systems.

The interval is a bootstrap: speakers are resampled with replacement, and each draw
gives a rate. Utterances of one speaker stay together, because they are not independent.

Two systems are compared on the same segments (NIST's matched pairs). If one of them has
d_i more errors in segment i of n,

    z = mean(d) √n / deviation(d)

is approximately standard normal if neither is better. Segments are lines of the
reference, and count as independent, those of one speaker too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.scoring.errors import Errors, ScoringError

_LEAST_SEGMENTS = 2


class Interval(NamedTuple):
    """A range of rates, as fractions; NaN if it is undefined."""

    low: float
    high: float


class Comparison(NamedTuple):
    """Two systems on the same segments.

    Attributes:
        num_segments: Number of compared segments.
        difference: Word error rate of the second less that of the first; NaN without
            reference words.
        z: Standard normal variable of the test; NaN if all differences are equal.
        p: Two-sided probability of a |z| at least this large if neither is better.
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
        share: Share of the draws inside the interval.
        draws: Number of draws.
        seed: Random seed of the draws.
    """
    counted = [one for one in groups if one.num_words or one.num_errors]
    if len(counted) < _LEAST_SEGMENTS:
        return Interval(math.nan, math.nan)
    wrong = np.array([one.num_errors for one in counted])
    words = np.array([one.num_words for one in counted])
    if not words.any():
        return Interval(math.nan, math.nan)
    dice = np.random.default_rng(seed)
    # Counts of draws per speaker, so that memory does not grow with the words.
    weights = dice.multinomial(len(counted), [1 / len(counted)] * len(counted), draws)
    totals = weights @ words
    rates = (weights @ wrong)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(rates, [(1 - share) / 2, (1 + share) / 2])
    return Interval(float(low), float(high))


def compare(first: Mapping[str, Errors], second: Mapping[str, Errors]) -> Comparison:
    """The matched-pairs test.

    A segment's number of words may differ: alternatives of a reference have their own.

    Args:
        first: Errors of each segment, by a name that both share.
        second: Errors of the other system, in the same form.

    Raises:
        ScoringError: There are no segments, or the systems differ in them.
    """
    _check_same(first, second)
    differences = np.array(
        [second[name].num_errors - first[name].num_errors for name in first], float
    )
    words = sum(errors.num_words for errors in first.values())
    deviation = differences.std(ddof=1) if len(differences) > 1 else 0.0
    difference = float(differences.sum()) / words if words else math.nan
    if not deviation:
        return Comparison(len(differences), difference, math.nan, math.nan)
    z = float(differences.mean() * math.sqrt(len(differences)) / deviation)
    p = math.erfc(abs(z) / math.sqrt(2))
    return Comparison(len(differences), difference, z, p)


def _check_same(first: Mapping[str, Errors], second: Mapping[str, Errors]) -> None:
    if not first:
        raise ScoringError(
            "there are no segments to compare: the first system has none; score a "
            "part of the test that has utterances"
        )
    if different := sorted(first.keys() ^ second.keys()):
        raise ScoringError(
            f"both systems must have the same segments; {len(different)} are of one "
            f"alone, the first: {different[0]}"
        )
