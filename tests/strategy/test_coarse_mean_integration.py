"""The mean of all, where exchanges travel in few bits: few bytes, and nearly exact."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.mixing import mean_of_all
from lightning_adpsgd.mixing.lattice_mean import lattice_means
from tests.learners import Linear, gossip, learners, loader, trainer_of, values

LENGTH = 70_000


class Wide(Linear):
    """Weights of which each step moves each by another amount, and a constant."""

    constants: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.wide = nn.Parameter(torch.randn(LENGTH, generator=draw))
        self.pull = torch.randn(LENGTH, generator=draw.manual_seed(1 + rank))
        self.register_buffer("constants", 1 / torch.arange(3.0, 9.0))

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.pull @ self.wide / 10


class Run(NamedTuple):
    """What a learner has come to, and the lengths of what went over a lattice."""

    wide: Tensor
    constants: Tensor
    on_lattice: list[int]


def fit(rank: int, wire_dtype: torch.dtype | None) -> Run:
    module, lengths = Wide(rank), list[int]()

    def counted(chunks: list[Tensor], *arguments: Any) -> Iterator[Tensor]:
        lengths.append(sum(map(len, chunks)))
        return lattice_means(chunks, *arguments)

    mean_of_all.lattice_means = counted
    # An exchange in each step, so that the last one's form is that of the mean.
    strategy = gossip("complete", wire_dtype=wire_dtype, max_staleness=1)
    trainer_of(strategy, 3).fit(module, loader(15, rank, 3))
    return Run(module.wide.detach(), module.constants, lengths)


def test_the_mean_travels_as_the_exchanges_do() -> None:
    def program(rank: int) -> tuple[Run, Run]:
        return fit(rank, None), fit(rank, torch.int8)

    found = values(learners(3, program))
    # Exchanges change no mean, so both have it.
    (exact, _), *_ = found
    for whole, coarse in found:
        assert (whole.on_lattice, coarse.on_lattice) == ([], [LENGTH])
        assert torch.equal(coarse.wide, found[0][1].wide)
        error = (coarse.wide - exact.wide).square().mean().sqrt()
        assert 1e-5 < error < 0.01
        torch.testing.assert_close(coarse.constants, 1 / torch.arange(3.0, 9.0))
