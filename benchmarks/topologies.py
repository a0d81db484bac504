"""How topologies mix: gaps, traffic, peers, and measured consensus distances.

In each step of a learner, unit noise is added to every coordinate of its weights. It
stands for lr times the noise of a gradient; there is no other gradient. Rounds follow
the engine: ``W <- T^T (W + noise)`` in the synchronous mode. In the asynchronous one,
one random learner at a time steps, asks the peers of `Topology.asks`, and takes the
mean with each at once. The consensus distance per coordinate, once it has settled, is
in units of one step's noise.

    python -m benchmarks.topologies           measures, prints the tables as Markdown
    python -m benchmarks.topologies --draw    also draws docs/images/topologies.svg
    python -m benchmarks.topologies --add NAME    measures one, and enters its rows into
                                                  docs/how-to-choose-a-topology.md
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Spread, spread
from lightning_adpsgd.topology.matrices import contraction
from lightning_adpsgd.topology.named import TOPOLOGIES, Topology

SIZES = (4, 8, 16, 64, 128)
ODD_SIZES = (3, 7, 17, 67)
SEEDS = range(5)
COORDINATES = 64
DOCS = Path(__file__).parents[1] / "docs"
IMAGE = DOCS / "images" / "topologies.svg"
GUIDE = DOCS / "how-to-choose-a-topology.md"


# --- by arithmetic


def gap(name: str, size: int) -> float:
    """The factor by which a round shrinks the slowest disagreement, over a period.

    For a random topology, it is the root of the mean factor of the squared distance.
    """
    topology = TOPOLOGIES[name]
    if name == "random_ring":
        return 1 - math.sqrt((size - 3) / (3 * (size - 1)))
    if name == "random_pairs":
        odd = size % 2
        return 1 - math.sqrt(1 / 2 if odd else (size - 2) / (2 * (size - 1)))
    rounds = range(topology.period(size))
    return 1 - contraction([topology.matrix(size, r) for r in rounds])


def peers(name: str, size: int) -> int:
    """Connections of the busiest super-learner, each with two threads in "async"."""
    topology = TOPOLOGIES[name]
    if topology.period(size) == 0:
        return size - 1
    return max(len(topology.peers(i, size)) for i in range(size))


def sent_synchronously(name: str, size: int) -> float:
    """The models that a super-learner sends in a round, on average."""
    if name == "complete":
        return 2 * (size - 1) / size  # a ring all-reduce
    parts = (TOPOLOGIES[name].part(i, size, 0) for i in range(size))
    return sum(len(part.gives) - 1 for part in parts) / size


def sent_asynchronously(name: str, size: int) -> float:
    """Models that a super-learner sends in a round, asked and asking, on average."""
    topology, rounds = (
        TOPOLOGIES[name],
        range(4 * max(1, TOPOLOGIES[name].period(size))),
    )
    asked = sum(len(topology.asks(i, size, r)) for r in rounds for i in range(size))
    return 2 * asked / (size * len(rounds))


# --- by measurement


def settling_rounds(name: str, size: int) -> int:
    """The rounds that shrink an initial disagreement to a twentieth or less."""
    left = max(1 - gap(name, size), 0.1)
    return 20 + math.ceil(-3 / math.log(left))


def distance(weights: Any) -> float:
    """Consensus distance per coordinate, squared."""
    return float(((weights - weights.mean(0)) ** 2).mean())


def synchronous_distance(name: str, size: int, seed: int) -> float:
    """The settled consensus distance if all learners wait for one another."""
    generator = torch.Generator().manual_seed(seed)
    rounds_of = _remembered(TOPOLOGIES[name], size, seed)
    settling = settling_rounds(name, size)
    weights = torch.zeros(size, COORDINATES, dtype=torch.float64)
    found = []
    for r in range(2 * settling):
        noise = torch.randn(weights.shape, dtype=torch.float64, generator=generator)
        weights = rounds_of(r).T @ weights.add_(noise)
        if r >= settling:
            found.append(distance(weights))
    return math.sqrt(sum(found) / len(found))


def asynchronous_distance(name: str, size: int, seed: int) -> float:
    """The settled consensus distance if no learner waits, at equal mean speeds."""
    random, topology = np.random.default_rng(seed), TOPOLOGIES[name]
    settling = settling_rounds(name, size)
    weights = np.zeros((size, COORDINATES))
    steps, found = [0] * size, []
    for time in range(2 * settling):
        for i in random.integers(size, size=size).tolist():
            steps[i] += 1
            weights[i] += random.standard_normal(COORDINATES)
            for j in topology.asks(i, size, steps[i], seed):
                change = (weights[j] - weights[i]) / 2
                weights[i] += change
                weights[j] -= change
        if time >= settling:
            found.append(distance(weights))
    return math.sqrt(sum(found) / len(found))


def _remembered(
    topology: Topology, size: int, seed: int
) -> Callable[[int], torch.Tensor]:
    """The matrices of the rounds; those of a period are made once."""
    period = topology.period(size)
    if period == 0:
        return lambda round: topology.matrix(size, round, seed)
    rounds = [topology.matrix(size, r, seed) for r in range(period)]
    return lambda round: rounds[round % period]


# --- tables and figures


def sizes_of(name: str, sizes: Sequence[int]) -> list[int]:
    """The numbers of super-learners for which a topology exists."""
    return [size for size in sizes if _exists(name, size)]


def _exists(name: str, size: int) -> bool:
    try:
        TOPOLOGIES[name].check_size(size)
    except ValueError:
        return False
    return True


ARITHMETIC = {
    "Spectral gap per round": (gap, ".4f"),
    "Peers": (peers, "d"),
    "Models sent per round, synchronous": (sent_synchronously, ".2f"),
    "Models sent per round, asynchronous": (sent_asynchronously, ".2f"),
}
MEASURED = {
    "Consensus distance, synchronous": synchronous_distance,
    "Consensus distance, asynchronous": asynchronous_distance,
}


def table(
    title: str,
    sizes: Sequence[int],
    cell: Callable[[str, int], str],
    names: Sequence[str],
) -> str:
    """Markdown: a row for each topology, a column for each number of super-learners."""
    lines = [f"| {title} | " + " | ".join(f"S = {size}" for size in sizes) + " |"]
    lines.append("|---" * (1 + len(sizes)) + "|")
    for name in names:
        cells = (cell(name, s) if _exists(name, s) else "none" for s in sizes)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def arithmetic_tables(
    sizes: Sequence[int], names: Sequence[str] = tuple(TOPOLOGIES)
) -> list[str]:
    """The tables that need no measurement, as Markdown."""

    def cell(title: str, name: str, size: int) -> str:
        function, spec = ARITHMETIC[title]
        return format(function(name, size), spec)

    return [table(title, sizes, partial(cell, title), names) for title in ARITHMETIC]


def measure(
    quick: bool = False, names: Sequence[str] = tuple(TOPOLOGIES)
) -> dict[str, Any]:
    """Measures figures by title, topology and number of super-learners."""
    seeds = SEEDS[:2] if quick else SEEDS
    sizes = SIZES[:3] if quick else SIZES + ODD_SIZES
    return {
        title: {
            name: {
                str(size): spread(function(name, size, seed) for seed in seeds)
                for size in sizes_of(name, sizes)
            }
            for name in names
        }
        for title, function in MEASURED.items()
    }


def measured_tables(found: dict[str, Any], sizes: Sequence[int]) -> list[str]:
    """The tables of `measure`, as Markdown: median and half the interquartile range."""

    def cell(title: str, name: str, size: int) -> str:
        value: Spread = found[title][name][str(size)]
        return f"{value.median:.2f} ± {(value.high - value.low) / 2:.2f}"

    return [
        table(title, sizes, partial(cell, title), list(by_name))
        for title, by_name in found.items()
    ]


def add_rows(name: str, found: dict[str, Any], guide: str) -> str:
    """The guide with new rows for one topology, which replace old ones."""
    for sizes in (SIZES, ODD_SIZES):
        for one in arithmetic_tables(sizes, [name]) + measured_tables(found, sizes):
            header, rule, row = one.splitlines()
            before, after = guide.split(f"{header}\n{rule}\n")
            rows, blank, rest = after.partition("\n\n")
            by_name = {line.split("`")[1]: line for line in rows.splitlines()}
            by_name[name] = row
            rows = "\n".join(by_name[n] for n in TOPOLOGIES if n in by_name)
            guide = f"{before}{header}\n{rule}\n{rows}{blank}{rest}"
    return guide


def draw(found: dict[str, Any]) -> None:
    """Draws the consensus distance against S, with a line for each topology."""
    import matplotlib as mpl  # only for the picture

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "topologies", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for ax, (title, by_name) in zip(axes, found.items(), strict=True):
        _draw_panel(ax, title, by_name)
    axes[0].set_ylabel("in units of one step's noise")
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(IMAGE, metadata={"Date": None})


# Okabe and Ito's colours, and a marker each, for readers who see fewer of them.
_STYLES = {
    "ring": ("#000000", "o-"),
    "random_ring": ("#E69F00", "s-"),
    "alternating_pairs": ("#0072B2", "^-"),
    "random_pairs": ("#009E73", "v-"),
    "exponential": ("#D55E00", "D-"),
    "hypercube": ("#56B4E9", "x--"),
    "complete": ("#CC79A7", "P-"),
    "grid": ("#7F7F7F", "*-"),
}


def _draw_panel(ax: Any, title: str, by_name: dict[str, dict[str, Spread]]) -> None:
    for name, by_size in by_name.items():
        sizes = [size for size in SIZES if str(size) in by_size]
        medians = [by_size[str(size)].median for size in sizes]
        if max(medians) > 1e-6:  # the synchronous mean of all leaves no distance
            colour, style = _STYLES.get(name, (None, "."))
            ax.plot(sizes, medians, style, color=colour, label=name, markersize=5)
    ax.set(title=title, xscale="log", yscale="log", xlabel="super-learners S")
    ax.set_xticks(SIZES, [str(size) for size in SIZES])
    ax.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    ax.minorticks_off()
    ax.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.topologies")
    parser.add_argument("--draw", action="store_true", help=f"also write {IMAGE.name}")
    parser.add_argument("--add", choices=TOPOLOGIES, help=f"enter into {GUIDE.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if name := arguments.add:
        text = add_rows(name, measure(names=[name]), GUIDE.read_text("utf-8"))
        GUIDE.write_text(text, "utf-8")
        return
    found = measure()
    for sizes in (SIZES, ODD_SIZES):
        print("\n".join(arithmetic_tables(sizes) + measured_tables(found, sizes)))
    if arguments.draw:
        draw(found)


if __name__ == "__main__":
    main()
