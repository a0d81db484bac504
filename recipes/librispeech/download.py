"""`python -m recipes.librispeech.download --out data`: fetch parts of LibriSpeech.

By torchaudio's own downloader, from the addresses and with the checksums that it knows.
The least that is of use are 6.3 GB of training speech and two test sets of 0.3 GB.
"""

import argparse
import sys
from pathlib import Path

from torchaudio.datasets import LIBRISPEECH

PARTS = ("train-clean-100", "dev-clean", "test-clean")


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is not there; 0 when it is there, 1 with a message if it cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.librispeech.download",
        description="Fetch parts of LibriSpeech by torchaudio.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--parts", nargs="+", default=PARTS, help="default %(default)s")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts:
        try:
            found = LIBRISPEECH(given.out, part, download=True)
        except (OSError, RuntimeError, ValueError) as error:
            print(f"error: {part} could not be fetched: {error}", file=sys.stderr)
            return 1
        print(f"{part}: {len(found)} utterances in {given.out / 'LibriSpeech' / part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
