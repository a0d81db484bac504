"""`python -m recipes.librispeech.download --out data`: fetch parts of LibriSpeech.

By torchaudio's own downloader, from the addresses and with the checksums that it knows.
The least that is of use are 6.3 GB of training speech and two test sets of 0.3 GB.
"""

import argparse
import sys
from pathlib import Path

from torchaudio.datasets import LIBRISPEECH

PARTS = ("train-clean-100", "dev-clean", "test-clean")
UTTERANCES = {
    **{"train-clean-100": 28_539, "train-clean-360": 104_014},
    **{"train-other-500": 148_688, "dev-clean": 2703, "dev-other": 2864},
    **{"test-clean": 2620, "test-other": 2939},
}


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is not there; 0 when all is there, 1 with a message if it is not."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.librispeech.download",
        description="Fetch parts of LibriSpeech by torchaudio.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=UTTERANCES,
        default=PARTS,
        help="parts to fetch (%(default)s)",
    )
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts:
        try:
            found = LIBRISPEECH(given.out, part, download=True)
        except (OSError, RuntimeError, ValueError) as error:
            print(f"error: {part} could not be fetched: {error}", file=sys.stderr)
            return 1
        folder = given.out / "LibriSpeech" / part
        if len(found) != UTTERANCES[part]:  # torchaudio takes a folder for all of it
            print(
                f"error: {folder}: expected {UTTERANCES[part]} utterances, found "
                f"{len(found)}, as where unpacking was interrupted; delete the folder "
                "and run this again",
                file=sys.stderr,
            )
            return 1
        print(f"{part}: {len(found)} utterances in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
