"""`python -m recipes.switchboard --corpus LDC --out runs/swb --run hadpsgd`."""

import sys
from collections.abc import Sequence

from recipes.hybrid.pipeline import command
from recipes.hybrid.stages import STAGES

RECIPE = command.Recipe(
    name="switchboard",
    description="From a corpus of Switchboard's shape to a word error rate.",
    corpus="folder that holds LDC97S62 etc.",
    stages=STAGES,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; 0 when its stages finished."""
    return command.main(RECIPE, arguments)


if __name__ == "__main__":
    sys.exit(main())
