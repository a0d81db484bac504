"""Counts of word errors, and the error of an input that cannot be scored.

WER = (substitutions + deletions + insertions) / reference words
"""

from collections.abc import Iterable
from typing import NamedTuple


class ScoringError(ValueError):
    """A reference, hypothesis or rule is unusable; the message names its line."""


class Errors(NamedTuple):
    """Errors against a reference of `num_words` words.

    Attributes:
        num_words: Correct, substituted and deleted reference words.
        substitutions: Words recognised as another word.
        deletions: Words missing from the hypothesis.
        insertions: Words that the reference lacks.
        num_segments: Number of compared segments ("Snt" of NIST's tables).
        wrong_segments: Number of segments with at least one error.
    """

    num_words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    num_segments: int = 0
    wrong_segments: int = 0

    @property
    def num_correct(self) -> int:
        """Reference words that were recognised."""
        return self.num_words - self.substitutions - self.deletions

    @property
    def num_errors(self) -> int:
        """Errors of all three kinds."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Word error rate as a fraction; NaN without reference words."""
        return self.num_errors / self.num_words if self.num_words else float("nan")

    def plus(self, other: "Errors") -> "Errors":
        """The errors of both."""
        return Errors(*(mine + its for mine, its in zip(self, other, strict=True)))


def total_of(several: Iterable[Errors]) -> Errors:
    """The sum of all."""
    total = Errors()
    for errors in several:
        total = total.plus(errors)
    return total
