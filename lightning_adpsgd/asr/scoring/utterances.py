"""Word error rate of utterances that are lists of words.

Noises count on neither side. With the rules of a GLM, hesitations and broken-off words
may be missing, as in Hub5. They are removed from hypotheses, where they could only
count as errors, as in Kaldi's recipes. Without rules all other words are compared as
they are: in other languages `er` and `um` are words.
"""

from collections.abc import Iterable, Mapping, Sequence

from lightning_adpsgd.asr.corpora.acronyms import letters_of
from lightning_adpsgd.asr.corpora.utf8 import composed, in_one_form
from lightning_adpsgd.asr.scoring.errors import Errors, ScoringError
from lightning_adpsgd.asr.scoring.filters import check_optional
from lightning_adpsgd.asr.scoring.glm import Glm
from lightning_adpsgd.asr.scoring.scorer import score_lines
from lightning_adpsgd.asr.scoring.words import (
    ALL_MARKS,
    NO_MARKS,
    WordOptions,
    parse_text,
)

_HESITATIONS = "uh um eh mm hm ah huh ha er oof hee ach eee ew %hesitation"
HESITATIONS = frozenset(_HESITATIONS.split(" "))
_NOISES = "[noise] [laughter] [vocalized-noise] <unk> <noise> <spoken_noise>"
NOISES = frozenset(_NOISES.split(" "))  # the last two are of Kaldi's recipes


def is_optional(word: str) -> bool:
    """Whether a word is a hesitation of English or broken off, by the rules of Hub5."""
    lower = word.lower()
    return lower in HESITATIONS or lower.startswith("-") or lower.endswith("-")


def is_noise(word: str) -> bool:
    """Whether a word stands for a noise or something unknown."""
    return word.lower() in NOISES


def marks_of(glm: Glm | None) -> WordOptions:
    """The marks that count with rules of a GLM, or with none."""
    return NO_MARKS if glm is None else ALL_MARKS


def written_words(word: str, glm: Glm | None = None) -> list[str]:
    """The spelling of a recognised word for scoring.

    Noises are left out, with rules hesitations and broken-off words too. `u._s.`
    becomes `u s`.
    """
    left_out = is_noise(word) or (glm is not None and is_optional(word))
    return [] if left_out else _as_compared(_letters(word), glm)


def _as_compared(words: list[str], glm: Glm | None) -> list[str]:
    """The words in NFC; without rules in lower case, beyond A to Z as well."""
    return [*map(in_one_form if glm is None else composed, words)]


def _letters(word: str) -> list[str]:
    """The letters of an acronym as the lexicon writes it, or the word as it is."""
    lower = word.lower()
    letters = letters_of(lower)
    return [word] if letters == (lower,) else [*letters]


def score(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    *,
    glm: Glm | None = None,
    sources: Mapping[str, str] | None = None,
) -> Errors:
    """Errors of a set of utterances.

    Args:
        references: Words of each utterance.
        hypotheses: Words recognised; a missing utterance counts as empty, so all its
            reference words are deletions.
        glm: Rules for both sides, as of Hub5; without rules, words are compared
            unchanged.
        sources: `file:line` of each reference, for messages.

    Raises:
        ScoringError: A reference is empty or has an open bracket, a hypothesis has no
            reference, or no words are left that count.
    """
    places = {name: (sources or {}).get(name) or name for name in references}
    _check(references, hypotheses, places)
    names = list(references)
    stm = [_stm_line(place, references[name], glm) for place, name in enumerate(names)]
    ctm = [
        line
        for place, name in enumerate(names)
        for line in _ctm_lines(place, hypotheses.get(name, ()), glm)
    ]
    lines = list(enumerate(stm, 1)), list(enumerate(ctm, 1))
    try:
        total = score_lines(*lines, glm, marks_of(glm)).total
    except ScoringError:  # which names a line of what was made here
        for name, words in references.items():
            _check_marks(words, glm, places[name])
        raise
    if total.num_words == 0:
        raise ScoringError(
            f"none of {len(references)} references has a word that counts, so that a "
            "word error rate is not defined; score utterances in which words are said"
        )
    return total


def _check(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    places: Mapping[str, str],
) -> None:
    stray = sorted(set(hypotheses) - set(references))
    if stray:
        raise ScoringError(
            f"{len(stray)} hypotheses have no reference, the first: {stray[0]}"
        )
    for name, words in references.items():
        if not words:
            raise ScoringError(f"{places[name]}: the reference of {name} has no words")


def _check_marks(words: Iterable[str], glm: Glm | None, where: str) -> None:
    """Checks the brackets of a reference, as it is before rules change it.

    Raises:
        ScoringError: One is not closed.
    """
    text = " ".join(reference_text(words, glm))
    if glm is not None:
        check_optional(text, where)
    parse_text(text, marks_of(glm), where)


def reference_text(words: Iterable[str], glm: Glm | None = None) -> list[str]:
    """Words as in a reference, without noises; optional words in parentheses."""
    said = [part for word in words if not is_noise(word) for part in _letters(word)]
    kept = _as_compared(said, glm)
    if glm is None:
        return kept
    return [f"({word})" if is_optional(word) else word for word in kept]


def _stm_line(place: int, words: Iterable[str], glm: Glm | None) -> str:
    return f"{place:09d} a {place} 0 1 <o> {' '.join(reference_text(words, glm))}"


def _ctm_lines(place: int, words: Iterable[str], glm: Glm | None) -> list[str]:
    written = [part for word in words for part in written_words(word, glm)]
    return [f"{place:09d} a {at} 1 {word}" for at, word in enumerate(written)]
