"""`python -m recipes.swb300 --corpus DISCS --out runs/swb300 --run hadpsgd`."""

import sys
from collections.abc import Sequence

from recipes.switchboard import command

RECIPE = command.Recipe(
    name="swb300",
    description="From LDC97S62 and Hub5-2000 to the word error rates of SWB and CH.",
    sources=("switchboard",),
    folders={"hub5": "folders of LDC2002S09 and LDC2002T43, if not in --corpus"},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; 0 when its stages finished."""
    return command.main(RECIPE, arguments)


if __name__ == "__main__":
    sys.exit(main())
