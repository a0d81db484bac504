"""NIST's global mapping files: rules that rewrite text before words are compared.

A rule is `A => B` or `A => B / C __ D`: where A stands, after C and before D, B is
written. Places are tried from left to right, rules from top to bottom; the output of a
rule is not rewritten again. Rules see characters, not words: `[ ] __ [ ]` keeps a rule
from applying inside a word. A line

    ;; INPUT_DEPENDENT_APPLICATION = "hyp"

makes the rules below it hold for hypotheses only. The implementation follows NIST's
`rfilter1` and `csrfilt.sh`, of SCTK 2.4, where they deviate from their manual.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.utf8 import composed
from lightning_adpsgd.asr.scoring.errors import ScoringError

_BLANKS = " \t\n\r\f\v"
_DEPENDENT = re.compile(r';;\s+INPUT_DEPENDENT_APPLICATION\s*=\s*"([^"]*)"')
_PRINTED = re.compile(r"[^!-~]")
_LOWER = "abcdefghijklmnopqrstuvwxyz"
_TO_UPPER = str.maketrans(_LOWER, _LOWER.upper())
_TO_LOWER = str.maketrans(_LOWER.upper(), _LOWER)

Line = tuple[int, str]
"""A line and its number in its file, from 1."""


def to_upper(text: str) -> str:
    """Upper case of a to z; other letters stay, as in NIST's tools."""
    return text.translate(_TO_UPPER)


def to_lower(text: str) -> str:
    """Lower case of A to Z; other letters stay."""
    return text.translate(_TO_LOWER)


class Rule(NamedTuple):
    """A pattern, its replacement, and the text required to its left and right."""

    pattern: str
    replacement: str
    left: str = ""
    right: str = ""


class RuleSet:
    """Rules in their order.

    Args:
        rules: Rules in the order in which they are tried.
        case_sensitive: Whether patterns distinguish lower case from upper case.
        copy_unmatched: Whether characters that no rule replaces are kept.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        case_sensitive: bool = True,
        copy_unmatched: bool = True,
    ) -> None:
        self.rules = tuple(rules)
        self._fold = str if case_sensitive else to_upper
        self._copy = copy_unmatched
        self._candidates: dict[str, list[Rule]] = {}
        self._folded = [self._folded_rule(rule) for rule in self.rules]

    def _folded_rule(self, rule: Rule) -> Rule:
        fold = self._fold
        return Rule(
            fold(rule.pattern), rule.replacement, fold(rule.left), fold(rule.right)
        )

    def apply(self, text: str) -> str:
        """`text` rewritten by the rules."""
        folded = self._fold(text)
        written = []
        at = 0
        while at < len(text):
            rule = self._match(folded, at)
            if rule is not None:
                written.append(rule.replacement)
                at += len(rule.pattern)
            else:
                written.append(text[at] if self._copy else "")
                at += 1
        return "".join(written)

    def _match(self, text: str, at: int) -> Rule | None:
        for rule in self._beginning(text[at : at + 2]):
            after = at + len(rule.pattern)
            if (
                text.startswith(rule.pattern, at)
                and text.startswith(rule.right, after)
                and at >= len(rule.left)
                and text.startswith(rule.left, at - len(rule.left))
            ):
                return rule
        return None

    def _beginning(self, pair: str) -> list[Rule]:
        """The few rules that may match at a place with these two characters."""
        found = self._candidates.get(pair)
        if found is None:
            found = [rule for rule in self._folded if _may_begin(rule.pattern, pair)]
            self._candidates[pair] = found
        return found


def _may_begin(pattern: str, pair: str) -> bool:
    return bool(pattern) and pair.startswith(pattern[:2])


class Glm(NamedTuple):
    """The rules for references (stm) and for hypotheses (ctm)."""

    reference: RuleSet
    hypothesis: RuleSet


NO_RULES = Glm(RuleSet(), RuleSet())


def read_glm(path: str | Path) -> Glm:
    """Reads a global mapping file, in NFC as words are.

    Raises:
        ScoringError: A line is not a rule; NIST's tools would stop there too.
        OSError: The file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    return parse_glm(composed(text).split("\n"), str(path))


