"""Word error rate of a test set and its parts, after the rules of a GLM file.

    WER = (substitutions + deletions + insertions) / reference words

As in Hub5 scoring, noises, hesitations and broken-off words count on neither side, and
reference and hypothesis are brought to one spelling by a global mapping file (GLM).
Of the GLM, rules between any two words are applied, `[a b] => [c] / [ ] __ [ ]`; where
a rule offers alternatives, `{a / b}`, either is right. Optional words in a reference
are left out before this module sees it. Published figures are made by NIST's hubscr.pl.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jiwer

_HESITATIONS = "uh um eh mm hm ah huh ha er oof hee ach eee ew %hesitation"
HESITATIONS = frozenset(_HESITATIONS.split(" "))
NOISES = frozenset(("[noise]", "[laughter]", "[vocalized-noise]", "<unk>"))

_RULE = re.compile(r"\[([^\]]*)\]\s*=>\s*(.+?)\s*/\s*\[\s*\]\s*__\s*\[\s*\]\s*")
_MOST_VARIANTS = 64  # of one reference; more alternatives than that stay as they are


class ScoringError(ValueError):
    """A reference or a rule cannot be used; the message has the file and the line."""


class Errors(NamedTuple):
    """Errors against a reference of `num_words` words."""

    num_words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def wer(self) -> float:
        """Word error rate as a fraction; NaN without reference words."""
        if self.num_words == 0:
            return float("nan")
        total = self.substitutions + self.deletions + self.insertions
        return total / self.num_words

    def plus(self, other: "Errors") -> "Errors":
        """The errors of both."""
        return Errors(*(mine + its for mine, its in zip(self, other, strict=True)))


class Rule(NamedTuple):
    """Words to be replaced, and what may stand in their place."""

    pattern: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]


class Glm(NamedTuple):
    """The rules of a global mapping file, by first word, longest pattern first.

    `num_skipped` rules have a context or a form that is not applied.
    """

    rules: Mapping[str, tuple[Rule, ...]]
    num_skipped: int = 0

    def variants(self, words: Sequence[str]) -> list[tuple[str, ...]]:
        """All ways in which `words` may be written after the rules.

        Rules apply from left to right, once at each place. The first variant is the
        one with the first alternative everywhere.
        """
        results: list[tuple[str, ...]] = [()]
        at = 0
        while at < len(words):
            rule = self._match(words, at)
            choices = rule.alternatives if rule else ((words[at],),)
            if len(results) * len(choices) > _MOST_VARIANTS:
                choices = choices[:1]
            results = [before + choice for before in results for choice in choices]
            at += len(rule.pattern) if rule else 1
        return list(dict.fromkeys(results))

    def _match(self, words: Sequence[str], at: int) -> Rule | None:
        for rule in self.rules.get(words[at], ()):
            if tuple(words[at : at + len(rule.pattern)]) == rule.pattern:
                return rule
        return None


def read_glm(path: str | Path) -> Glm:
    """Reads the rules of a GLM file, in lower case.

    Raises:
        ScoringError: A line with `=>` has no `[pattern]`, or unbalanced braces.
    """
    path = Path(path)
    rules: list[Rule] = []
    num_skipped = 0
    lines = path.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    for number, line in enumerate(lines, start=1):
        text = line.split(";;")[0].strip()
        if "=>" not in text:
            continue
        rule = _rule(text, f"{path}:{number}")
        if rule is None:
            num_skipped += 1
        else:
            rules.append(rule)
    return Glm(_by_first_word(rules), num_skipped)


def _rule(text: str, where: str) -> Rule | None:
    if not text.startswith("["):
        raise ScoringError(f"{where}: expected `[words] => ...`, got {text[:60]!r}")
    if text.count("{") != text.count("}") or text.count("[") != text.count("]"):
        raise ScoringError(f"{where}: brackets or braces are not balanced")
    match = _RULE.fullmatch(text)
    if not match or not match[1].split():
        return None
    replaced = match[2]
    if replaced.startswith("{") and replaced.endswith("}"):
        choices = replaced[1:-1].split("/")
    else:
        choices = [replaced]
    words = (tuple(re.sub(r"[\[\]{}]", " ", choice).split()) for choice in choices)
    return Rule(tuple(match[1].split()), tuple(words))


def _by_first_word(rules: Iterable[Rule]) -> dict[str, tuple[Rule, ...]]:
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(rule.pattern[0], []).append(rule)
    return {
        word: tuple(sorted(several, key=lambda rule: -len(rule.pattern)))
        for word, several in found.items()
    }


NO_RULES = Glm({})


def scored_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words that count: no noises, hesitations and broken-off words."""
    lower = (word.lower() for word in words)
    return tuple(word for word in lower if not _is_dropped(word))


def _is_dropped(word: str) -> bool:
    is_partial = word.startswith("-") or word.endswith("-")
    return is_partial or word in HESITATIONS or word in NOISES


def count_errors(
    reference: Sequence[str], hypothesis: Sequence[str], glm: Glm = NO_RULES
) -> Errors:
    """Errors of one utterance; of alternatives, those with the fewest errors count."""
    return min(
        (
            _aligned(one, other)
            for one in glm.variants(scored_words(reference))
            for other in glm.variants(scored_words(hypothesis))
        ),
        key=lambda errors: (sum(errors[1:]), -errors.num_words),
    )


def _aligned(reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    reference = [word for word in reference if not _is_dropped(word)]
    hypothesis = [word for word in hypothesis if not _is_dropped(word)]
    if not reference:
        return Errors(insertions=len(hypothesis))
    found = jiwer.process_words(" ".join(reference), " ".join(hypothesis))
    return Errors(
        len(reference), found.substitutions, found.deletions, found.insertions
    )


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
    sources = sources or {}
    stray = sorted(set(hypotheses) - set(references))
    if stray:
        raise ScoringError(
            f"{len(stray)} hypotheses have no reference, the first: {stray[0]}"
        )
    total = Errors()
    for utterance, words in references.items():
        if not words:
            where = sources.get(utterance) or utterance
            raise ScoringError(f"{where}: the reference of {utterance} has no words")
        total = total.plus(count_errors(words, hypotheses.get(utterance, ()), glm))
    if total.num_words == 0:
        raise ScoringError(
            f"none of {len(references)} references has a word that counts; a word "
            "error rate is not defined"
        )
    return total
