"""How large a search graph will be, before it is composed, and whether it fits.

    arcs    = 25 * n-grams of two words or more + 45 * words
    bytes   = 330 * arcs
    seconds = arcs / 106,000 * (arcs / 6.8 million) ** 0.2

and half as many arcs for phones without context. Fitted to graphs of 100,000, 200,000
and 863,000 n-grams over 30,000 words with 9,000 and 32,000 leaves
(`python -m benchmarks tree`). These have 4.2, 6.8 and 22.3 million arcs, and take 34,
64 and 262 s, and 1.3, 2.5 and 6.8 GB. The formulas are within 12 % of these arcs and
seconds, and 25 % of the bytes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ARCS_PER_NGRAM, ARCS_PER_WORD = 25, 45
BYTES_PER_ARC = 330
_ARCS_PER_SECOND, _MEASURED_ARCS, _GROWTH = 106_000, 6.8e6, 0.2
_SPARE = 0.8  # share of the memory that a graph may take, because bytes are uncertain
_GIGA = 1e9


class GraphSize(NamedTuple):
    """What composing a graph will take.

    Attributes:
        arcs: number of arcs.
        seconds: seconds of one core.
        bytes: largest memory meanwhile.
    """

    arcs: float
    seconds: float
    bytes: float

    def __str__(self) -> str:
        return (
            f"{self.arcs / 1e6:.2g} million arcs, {self.seconds / 60:.2g} minutes, "
            f"{self.bytes / _GIGA:.2g} GB"
        )


def projected(counts: Mapping[int, int], in_context: bool) -> GraphSize:
    """The size of a graph.

    Args:
        counts: number of n-grams by their length, as `check_arpa` gives them.
        in_context: whether states are those of phones in context.
    """
    ngrams = sum(count for length, count in counts.items() if length > 1)
    both = ARCS_PER_NGRAM * ngrams + ARCS_PER_WORD * counts.get(1, 0)
    arcs = both if in_context else both / 2
    slower = max(1.0, arcs / _MEASURED_ARCS) ** _GROWTH
    seconds = arcs / _ARCS_PER_SECOND * slower
    return GraphSize(arcs, seconds, BYTES_PER_ARC * arcs)


def ngrams_that_fit(memory: float, words: int, in_context: bool) -> int:
    """How many n-grams, words among them, a graph may have in a memory of bytes."""
    arcs = _SPARE * memory / BYTES_PER_ARC * (1 if in_context else 2)
    return words + max(0, int((arcs - ARCS_PER_WORD * words) / ARCS_PER_NGRAM))


def problem(
    counts: Mapping[int, int], in_context: bool, memory: float | None
) -> str | None:
    """Why a graph does not fit, with the setting that does; None if it does.

    Args:
        counts: number of n-grams by their length.
        in_context: whether states are those of phones in context.
        memory: bytes that are free; None if the system does not say.
    """
    size = projected(counts, in_context)
    if memory is None or size.bytes <= _SPARE * memory:
        return None
    fits = ngrams_that_fit(memory, counts.get(1, 0), in_context)
    return (
        f"a graph of {sum(counts.values())} n-grams would take {size}, and "
        f"{memory / _GIGA:.2g} GB are free; set lm.max_ngrams={fits} and run from `lm`"
    )


def free_memory(root: Path = Path("/")) -> float | None:
    """Bytes that this process may still take: of the machine, and of its cgroups.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    found = [_of_machine(root / "proc/meminfo"), *map(_of_group, _groups(root))]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and of those that hold it.

    A container sees its own as the root; a job of SLURM is in one further below.
    """
    top = root / "sys/fs/cgroup"
    yield top
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::/"):  # of version 2
            folder = top / line.removeprefix("0::/")
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent


def _of_machine(path: Path) -> float | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return float(kilobytes[0]) * 1024 if kilobytes else None


def _of_group(folder: Path) -> float | None:
    try:
        limit, used = ((folder / f"memory.{n}").read_text() for n in ("max", "stat"))
        # Not `memory.current`, in which files count that the system can drop.
        anonymous = dict(line.split() for line in used.splitlines())["anon"]
        return float(limit) - float(anonymous)
    except (OSError, ValueError, KeyError):  # none, or "max"
        return None
