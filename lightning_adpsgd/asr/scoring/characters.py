"""Character error rate: edits between the characters of reference and hypothesis.

    CER = edits / characters of the reference

Words are those that word errors are counted of, after the rules of the GLM, with one
blank between them. Of alternatives the one that was aligned counts; an optional word
counts if it was said.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein

from lightning_adpsgd.asr.scoring.aligner import CORRECT, Pair
from lightning_adpsgd.asr.scoring.words import Word


class CharacterErrors(NamedTuple):
    """Edits against a reference of `num_characters` characters."""

    num_characters: int = 0
    num_edits: int = 0

    @property
    def cer(self) -> float:
        """Character error rate as a fraction; NaN without characters."""
        if not self.num_characters:
            return float("nan")
        return self.num_edits / self.num_characters


def character_errors(segments: Iterable[Sequence[Pair]]) -> CharacterErrors:
    """The character errors of aligned segments."""
    characters = edits = 0
    for pairs in segments:
        counted = [pair for pair in pairs if not _is_excused(pair)]
        meant = _text(pair.reference for pair in counted)
        said = _text(pair.hypothesis for pair in counted)
        characters += len(meant)
        edits += Levenshtein.distance(meant, said)
    return CharacterErrors(characters, edits)


def _is_excused(pair: Pair) -> bool:
    """Whether a word stands on one side alone and is no error: an optional one."""
    return pair.kind == CORRECT and None in (pair.reference, pair.hypothesis)


def _text(words: Iterable[Word | None]) -> str:
    spelled = (word.compared for word in words if word and not word.is_nothing)
    return " ".join(spelled)
