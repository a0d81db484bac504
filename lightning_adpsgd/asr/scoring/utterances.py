"""Word error rate of utterances that are lists of words, by the rules of Hub5.

Noises count on neither side. Hesitations and broken-off words may be missing. They are
removed from hypotheses, where they could only count as errors, as in Kaldi's recipes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from lightning_adpsgd.asr.scoring.errors import Errors, ScoringError
from lightning_adpsgd.asr.scoring.glm import NO_RULES, Glm
from lightning_adpsgd.asr.scoring.scorer import score_lines

_HESITATIONS = "uh um eh mm hm ah huh ha er oof hee ach eee ew %hesitation"
HESITATIONS = frozenset(_HESITATIONS.split(" "))
NOISES = frozenset(("[noise]", "[laughter]", "[vocalized-noise]", "<unk>"))
_ACRONYM = re.compile(r"[a-z]\.(_[a-z]\.)+")


def is_optional(word: str) -> bool:
    """Whether a word is a hesitation or broken off."""
    lower = word.lower()
    return lower in HESITATIONS or lower.startswith("-") or lower.endswith("-")


def is_noise(word: str) -> bool:
    """Whether a word stands for a noise or something unknown."""
    return word.lower() in NOISES


def written_words(word: str) -> list[str]:
    """The spelling of a recognised word for scoring.

    Noises, hesitations and broken-off words are left out, `u._s.` becomes `u s`.
    """
    return [] if is_noise(word) or is_optional(word) else _letters(word)


def _letters(word: str) -> list[str]:
    """The letters of an acronym as the lexicon writes it, or the word."""
    is_acronym = _ACRONYM.fullmatch(word.lower())
    return word.replace(".", "").split("_") if is_acronym else [word]


def score(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    *,
    glm: Glm = NO_RULES,
    sources: Mapping[str, str] | None = None,
) -> Errors:
    """Errors of a set of utterances.

    Args:
        references: Words of each utterance.
        hypotheses: Words recognised; an utterance that is missing has none, and all
            its words count as deleted.
        glm: Rules for both sides.
        sources: `file:line` of each reference, for messages.

    Raises:
        ScoringError: A reference is empty, a hypothesis has no reference, or no words
            are left that count.
    """
    _check(references, hypotheses, sources or {})
    names = list(references)
    stm = [_stm_line(place, references[name]) for place, name in enumerate(names)]
    ctm = [
        line
        for place, name in enumerate(names)
        for line in _ctm_lines(place, hypotheses.get(name, ()))
    ]
    total = score_lines(list(enumerate(stm, 1)), list(enumerate(ctm, 1)), glm).total
    if total.num_words == 0:
        raise ScoringError(
            f"none of {len(references)} references has a word that counts; a word "
            "error rate is not defined"
        )
    return total


def _check(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    sources: Mapping[str, str],
) -> None:
    stray = sorted(set(hypotheses) - set(references))
    if stray:
        raise ScoringError(
            f"{len(stray)} hypotheses have no reference, the first: {stray[0]}"
        )
    for utterance, words in references.items():
        if not words:
            where = sources.get(utterance) or utterance
            raise ScoringError(f"{where}: the reference of {utterance} has no words")


def reference_text(words: Iterable[str]) -> list[str]:
    """Words as in a reference: without noises, and `(uh)` for optional words."""
    kept = (part for word in words if not is_noise(word) for part in _letters(word))
    return [f"({word})" if is_optional(word) else word for word in kept]


def _stm_line(place: int, words: Iterable[str]) -> str:
    return f"{place:09d} a {place} 0 1 <o> {' '.join(reference_text(words))}"


def _ctm_lines(place: int, words: Iterable[str]) -> list[str]:
    written = [part for word in words for part in written_words(word)]
    return [f"{place:09d} a {at} 1 {word}" for at, word in enumerate(written)]
