"""The guide says what the functions say, and its program runs."""

import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks import topologies as guide
from benchmarks.timing import Spread
from lightning_adpsgd.topology.named import TOPOLOGIES

TEXT = (Path(__file__).parents[2] / "docs" / "how-to-choose-a-topology.md").read_text()


@pytest.mark.parametrize("sizes", [guide.SIZES, guide.ODD_SIZES])
def test_the_tables_of_the_guide_are_those_of_the_functions(
    sizes: tuple[int, ...],
) -> None:
    for table in guide.arithmetic_tables(sizes):
        assert table in TEXT


@pytest.mark.parametrize("title", guide.MEASURED)
def test_the_guide_has_a_measurement_of_every_topology(title: str) -> None:
    for sizes in (guide.SIZES, guide.ODD_SIZES):
        header = f"| {title} | " + " | ".join(f"S = {size}" for size in sizes)
        rows = TEXT.split(header)[1].split("\n\n")[0]
        for name in TOPOLOGIES:
            number = r"\| (\d\.\d\d ± \d\.\d\d|none) "
            assert re.search(rf"\| `{name}` {number}", rows), name


def test_the_program_of_the_guide_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(program, {})


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_measured_distance_of_a_ring_is_the_closed_form(size: int) -> None:
    """Noise of unit variance is shrunk by each eigenvalue in each later round."""
    eigenvalues = torch.linalg.eigvalsh(TOPOLOGIES["ring"].matrix(size))[:-1] ** 2
    expected = math.sqrt(float((eigenvalues / (1 - eigenvalues)).sum()) / size)
    measured = guide.synchronous_distance("ring", size, seed=0)
    assert measured == pytest.approx(expected, rel=0.1)


def test_the_measured_distance_of_the_hypercube_is_the_closed_form() -> None:
    """After k = 1, 2, ... rounds a step's noise is the mean of 2^k learners'."""
    expected = math.sqrt(sum(2.0**-k - 1 / 16 for k in range(1, 5)))
    measured = guide.synchronous_distance("hypercube", 16, seed=0)
    assert measured == pytest.approx(expected, rel=0.1)


def test_the_measured_distance_of_two_asynchronous_learners_is_bounded() -> None:
    """A step adds one to the squared difference D; half of the steps then end it.

    So D is 1/2 at least, and 1 if asking were drawn anew each time; that the ends take
    turns makes it less. A quarter of it is the squared distance to the mean.
    """
    squares = [guide.asynchronous_distance("complete", 2, s) ** 2 for s in range(100)]
    assert 0.95 / 8 < sum(squares) / len(squares) < 1 / 4


def test_pairs_send_one_model_and_a_ring_two() -> None:
    for size in (4, 8, 64):
        for name in ("random_pairs", "alternating_pairs", "hypercube"):
            assert guide.sent_asynchronously(name, size) == 1
            assert guide.sent_synchronously(name, size) == 1
        assert guide.sent_asynchronously("ring", size) == 2
        assert guide.sent_synchronously("ring", size) == 2


def test_the_rows_of_a_topology_are_entered_in_their_places() -> None:
    mark = "| `exponential` | "
    without = "\n".join(line for line in TEXT.split("\n") if not line.startswith(mark))
    by_size = {str(s): Spread(1.0, 0.9, 1.1) for s in guide.SIZES + guide.ODD_SIZES}
    found = {title: {"exponential": by_size} for title in guide.MEASURED}
    text = guide.add_rows("exponential", found, without)
    for sizes in (guide.SIZES, guide.ODD_SIZES):
        assert all(table in text for table in guide.arithmetic_tables(sizes))
    assert text.count(f"{mark}1.00 ± 0.10 ") == 2 * len(guide.MEASURED)
    assert len(text.split("\n")) == len(TEXT.split("\n"))