def parse_glm(text: Iterable[str], name: str) -> Glm:
    """The rules that the lines of a global mapping file hold.

    Args:
        text: The lines.
        name: Name of the file, for messages.

    Raises:
        ScoringError: A line is not a rule; NIST's tools would stop there too.
    """
    lines = list(enumerate(text, start=1))
    return Glm(
        _rule_set(name, list(_applicable(lines, ("stm", "ref")))),
        _rule_set(name, list(_applicable(lines, ("ctm", "hyp")))),
    )


def _applicable(lines: Sequence[Line], kinds: Sequence[str]) -> Iterator[Line]:
    applies = True
    for number, line in lines:
        match = _DEPENDENT.match(line)
        if match:
            wanted = re.compile(to_lower(match[1]))
            applies = any(wanted.search(kind) for kind in kinds)
        if applies:
            yield number, line


def _rule_set(name: str, lines: Sequence[Line]) -> RuleSet:
    """Rules of the lines; the first token of the first line begins comments."""
    # The first line only provides that token, and is not a rule.
    comment = _PRINTED.split(lines[0][1], maxsplit=1)[0] if lines else ""
    options: dict[str, str] = {}
    rules = []
    for number, line in lines[1:]:
        text = line.rstrip(_BLANKS)
        if not text or (comment and text.startswith(comment)):
            continue
        where = f"{name}:{number}"
        if text.startswith("*"):
            options.update(_options(text, where))
        else:
            rules.append(_rule(_without_comment(text, comment), where))
    return RuleSet(
        rules,
        case_sensitive=_is_true(options.get("CASE_SENSITIVE", "T")),
        copy_unmatched=_is_true(options.get("COPY_NO_HIT", "T")),
    )


def _without_comment(text: str, comment: str) -> str:
    return text.split(comment, 1)[0] if comment else text


def _options(text: str, where: str) -> dict[str, str]:
    """Options of a line `* case_sensitive = 'F'`; keywords count anywhere in it."""
    quoted = re.search(r"[\"']([^\"']*)", text)
    if quoted is None:
        raise ScoringError(f"{where}: expected a value in quotes, got {text[:60]!r}")
    keywords = ("CASE_SENSITIVE", "COPY_NO_HIT", "FORMAT")
    found = {word: quoted[1] for word in keywords if word in to_upper(text)}
    if found.get("FORMAT", "NIST1") != "NIST1":
        problem = f"expected a file of the format NIST1, got {quoted[1]!r}"
        raise ScoringError(f"{where}: {problem}")
    return found


def _is_true(value: str) -> bool:
    return to_upper(value) in ("T", "YES", "TRUE")


def _rule(line: str, where: str) -> Rule:
    arrow = line.find("=>")
    if arrow < 0:
        raise ScoringError(f"{where}: expected `A => B`, got {line.strip()[:60]!r}")
    pattern = _unquoted(line[:arrow].strip(_BLANKS))
    slash = _context_slash(line)
    if slash is None:
        return Rule(pattern, _field(line, arrow, len(line) - 1))
    replacement = _field(line, arrow, slash - 1)
    slot = line.find("_", slash)
    if slot < 0:
        return Rule(pattern, replacement)
    left = _field(line, slash, slot - 1)
    return Rule(pattern, replacement, left, _field(line, slot, len(line) - 1))


def _context_slash(line: str) -> int | None:
    """The slash before the context: the last one, unless it is inside brackets."""
    slash = line.rfind("/")
    if slash < 0:
        return None
    opening, closing = line.find("[", slash), line.find("]", slash)
    # rfilter1 compares pointers, and a missing one is the smallest
    return None if closing < opening else slash


def _field(line: str, first: int, last: int) -> str:
    """The text after the token at `first`, up to `last`, without outer blanks."""
    while last > first and line[last] in _BLANKS:
        last -= 1
    while first < last and line[first] not in _BLANKS:
        first += 1
    if first >= last:
        return ""
    return _unquoted(line[first : last + 1].lstrip(_BLANKS))


def _unquoted(text: str) -> str:
    if text[:1] + text[-1:] in ("[]", '""'):
        return text[1:-1]
    return text
