"""What decoding leaves of a test set: words, times, confidences, and its figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.corpora.acronyms import letters_of
from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.search.output import ctm_line, json_line
from lightning_adpsgd.asr.search.words import Hypothesis, TimedWord
from lightning_adpsgd.files import written_whole


class Decoded(NamedTuple):
    """Summary figures of decoding one test set.

    Attributes:
        utterances: number of utterances.
        incomplete: number of hypotheses without a sentence that ends at the last frame.
        short_lists: number of lists with fewer alternatives than `decode.nbest`.
        single_lists: number of lists with one alternative.
        confidence: mean confidence of the words.
        real_time_factor: seconds of one core per second of speech, with the network.
    """

    utterances: int
    incomplete: int
    short_lists: int
    single_lists: int
    confidence: float
    real_time_factor: float


def write_words(
    folder: Path, split: str, spoken: Sequence[Utterance], found: Sequence[Hypothesis]
) -> None:
    """Writes `swb.txt`, `swb.ctm` and `swb.words.jsonl` of a test set `swb`."""
    texts, times, objects = [], [], []
    for utterance, hypothesis in zip(spoken, found, strict=True):
        words = _letters(utterance, hypothesis)
        texts.append(" ".join((utterance.id, *(word.word for word in words))))
        side = utterance.conversation, "AB"[utterance.channel]
        times += [ctm_line(*side, word) for word in words]
        objects.append(json_line(utterance.id, words))
    _write_lines(folder / f"{split}.txt", texts)
    _write_lines(folder / f"{split}.ctm", times)
    _write_lines(folder / f"{split}.words.jsonl", objects)


def told_of(found: Sequence[Hypothesis], nbest: int, factor: float) -> Decoded:
    """The figures of the hypotheses of a test set.

    Args:
        found: hypotheses, one per utterance.
        nbest: number of word sequences that each list should hold; 0 for no lists.
        factor: real-time factor.
    """
    sure = [word.confidence for hypothesis in found for word in hypothesis.words]
    listed = [hypothesis.num_listed for hypothesis in found] if nbest else []
    return Decoded(
        utterances=len(found),
        incomplete=sum(not hypothesis.is_complete for hypothesis in found),
        short_lists=sum(number < nbest for number in listed),
        single_lists=sum(number == 1 for number in listed),
        confidence=float(np.mean(sure)) if sure else 0.0,
        real_time_factor=factor,
    )


def say(split: str, decoded: Decoded) -> None:
    """Prints the figures, with a warning for unfinished hypotheses."""
    print(
        f"  {split}: real-time factor {decoded.real_time_factor:.2g} of one core, mean "
        f"confidence {decoded.confidence:.1%}",
        flush=True,
    )
    if decoded.short_lists:
        print(
            f"  {split}: {decoded.short_lists} of {decoded.utterances} lists are "
            f"shorter than decode.nbest, {decoded.single_lists} hold one entry; a "
            "larger decode.lattice_beam lists more",
            flush=True,
        )
    if decoded.incomplete:
        print(
            f"  WARNING: {split}: no sentence ends with the last frame in "
            f"{decoded.incomplete} of {decoded.utterances} utterances; their best "
            "unfinished path is taken. A larger decode.beam or decode.max_active may "
            "help",
            flush=True,
        )


def _letters(utterance: Utterance, hypothesis: Hypothesis) -> list[TimedWord]:
    """The words with times in the recording; those of `i._b._m.` are its letters."""
    words = []
    for word in hypothesis.words:
        letters = letters_of(word.word)  # references have them apart too
        duration_s = word.duration_s / len(letters)
        for place, letter in enumerate(letters):
            start_s = utterance.start_s + word.start_s + place * duration_s
            words.append(TimedWord(letter, start_s, duration_s, word.confidence))
    return words


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with written_whole(path) as file:
        file.writelines(f"{line}\n" for line in lines)
