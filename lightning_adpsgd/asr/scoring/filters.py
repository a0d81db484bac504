"""Text of references and hypotheses as NIST's `hubscr.pl` filters it for Hub5.

Lines are sorted by file, channel and time. Words are put into upper case, rewritten by
the rules of the GLM, and parted at hyphens inside them (`CAT-FISH`, not `CAT-`). A
parenthesis of several optional words becomes one around each. A hypothesis word that a
rule turned into several shares its time among them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from lightning_adpsgd.asr.scoring.errors import ScoringError
from lightning_adpsgd.asr.scoring.glm import Line, RuleSet, to_upper

_HYPHEN = re.compile(r"([^( ])-(?=[^) ])")
_SEVERAL_OPTIONAL = re.compile(r"(\(\s+[^()\s]+\s+)([^()\s]+)")
_OPTIONAL = re.compile(r"\s\([^()]+\)")
_LABELLED = re.compile(r"(\s*\S+\s*\S+\s*\S+\s*\S+\s*\S+\s*<\S+>)(.*)", re.ASCII)
_UNLABELLED = re.compile(r"(\s*\S+\s*\S+\s*\S+\s*\S+\s*\S+)(.*)", re.ASCII)
_CONFIDENCE = re.compile(r"[0-9.-]*")


def filter_text(text: str, rules: RuleSet) -> str:
    """The words of a segment, or one word, after all rules."""
    text = to_upper(text).replace("(", "( ").replace(")", " )")
    text = rules.apply(f" {text} ")
    # To the rule about hyphens, the end of the line is a character like others.
    text = _HYPHEN.sub(r"\1 ", text + "\n").removesuffix("\n")
    text = _each_optional(text).removeprefix(" ").removesuffix(" ")
    return re.sub(r"\s+\)", ")", re.sub(r"\(\s+", "(", text))


def _each_optional(text: str) -> str:
    while True:
        parted = _SEVERAL_OPTIONAL.sub(r"\1) ( \2", text, count=1)
        if parted == text:
            return text
        text = parted


def check_optional(text: str, where: str) -> None:
    """Checks that every parenthesis of a text is closed and none is nested.

    Raises:
        ScoringError: A parenthesis is not closed or is nested.
    """
    spaced = f" {text} ".replace("(", "   ( ").replace(")", " )  ")
    if re.search(r"[()]", _OPTIONAL.sub("", spaced)):
        problem = "parentheses around optional words must be closed and not nested"
        raise ScoringError(f"{where}: {problem}, got {text.strip()[:60]!r}")


def is_comment(line: str) -> bool:
    """Whether a line of an stm or ctm file is a comment."""
    return not line.strip() or line.lstrip().startswith(";;")


def sort_lines(
    lines: Iterable[Line], time_field: int, name: str
) -> Iterator[list[Line]]:
    """The lines of each file and channel, sorted by time, without comments.

    Args:
        lines: Lines of the file.
        time_field: Index of the field, from 0, that holds the start time.
        name: Name of the file, for messages.

    Raises:
        ScoringError: A line has too few fields, or its time is not numeric.
    """
    sides: dict[tuple[str, str], list[tuple[float, Line]]] = {}
    for number, line in lines:
        if is_comment(line):
            continue
        fields = line.split()
        where = f"{name}:{number}"
        if len(fields) <= time_field + 1:
            raise ScoringError(f"{where}: too few fields: {line.strip()[:60]!r}")
        start = seconds_of(fields[time_field], where)
        sides.setdefault((fields[0], fields[1]), []).append((start, (number, line)))
    for side in sorted(sides):
        yield [line for _, line in sorted(sides[side], key=lambda pair: pair[0])]


def seconds_of(text: str, where: str) -> float:
    """A time of an stm or ctm file; `*`, the time of an `<ALT>` mark, is 0.

    Raises:
        ScoringError: The time is not a finite number.
    """
    try:
        seconds = 0.0 if text == "*" else float(text)
    except ValueError:
        seconds = float("nan")
    if not abs(seconds) < float("inf"):
        raise ScoringError(f"{where}: expected a time in seconds, got {text!r}")
    return seconds


def filter_stm(lines: Iterable[Line], rules: RuleSet, name: str) -> list[Line]:
    """The lines of a reference, filtered for comparison.

    Raises:
        ScoringError: A line cannot be used.
    """
    sides = sort_lines(lines, 3, name)
    return [_filter_stm_line(line, rules, name) for side in sides for line in side]


def _filter_stm_line(line: Line, rules: RuleSet, name: str) -> Line:
    number, text = line
    text = " " + re.sub(r"[ \t]+", " ", text.strip()) + " "
    match = _LABELLED.match(text) or _UNLABELLED.match(text)
    if match is None:
        problem = "expected `file channel speaker begin end words`"
        raise ScoringError(f"{name}:{number}: {problem}, got {text.strip()[:60]!r}")
    check_optional(match[2], f"{name}:{number}")
    return number, match[1] + filter_text(match[2], rules)


def filter_ctm(lines: Iterable[Line], rules: RuleSet, name: str) -> list[Line]:
    """The lines of a hypothesis, filtered for comparison; a line may become several.

    Raises:
        ScoringError: A line cannot be used.
    """
    return [
        (number, text)
        for side in sort_lines(lines, 2, name)
        for number, line in side
        for text in _filter_ctm_line(line, rules, f"{name}:{number}")
    ]


def _filter_ctm_line(line: str, rules: RuleSet, where: str) -> list[str]:
    fields = line.split()
    if len(fields) < 5:
        problem = "expected `file channel begin duration word [confidence]`"
        raise ScoringError(f"{where}: {problem}, got {line.strip()[:60]!r}")
    check_optional(fields[4], where)
    fields[4] = filter_text(fields[4], rules)
    expanded = re.sub(r"([{}])", r" \1 ", " ".join(fields)).split()
    if len(expanded) == 5:
        return [" ".join(expanded)]
    # A word of digits may be taken for a confidence here, as csrfilt.sh does.
    confidence = expanded.pop() if _CONFIDENCE.fullmatch(expanded[-1]) else ""
    choices = _split_choices(" ".join(expanded[4:]))
    return _spread(expanded[:4], choices, confidence, where)


def _split_choices(text: str) -> list[list[str]]:
    parts = text.split("/")
    while parts and not parts[-1]:
        parts.pop()
    return [re.sub(r"[{}]", "", part).split() for part in parts]


def _spread(
    place: Sequence[str], choices: Sequence[Sequence[str]], confidence: str, where: str
) -> list[str]:
    """Lines of the words of each choice, which share the time of the word."""
    if not choices:
        return []  # a rule has removed the word
    lines = []
    for words in choices:
        if not words:
            problem = "a rule of the GLM offers an alternative without words"
            raise ScoringError(f"{where}: {problem}; NIST's tools require `@` for it")
        start, share = (seconds_of(text, where) for text in place[2:4])
        share /= len(words)
        lines.append(
            [
                f"{place[0]} {place[1]} {start + share * index:.3f} {share:.3f} {word} "
                f"{confidence}"
                for index, word in enumerate(words)
            ]
        )
    if len(lines) == 1:
        return lines[0]
    return _alternated(place, lines)


def _alternated(place: Sequence[str], choices: Sequence[list[str]]) -> list[str]:
    mark = f"{place[0]} {place[1]} * *"
    lines = [f"{mark} <ALT_BEGIN>", *choices[0]]
    for choice in choices[1:]:
        lines += [f"{mark} <ALT>", *choice]
    return [*lines, f"{mark} <ALT_END>"]
