"""The command line: `python -m lightning_adpsgd.asr transcribe call.wav`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loads torch
    from lightning_adpsgd.asr.recogniser import Recogniser
    from lightning_adpsgd.asr.search.words import TimedWord

DEFAULT = Path("runs/demo/exp/export/hadpsgd")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(prog="python -m lightning_adpsgd.asr")
    commands = arguments.add_subparsers(dest="command", required=True)
    transcribe = commands.add_parser(
        "transcribe",
        help="print the words of sound files with their times",
        description="By default a line for each word: file, channel, start and "
        "duration in seconds, word, confidence; as in NIST's CTM. Every channel is a "
        "speaker.",
    )
    transcribe.add_argument(
        "sounds", type=Path, nargs="+", metavar="call.wav", help="sound file"
    )
    transcribe.add_argument(
        "--model",
        type=Path,
        default=DEFAULT,
        help="folder of an exported recogniser (%(default)s)",
    )
    transcribe.add_argument(
        "--least-fit",
        type=float,
        help="fit, a log-likelihood per frame of at most 0, below which a stretch has "
        "no words (default: the model's); -1000 keeps the words of noise as well",
    )
    transcribe.add_argument(
        "--format",
        choices=("ctm", "json", "textgrid"),
        default="ctm",
        help="ctm: a line for each word; json: a line for each file and channel; "
        "textgrid: call.TextGrid beside each file (%(default)s)",
    )
    transcribe.add_argument(
        "--overwrite",
        action="store_true",
        help="textgrid: replace files that are there (default: they are refused before "
        "anything is transcribed)",
    )
    return arguments


def main(arguments: list[str] | None = None) -> int:
    """Transcribes files; returns 0, or 1 after a message for each file that failed."""
    options = parser().parse_args(arguments)
    if options.format == "textgrid" and (
        refusal := refused_grids(options.sounds, options.overwrite)
    ):
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    try:  # here, so that the help needs no torch
        from lightning_adpsgd.asr.recogniser import Recogniser, RecogniserError
        from lightning_adpsgd.asr.sound.audio import AudioError
    except ModuleNotFoundError as error:
        remedy = "pip install 'lightning-adpsgd[asr]'"
        print(f"error: the package {error.name} is missing: {remedy}", file=sys.stderr)
        return 1

    try:
        recogniser = Recogniser(options.model, least_fit=options.least_fit)
    except RecogniserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.format != "textgrid" and (told := alike(options.sounds)):
        print(f"WARNING: {told}", file=sys.stderr)
    failed = 0
    for path in options.sounds:
        try:
            _transcribe(recogniser, path, options.format)
        except BrokenPipeError:  # nobody reads on
            raise
        except (AudioError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            failed = 1
    return failed


def _transcribe(recogniser: "Recogniser", path: Path, style: str) -> None:
    from lightning_adpsgd.asr.search.output import ctm_line, json_line, text_grid
    from lightning_adpsgd.asr.sound.audio import SoundFile
    from lightning_adpsgd.files import printable, written_whole

    sound, name_of_file = SoundFile(path), printable(path.stem)
    sides: dict[str, list[TimedWord]] = {
        channel_name(number): [] for number in range(sound.num_channels)
    }
    before = recogniser.num_poor
    for said in recogniser.transcribe(path):
        name = channel_name(said.channel)
        sides[name].append(said.timed)
        if style == "ctm":
            print(ctm_line(name_of_file, name, said.timed), flush=True)
    if poor := recogniser.num_poor - before:
        print(
            f"{path}: {poor} stretches of sound have no words, because they fit the "
            f"model worse than {recogniser.least_fit:.2f}: noise, or speech unlike "
            "that of the training; `--least-fit -1000` keeps their words",
            file=sys.stderr,
        )
    if style == "json":
        for name, words in sides.items():
            print(json_line(f"{name_of_file} {name}", words), flush=True)
    if style == "textgrid":
        with written_whole(grid_of(path)) as file:
            file.write(text_grid(sides, sound.duration_s))
        print(printable(str(grid_of(path))), flush=True)


def alike(sounds: Sequence[Path]) -> str:
    """Which two files have one name in the output; empty if none have."""
    from lightning_adpsgd.asr.search.output import ctm_name

    names: dict[str, Path] = {}
    for sound in sounds:
        name = ctm_name(sound.stem)
        if other := names.get(name):
            return (
                f"{other} and {sound} are both `{name}` in the output, which has names "
                "without folders, endings and blanks: transcribe each by a command of "
                "its own, or rename one"
            )
        names[name] = sound
    return ""


def refused_grids(sounds: Sequence[Path], overwrite: bool) -> str:
    """Why the TextGrids of these files must not be written; empty if they may.

    In Praat's convention the file beside a recording is an annotator's own work.
    """
    sources: dict[Path, Path] = {}
    for sound in sounds:
        grid = grid_of(sound)
        if other := sources.get(grid.resolve()):
            return (
                f"{other} and {sound} would both be written to {grid}: transcribe one "
                "of them, or move it into another folder"
            )
        sources[grid.resolve()] = sound
        if sound.parent.is_dir() and not os.access(sound.parent, os.W_OK):
            return (
                f"{grid} cannot be written, because its folder is read-only: copy "
                f"{sound} elsewhere, or choose `--format json`"
            )
    there = [str(grid_of(sound)) for sound in sounds if grid_of(sound).exists()]
    if there and not overwrite:
        return (
            f"{', '.join(there)} {'exist' if there[1:] else 'exists'}, perhaps with "
            "annotations: move the file away, or replace it with `--overwrite`"
        )
    return ""


def grid_of(sound: Path) -> Path:
    """The TextGrid of a sound file, beside it."""
    return sound.parent / f"{sound.stem}.TextGrid"


def channel_name(channel: int) -> str:
    """The letter of a channel, A, B and so on; its number from 27 on."""
    return chr(ord("A") + channel) if channel < 26 else str(channel + 1)


if __name__ == "__main__":
    sys.exit(main())
