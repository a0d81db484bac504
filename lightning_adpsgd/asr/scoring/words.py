"""Words to be compared, and the choices between them.

A text is words, alternations `{ A / B C / @ }` of which any one is right (`@` is no
word), optional words `(UH)` and broken-off words `DOG-`. It becomes a network: a list
of words, each knowing those that may come before it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_adpsgd.asr.scoring.errors import ScoringError

NOTHING = "@"
_TAGS = re.compile(r"(?<!\\);")


class Word(NamedTuple):
    """A word of a reference or a hypothesis.

    Attributes:
        text: As written, `(uh)` with its parentheses.
        start_s: Begin in seconds; 0 where it is not known.
        duration_s: Its length.
        is_optional: Whether its absence is no error.
        is_fragment: Whether it is broken off and matches any word that it begins.
        is_nothing: Whether it stands for no word.
    """

    text: str
    start_s: float = 0.0
    duration_s: float = 0.0
    is_optional: bool = False
    is_fragment: bool = False
    is_nothing: bool = False

    @property
    def compared(self) -> str:
        """The text that is compared, without parentheses."""
        return self.text[1:-1] if self.is_optional else self.text


class WordOptions(NamedTuple):
    """The meaning of marks: `-F` and `-D` of sclite, and what it always takes for one.

    Attributes:
        fragments: `dog-` matches words that begin with it.
        optional: `(uh)` may be missing.
        tags: `word;tag` and `word*` are `word`.
        alternatives: `{ a / b }` offers a choice, and `@` is no word.
    """

    fragments: bool = True
    optional: bool = True
    tags: bool = True
    alternatives: bool = True


ALL_MARKS = WordOptions()
NO_MARKS = WordOptions(*(False for _ in WordOptions._fields))


def make_word(
    text: str, options: WordOptions, start_s: float = 0.0, duration_s: float = 0.0
) -> Word:
    """The word of a token, without its tags (`word;tag;tag`) and a star at its end."""
    text = _untagged(text) if options.tags else text
    is_optional = options.optional and text[:1] == "(" and text[-1:] == ")"
    is_fragment = options.fragments and (
        text[:1] == "-" or text[-1:] == "-" or (is_optional and text[-2:-1] == "-")
    )
    is_nothing = options.alternatives and text == NOTHING
    return Word(text, start_s, duration_s, is_optional, is_fragment, is_nothing)


def _untagged(text: str) -> str:
    text = _TAGS.split(text, maxsplit=1)[0].replace("\\", "")
    return text[:-1] if len(text) > 1 and text.endswith("*") else text


def is_same(one: Word, other: Word) -> bool:
    """Whether two words match; that of `one` is looked at first if broken off."""
    mine, its = one.compared, other.compared
    if one.is_fragment or other.is_fragment:
        for fragment, whole in ((mine, its), (its, mine)):
            if len(fragment) > 1 and fragment[0] == "-":
                return whole.endswith(fragment[1:])
            if len(fragment) > 1 and fragment[-1] == "-":
                return whole.startswith(fragment[:-1])
    return mine == its


Sequential = Sequence["Word | Choice"]


class Choice(NamedTuple):
    """Alternatives, each a sequence of words and choices."""

    alternatives: tuple[Sequential, ...]


def parse_text(text: str, options: WordOptions, where: str) -> list[Word | Choice]:
    """The words and alternations of a reference.

    Raises:
        ScoringError: An alternation is not closed or is empty.
    """
    if not options.alternatives:
        return [make_word(token, options) for token in text.split()]
    return [
        _parse_choice(token[1:-1], options, where)
        if token.startswith("{")
        else make_word(token, options)
        for token in _tokens(text, where)
    ]


def _tokens(text: str, where: str) -> Iterator[str]:
    """Words, and alternations as a whole."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        end = _end_of_token(text, at, where)
        yield text[at:end]
        at = end


def _end_of_token(text: str, start: int, where: str) -> int:
    if text[start] == "{":
        return _end_of_choice(text, start, where)
    end = start
    while end < len(text) and not text[end].isspace():
        end += 1
    if "{" in text[start:end]:
        raise ScoringError(
            f"{where}: an alternation must stand apart from words, and not in "
            f"parentheses, got {text[start:end]!r}"
        )
    return end


def _end_of_choice(text: str, start: int, where: str) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at + 1
    raise ScoringError(
        f"{where}: the alternation is not closed: {text[start:].strip()[:60]!r}; add "
        "the `}` that it lacks"
    )


def _parse_choice(text: str, options: WordOptions, where: str) -> Choice:
    parsed = [parse_text(part, options, where) for part in _alternatives(text)]
    alternatives = tuple(part for part in parsed if part)
    if not alternatives:
        raise ScoringError(
            f"{where}: the alternation {{{text}}} offers no word; give it one, or "
            "leave it out"
        )
    return Choice(alternatives)


def _alternatives(text: str) -> Iterator[str]:
    """The parts between slashes that are not inside an inner alternation."""
    depth = begin = 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "/" and depth == 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


class Network(NamedTuple):
    """Words that may follow one another; the first, None, comes before all.

    Attributes:
        words: In an order in which every word follows those before it.
        before: For each word, positions of those that may come right before it.
        ends: Positions of the words that may be the last.
    """

    words: list[Word | None]
    before: list[tuple[int, ...]]
    ends: tuple[int, ...]


def network_of(sequence: Iterable[Word | Choice]) -> Network:
    """The network of a sequence of words and choices."""
    network = Network([None], [()], ())
    return network._replace(ends=_extend(network, sequence, (0,)))


def _extend(
    network: Network, sequence: Iterable[Word | Choice], ends: tuple[int, ...]
) -> tuple[int, ...]:
    for item in sequence:
        if isinstance(item, Choice):
            several = (_extend(network, part, ends) for part in item.alternatives)
            ends = tuple(end for part in several for end in part)
        else:
            network.words.append(item)
            network.before.append(ends)
            ends = (len(network.words) - 1,)
    return ends
