"""The mean on a lattice: exact sums of points, whatever the weights are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_adpsgd.mixing import lattice_mean
from lightning_adpsgd.mixing.lattice_mean import lattice_means
from tests.helpers import forked

NUM, CHUNK = 5000, 2048
BASE = torch.randn(NUM, generator=torch.Generator().manual_seed(0))


def mean_of_all(weights: Tensor, num: int, speaks: bool = True) -> Tensor:
    return torch.cat([*lattice_means(weights.split(CHUNK), num, speaks, None)])


def noise(rank: int) -> Tensor:
    return torch.randn(NUM, generator=torch.Generator().manual_seed(rank + 1))


def one_moved(rank: int) -> Tensor:
    row = BASE.clone()
    row[1500] += rank
    return row


WEIGHTS: dict[str, Callable[[int], Tensor]] = {
    "near": lambda rank: BASE + 0.01 * noise(rank),
    "heavy tails": lambda rank: BASE + 0.01 * noise(rank) ** 5,
    "one moved": one_moved,
    "equal": lambda rank: BASE,
    "within rounding": lambda rank: BASE * (1 + 1e-7 * noise(rank)),
    "far apart": lambda rank: 100 * noise(rank),
    "zeros": lambda rank: torch.zeros(NUM),
    "tiny": lambda rank: 1e-40 * noise(rank),
    "huge": lambda rank: 1e37 * noise(rank).clamp(-3, 3),
    "huge in one": lambda rank: torch.full((NUM,), 1e35 if rank else 0.0),
}
# Of the standard deviation over learners, root mean square; by the number of learners.
MOST_ERROR = {2: 0.1, 5: 0.16, 9: 0.002}


@pytest.mark.parametrize("num", MOST_ERROR)
def test_all_learners_have_nearly_the_mean_and_the_same(
    tmp_path: Path, num: int
) -> None:
    def program(rank: int) -> list[Tensor]:
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", store, world_size=num, rank=rank)
        return [mean_of_all(of(rank), num) for of in WEIGHTS.values()]

    outcomes = [one.value for one in forked(num, program)]
    for name, *means in zip(WEIGHTS, *outcomes, strict=True):
        rows = torch.stack([WEIGHTS[name](rank).double() for rank in range(num)])
        exact, deviation = rows.mean(0), (rows - rows.mean(0)).square().mean().sqrt()
        error = (means[0] - exact).square().mean().sqrt()
        rounding = 2e-7 * rows.abs().max() + 1e-30
        assert all(torch.equal(mean, means[0]) for mean in means), name
        # A block of which little differs has the error of the whole block.
        most = MOST_ERROR[num] * (4 if name in ("heavy tails", "one moved") else 1)
        assert error <= most * deviation + rounding, name


@pytest.mark.parametrize("headroom", [0.01, 0.3])
def test_blocks_whose_points_wrap_travel_whole(tmp_path: Path, headroom: float) -> None:
    def program(rank: int) -> Tensor:
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", store, world_size=3, rank=rank)
        lattice_mean._HEADROOM = headroom
        return mean_of_all(WEIGHTS["near"](rank), 3)

    exact = torch.stack([WEIGHTS["near"](rank) for rank in range(3)]).mean(0)
    for one in forked(3, program):
        torch.testing.assert_close(one.value, exact, rtol=1e-5, atol=1e-6)


def test_a_learner_that_does_not_speak_has_the_mean_of_the_others(
    tmp_path: Path,
) -> None:
    def program(rank: int) -> Tensor:
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", store, world_size=3, rank=rank)
        return mean_of_all(WEIGHTS["near"](rank // 2), 2, rank != 1)

    first, *others = [one.value for one in forked(3, program)]
    assert all(torch.equal(first, other) for other in others)
    exact = (WEIGHTS["near"](0) + WEIGHTS["near"](1)) / 2
    assert (first - exact).abs().max() < 0.003


@pytest.mark.parametrize("number", [3, 9])
def test_a_learner_adds_what_it_lacks_to_its_own_points(number: int) -> None:
    draw = torch.Generator().manual_seed(0)
    everyones = torch.randint(-(2**23), 2**23, (2048,), generator=draw)
    near = torch.randint(-3, 4, (number, 2048), generator=draw)
    rows = (everyones + near).float()
    bits = 8 if number == 3 else 16
    ones = torch.ones(2, 1, dtype=torch.int32)
    lattice = lattice_mean._Lattice(number, bits, 0 * ones, ones.bool())
    words = torch.stack([lattice.words(row) for row in rows])
    assert words.shape == (number, 2, 32 * bits)
    total = words.sum(0, dtype=torch.int32)
    for row, word in zip(rows, words, strict=True):
        sums = lattice.sums(row, total - number * word)
        assert torch.equal(sums.flatten(), rows.double().sum(0).int())
