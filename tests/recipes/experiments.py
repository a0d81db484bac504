"""Experiments that tests make by hand: finished stages, frames, a lexicon of digits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.language.lexicon import SPECIAL_WORDS, Lexicon
from recipes.hybrid.pipeline.crew import Crew
from recipes.hybrid.pipeline.settings import Settings
from tests.asr import digits
from tests.helpers import forked


def run_stage(
    stage: Callable[[Settings, Path], None], settings: Settings, name: str
) -> Path:
    """Run a stage alone; the folder of what it leaves."""
    output = settings.directory(name)
    output.mkdir(parents=True)
    stage(settings, output)
    return output


def by_two_machines(
    stage: Callable[[Settings, Path], None], settings: Settings, output: Path
) -> None:
    """Run a stage in two processes, as two machines do that share a folder.

    Not in two threads: ``ast.literal_eval``, by which NumPy reads the header of an
    array, fails in Python 3.11 now and then while another thread runs it.
    """
    crews = [Crew(rank, 2, patience_s=60) for rank in range(2)]
    pair = [replace(settings, cores=1, crew=crew) for crew in crews]
    outcomes = forked(2, lambda rank: stage(pair[rank], output))
    assert [outcome.error for outcome in outcomes] == ["", ""]


def write_frames(folder: Path, frames: Mapping[str, np.ndarray]) -> None:
    """A store of frames [time, mel], by the names of utterances."""
    lengths = [len(own) for own in frames.values()]
    writer = FrameWriter(folder, list(frames), lengths, 40)
    writer.create()
    for position, own in enumerate(frames.values()):
        writer.put(position, own)
    writer.finish()


def digits_and_noises() -> Lexicon:
    """The lexicon of digits with the words that every recipe adds."""
    plain = digits.lexicon()
    special = {word: ((phone,),) for word, phone in SPECIAL_WORDS.items()}
    return Lexicon(
        {**special, **plain.pronunciations},
        ("sil", "spn", "nsn", "lau"),
        plain.nonsilence_phones,
    )
