"""Turns laid out and written as LibriSpeech's utterances, at 16 kHz in FLAC files."""

import os
from collections.abc import Iterable
from pathlib import Path

import soundfile
import torch
from torchaudio.functional import resample

from recipes.generated.acoustics import SAMPLE_RATE
from recipes.generated.conversation import Conversation, Plan
from recipes.generated.grammar import NOISES, is_partial
from recipes.generated.layout import as_said, write_text

RATE = 16_000
SPEAKERS = "LibriSpeech/SPEAKERS.TXT"
LEXICON = "librispeech-lexicon.txt"


def reader_of(plan: Plan, side: int) -> int:
    """Return the number of a reader, one for each side of each call."""
    return 2 * int(plan.name.rpartition("-")[2]) + side


def split_of(plan: Plan) -> str:
    """Return the split, such as `dev-clean-2`."""
    return plan.name.rpartition("-")[0]


def write_conversation(tree: Path, conversation: Conversation) -> None:
    """Write the turns of both sides, a reader and a chapter each."""
    plan = conversation.plan
    chapter = 100_000 + int(plan.name.rpartition("-")[2])
    for side in (0, 1):
        reader = reader_of(plan, side)
        folder = tree / f"LibriSpeech/{split_of(plan)}/{reader}/{chapter}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for turn in conversation.turns:
            if turn.side != side:
                continue
            name = f"{reader}-{chapter}-{len(lines):04d}"
            sound = conversation.samples[turn.start : turn.end, side]
            _write_flac(folder / f"{name}.flac", sound)
            lines.append(f"{name} {_words(turn.tokens)}\n")
        write_text(folder / f"{reader}-{chapter}.trans.txt", "".join(lines))


def speakers_table(plans: Iterable[Plan]) -> str:
    """Return SPEAKERS.TXT: readers with their sex and split."""
    rows = [";ID  |SEX| SUBSET           |MINUTES| NAME"]
    for plan in plans:
        for side, speaker in enumerate(plan.speakers):
            reader = reader_of(plan, side)
            fields = (f"{reader:<5}", speaker.gender, split_of(plan), "1.0", "eSpeak")
            rows.append(" | ".join(fields))
    return "\n".join(rows) + "\n"


def lexicon(dictionary: Iterable[str]) -> str:
    """Return lines of `WORD  PH ONE S` for lines of `word ph one s`."""
    entries = (line.upper().split(maxsplit=1) for line in dictionary)
    return "".join(f"{word}\t{phones}\n" for word, phones in entries)


def _words(tokens: Iterable[str]) -> str:
    # A reader breaks no word off; what was heard of one stands as a word.
    said = (as_said(token) for token in tokens if token not in NOISES)
    return " ".join(w.rstrip("-") if is_partial(w) else w for w in said).upper()


def _write_flac(path: Path, samples) -> None:
    hidden = path.with_name(f".{path.name}.part")
    wide = resample(torch.from_numpy(samples.copy()), SAMPLE_RATE, RATE)
    soundfile.write(hidden, wide.numpy(), RATE, format="FLAC", subtype="PCM_16")
    os.replace(hidden, path)
