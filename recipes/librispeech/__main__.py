"""`python -m recipes.librispeech --corpus data --out runs/librispeech`."""

import sys
from collections.abc import Sequence

from recipes.hybrid.pipeline import command
from recipes.hybrid.stages import LIBRISPEECH

RECIPE = command.Recipe(
    name="librispeech",
    description="From LibriSpeech, at 8 kHz, to the word error rates of its test "
    "splits.",
    corpus="folder of LibriSpeech",
    stages=LIBRISPEECH,
    # `max_repeats` has no effect, but stands in the stamps of finished folders.
    settings=(
        "scoring=plain",
        "prepare.max_repeats=0",
        "lexicon.synthesise=true",
        "lexicon.min_count=1",
    ),
    unread=(
        "prepare.dev_utterances",
        "prepare.max_repeats",
        "prepare.extend_s",
        "prepare.clip_s",
        "prepare.min_utterance_s",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; 0 when its stages finished."""
    return command.main(RECIPE, arguments)


if __name__ == "__main__":
    sys.exit(main())
