"""Command line: `python -m recipes.generated --out TREE --minutes 24`."""

import argparse
import os
import sys
from pathlib import Path

from recipes.generated.corpus import write_corpus


def main(arguments: list[str] | None = None) -> int:
    """Write a corpus; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.generated",
        description="Write a synthetic corpus in the shape of Switchboard and Hub5'00.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--minutes", type=float, default=24.0, help="training speech")
    parser.add_argument("--test-minutes", type=float, default=5.0, help="test speech")
    parser.add_argument("--seed", type=int, default=1, help="draws everything")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    try:
        write_corpus(
            given.out,
            minutes=given.minutes,
            test_minutes=given.test_minutes,
            seed=given.seed,
            processes=given.processes,
        )
    except (ValueError, FileExistsError, RuntimeError) as error:
        print(f"recipes.generated: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("recipes.generated: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
