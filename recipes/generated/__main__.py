"""Command line: `python -m recipes.generated --out TREE --minutes 24`."""

import argparse
import os
import sys
from pathlib import Path

from recipes.generated.corpus import write_corpus, write_librispeech


def main(arguments: list[str] | None = None) -> int:
    """Write a corpus; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.generated",
        description="Write a synthetic corpus in the shape of Switchboard and Hub5'00.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the corpus")
    speech = {
        "": (24.0, "of training speech"),
        "test-": (5.0, "of test speech"),
        "fisher-": (0.0, "in Fisher's layout"),
        "callhome-": (0.0, "in CallHome's layout"),
    }
    for part, (minutes, kind) in speech.items():
        told = f"minutes {kind} (%(default)s)"
        add(f"--{part}minutes", type=float, default=minutes, help=told)
    add("--librispeech", action="store_true", help="write LibriSpeech's layout instead")
    add("--seed", type=int, default=1, help="draws everything (%(default)s)")
    cores = os.cpu_count() or 1
    add("--processes", type=int, default=cores, help="default: a process per core")
    given = parser.parse_args(arguments)
    try:
        _write(given)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"recipes.generated: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("recipes.generated: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _write(given: argparse.Namespace) -> None:
    speech = {
        "minutes": given.minutes,
        "test_minutes": given.test_minutes,
        "seed": given.seed,
        "processes": given.processes,
    }
    if given.librispeech:
        write_librispeech(given.out, **speech)
    else:
        write_corpus(
            given.out,
            **speech,
            fisher_minutes=given.fisher_minutes,
            callhome_minutes=given.callhome_minutes,
        )


if __name__ == "__main__":
    sys.exit(main())
