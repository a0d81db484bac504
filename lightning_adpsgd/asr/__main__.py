"""The command line: `python -m lightning_adpsgd.asr transcribe call.wav`."""

import argparse
import sys
from pathlib import Path

DEFAULT = Path("runs/demo/exp/export/hadpsgd")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(prog="python -m lightning_adpsgd.asr")
    commands = arguments.add_subparsers(dest="command", required=True)
    transcribe = commands.add_parser(
        "transcribe",
        help="print the words of sound files with their times",
        description="A line for each word: file, channel, start and duration in "
        "seconds, word; as in NIST's CTM. Every channel is a speaker.",
    )
    transcribe.add_argument("sounds", type=Path, nargs="+", metavar="call.wav")
    transcribe.add_argument(
        "--model", type=Path, default=DEFAULT, help="exported folder (%(default)s)"
    )
    return arguments


def main(arguments: list[str] | None = None) -> int:
    """0 when every file was transcribed; 1, with a message for each that was not."""
    options = parser().parse_args(arguments)
    # Here, so that the help needs no torch.
    from lightning_adpsgd.asr.recogniser import Recogniser, RecogniserError
    from lightning_adpsgd.asr.sound.audio import AudioError

    try:
        recogniser = Recogniser(options.model)
    except RecogniserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = 0
    for path in options.sounds:
        try:
            for said in recogniser.transcribe(path):
                name, times = channel_name(said.channel), said[2:]
                start, duration = (f"{seconds:.2f}" for seconds in times)
                print(path.stem, name, start, duration, said.word, flush=True)
        except AudioError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = 1
    return failed


def channel_name(channel: int) -> str:
    """A, B and so on; numbers from 27 on."""
    return chr(ord("A") + channel) if channel < 26 else str(channel + 1)


if __name__ == "__main__":
    sys.exit(main())
