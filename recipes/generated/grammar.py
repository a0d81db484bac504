"""Sentences of a made-up telephone conversation, marked up as MS-State marks them.

A sentence is drawn from the rules, with weights that fall as 1 / (rank + 5) with the
rank of an alternative in its rule. It is then made less fluent: by fillers, repeated
words, words broken off (`bo[ught]-`), noises (`[noise]`, `[vocalized-noise]`,
`[laughter]`) and words said while laughing (`[laughter-really]`).
"""

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache

from recipes.generated.rules import COMMON, PARTIAL_WORDS, TOPICS

Rules = Mapping[str, tuple[str, ...]]

MIN_WORDS, MAX_WORDS = 2, 14
FILLERS = ("uh", "um", "you know", "i mean")
NOISES = ("[noise]", "[laughter]", "[vocalized-noise]")
#: Chance, per sentence, of each way in which speech is not fluent.
FILLER, REPEAT, PARTIAL, NOISE, LAUGHED = 0.16, 0.06, 0.35, 0.10, 0.03


def parse_rules(text: str) -> dict[str, tuple[str, ...]]:
    """Return the alternatives of each rule of a grammar text, in the text's order."""
    rules: dict[str, list[str]] = {}
    name = ""
    for line in filter(str.strip, text.splitlines()):
        if line.endswith(":"):
            name = line[:-1]
            rules[name] = []
        else:
            rules[name].append(line.strip())
    return {name: tuple(alternatives) for name, alternatives in rules.items()}


@cache
def topic_rules(topic: str) -> Rules:
    """Return the rules of a conversation about `topic`, a key of `rules.TOPICS`."""
    return parse_rules(COMMON) | parse_rules(TOPICS[topic])


def vocabulary() -> list[str]:
    """Return every whole word that the grammar can say, sorted."""
    texts = [COMMON, *TOPICS.values(), *(f"  {filler}" for filler in FILLERS)]
    alternatives = (
        line for text in texts for line in text.splitlines() if not line.endswith(":")
    )
    words = (word for line in alternatives for word in line.split())
    return sorted({word for word in words if not word.startswith("$")} | {"an"})


def sentence(rules: Rules, rng: random.Random) -> list[str]:
    """Draw one sentence of `MIN_WORDS` to `MAX_WORDS` tokens, noises not counted."""
    while True:
        words = _with_articles(list(_expand("$sentence", rules, rng)))
        tokens = _add_noises(_disturb(words, rng), rng)
        spoken = [token for token in tokens if token not in NOISES]
        if MIN_WORDS <= len(spoken) <= MAX_WORDS:
            return tokens


def is_partial(token: str) -> bool:
    """Tell whether `token` is a word broken off, such as `bo[ught]-`."""
    return token.endswith("-")


def laughed_word(token: str) -> str | None:
    """Return the word of `[laughter-word]`, None for every other token."""
    match = re.fullmatch(r"\[laughter-(.+)\]", token)
    return match[1] if match else None


def _expand(text: str, rules: Rules, rng: random.Random) -> Iterator[str]:
    for word in text.split():
        if word.startswith("$"):
            yield from _expand(_choose(rules[word[1:]], rng), rules, rng)
        else:
            yield word


def _choose(alternatives: tuple[str, ...], rng: random.Random) -> str:
    weights = [1 / (rank + 5) for rank in range(len(alternatives))]
    return rng.choices(alternatives, weights)[0]


def _with_articles(words: list[str]) -> list[str]:
    """Write `an` for `a` before a vowel."""
    return [
        "an" if word == "a" and following[0] in "aeiou" else word
        for word, following in zip(words, [*words[1:], "."], strict=True)
    ]


def _disturb(words: list[str], rng: random.Random) -> list[str]:
    """Break words off, repeat words, put fillers in."""
    breakable = [at for at, word in enumerate(words) if word in PARTIAL_WORDS]
    if breakable and rng.random() < PARTIAL:
        at = rng.choice(breakable)
        words = [*words[:at], PARTIAL_WORDS[words[at]][0], *words[at:]]
    if rng.random() < REPEAT:
        words = [words[0], *words]
    if rng.random() < FILLER:
        at = rng.randrange(len(words))
        words = [*words[:at], *_choose(FILLERS, rng).split(), *words[at:]]
    return words


def _add_noises(words: list[str], rng: random.Random) -> list[str]:
    whole = [at for at, word in enumerate(words) if not is_partial(word)]
    if rng.random() < LAUGHED:
        at = rng.choice(whole)
        words = [*words[:at], f"[laughter-{words[at]}]", *words[at + 1 :]]
    if rng.random() < NOISE:
        at = rng.randint(0, len(words))
        words = [*words[:at], rng.choice(NOISES), *words[at:]]
    return words
