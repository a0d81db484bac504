"""`python -m recipes.swb2000 --corpus DISCS --out runs/swb2000 --run hadpsgd`."""

import sys
from collections.abc import Sequence

from recipes.switchboard import command

RECIPE = command.Recipe(
    name="swb2000",
    description="From Switchboard-1, Fisher and CallHome to the word error rates of "
    "SWB and CH.",
    sources=("switchboard", "fisher", "callhome"),
    folders={
        "fisher": "folders of LDC2004S13, LDC2004T19, LDC2005S13, LDC2005T19",
        "callhome": "folders of LDC97S42 and LDC97T14",
        "hub5": "folders of LDC2002S09 and LDC2002T43",
    },
    settings=("lexicon.synthesise=true",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; 0 when its stages finished."""
    return command.main(RECIPE, arguments)


if __name__ == "__main__":
    sys.exit(main())
