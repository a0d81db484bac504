"""`python -m recipes.kaldi --corpus data --out runs/kaldi`."""

import sys
from collections.abc import Sequence

from recipes.hybrid.pipeline import command
from recipes.hybrid.stages import KALDI_DATA

RECIPE = command.Recipe(
    name="kaldi",
    description="From Kaldi data directories to the word error rate of `test`.",
    corpus="folder with the data directories `train`, `test` and perhaps `dev`",
    stages=KALDI_DATA,
    # Kaldi's `extract-segments` clips an end that is up to half a second late.
    # `max_repeats` has no effect, but stands in the stamps of finished folders.
    settings=("scoring=plain", "prepare.max_repeats=0", "prepare.clip_s=0.5"),
    unread=("prepare.dev_utterances", "prepare.max_repeats", "prepare.extend_s"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; 0 when its stages finished."""
    return command.main(RECIPE, arguments)


if __name__ == "__main__":
    sys.exit(main())
