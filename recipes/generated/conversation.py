"""One telephone conversation: what the two sides say, when, and how it sounds.

A turn is said whole before the next one begins, sides in turn, so the transcript's
times are counts of samples, not estimates.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from recipes.generated import acoustics, espeak
from recipes.generated.acoustics import SAMPLE_RATE, Samples
from recipes.generated.grammar import (
    NOISES,
    is_partial,
    laughed_word,
    sentence,
    topic_rules,
)
from recipes.generated.pronunciations import spoken_partial
from recipes.generated.rules import PARTIAL_WORDS
from recipes.generated.speakers import Speaker

FIRST_TURN_S = 0.3
_WORD_OF_PARTIAL = {token: word for word, (token, _) in PARTIAL_WORDS.items()}
# Test files give times in hundredths of a second: all times are whole ones.
_GRID = SAMPLE_RATE // 100


@dataclass(frozen=True)
class Plan:
    """What a conversation is made from.

    Attributes:
        name: such as `sw02001` or `en_4392`; together with `seed` it draws everything.
        topic: a key of `rules.TOPICS`.
        speakers: of channel A and channel B.
        speech_s: the least seconds of speech, both sides together.
        seed: seed of the corpus.
        layout: which corpus's files it gets, `switchboard`, `hub5`, `fisher`, ....
    """

    name: str
    topic: str
    speakers: tuple[Speaker, Speaker]
    speech_s: float
    seed: int
    layout: str = "switchboard"


@dataclass(frozen=True)
class Turn:
    """What one side says in one go, start and end in samples of the recording."""

    side: int
    start: int
    end: int
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """A rendered plan; `samples` is [time, 2] at 8 kHz."""

    plan: Plan
    turns: tuple[Turn, ...]
    samples: Samples


def render(plan: Plan) -> Conversation:
    """Draw and synthesise the conversation of `plan`."""
    rng = random.Random(f"{plan.seed} {plan.name}")
    noise_rng = np.random.default_rng(rng.getrandbits(64))
    turns: list[Turn] = []
    sounds: list[Samples] = []
    for turn, sound in _turns(plan, rng, noise_rng):
        turns.append(turn)
        sounds.append(sound)
    length = turns[-1].end + round(rng.uniform(0.3, 1.0) * SAMPLE_RATE)
    sides = [
        _line(plan.speakers[s], s, turns, sounds, length, noise_rng) for s in (0, 1)
    ]
    return Conversation(plan, tuple(turns), np.stack(sides, axis=1))


def _turns(
    plan: Plan, rng: random.Random, noise_rng: np.random.Generator
) -> Iterator[tuple[Turn, Samples]]:
    """Yield turns of A and B alternately until both spoke and there is enough."""
    rules = topic_rules(plan.topic)
    start, spoken = round(FIRST_TURN_S * SAMPLE_RATE), 0
    for number in count():
        if number >= 2 and spoken >= plan.speech_s * SAMPLE_RATE:
            return
        side = number % 2
        tokens = tuple(sentence(rules, rng))
        sound = _say(tokens, plan.speakers[side], rng, noise_rng)
        yield Turn(side, start, start + len(sound), tokens), sound
        spoken += len(sound)
        start += len(sound) + rng.randint(5, 30) * _GRID


def _say(
    tokens: tuple[str, ...],
    speaker: Speaker,
    rng: random.Random,
    noise_rng: np.random.Generator,
) -> Samples:
    """Return the sound of one turn, with a little silence at both ends."""
    pieces = [_pause(rng, 4, 12)]
    for group in _groups(tokens):
        if len(pieces) > 1:
            pieces.append(_pause(rng, 2, 6))
        pieces.append(_sound_of(group, speaker, noise_rng))
    pieces.append(_pause(rng, 4, 12))
    sound = np.concatenate(pieces)
    return np.pad(sound, (0, -len(sound) % _GRID))


def _groups(tokens: tuple[str, ...]) -> Iterator[list[str]]:
    """Split into runs of plain words, and single noises and laughed words."""
    run: list[str] = []
    for token in tokens:
        if token not in NOISES and laughed_word(token) is None:
            run.append(token)
            continue
        if run:
            yield run
        yield [token]
        run = []
    if run:
        yield run


def _sound_of(
    group: list[str], speaker: Speaker, noise_rng: np.random.Generator
) -> Samples:
    if group[0] in NOISES:
        level = speaker.level_db + noise_rng.uniform(-8, 0)
        return acoustics.burst(group[0], level, noise_rng)
    word = laughed_word(group[0])
    speech = _speech([word] if word else group, speaker)
    return acoustics.laughed(speech, noise_rng) if word else speech


def _speech(words: list[str], speaker: Speaker) -> Samples:
    accent = speaker.voice.partition("+")[0]
    text = " ".join(
        spoken_partial(_WORD_OF_PARTIAL[word], accent) if is_partial(word) else word
        for word in words
    )
    samples = espeak.speak(
        text, voice=speaker.voice, rate=speaker.rate, pitch=speaker.pitch
    )
    return acoustics.at_level(acoustics.to_line_rate(samples), speaker.level_db)


def _line(
    speaker: Speaker,
    side: int,
    turns: list[Turn],
    sounds: list[Samples],
    length: int,
    rng: np.random.Generator,
) -> Samples:
    """Return one channel: this side's turns and the noise of its line, filtered."""
    channel = np.zeros(length)
    for turn, sound in zip(turns, sounds, strict=True):
        if turn.side == side:
            channel[turn.start : turn.end] = sound
    filtered = acoustics.telephone(channel, tilt_db=speaker.tilt_db)
    noise_db = speaker.level_db - speaker.snr_db
    return filtered + acoustics.line_noise(length, noise_db, rng)


def _pause(rng: random.Random, least: int, most: int) -> Samples:
    """Return `least` to `most` hundredths of a second of nothing."""
    return np.zeros(rng.randint(least, most) * _GRID)
