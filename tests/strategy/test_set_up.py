"""What the set-up of a job tells about the module's weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from typing_extensions import override

from lightning_adpsgd.strategy import set_up
from tests.learners import Linear, gossip, learners, loader, trainer_of, values


class Queues(Linear):
    """Batch-norm, a pruned layer, a mask without a mean, and buffers of its own."""

    def __init__(self, names: list[str], is_kept: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.pruned = nn.Linear(2, 2)
        prune.l1_unstructured(self.pruned, "weight", 0.5)
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        for name in names:
            buffer = torch.ones(2, 3, dtype=torch.float64)
            self.register_buffer(name, buffer, persistent=is_kept)


class Ignores(Linear):
    """Names a buffer that DDP is to ignore, and sets it in each learner."""

    mine: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mine", torch.zeros(1))
        self._ddp_params_and_buffers_to_ignore = ["mine"]

    @override
    def on_train_start(self) -> None:
        self.mine.fill_(10.0 * self.global_rank)


def test_what_ddp_is_to_ignore_is_not_averaged() -> None:
    def program(rank: int) -> float:
        module = Ignores()
        trainer_of(gossip(), 2).fit(module, loader(4, rank, 2), loader(2))
        return module.mine.item()

    assert values(learners(2, program)) == [0.0, 10.0]


def said_of_buffers(module: Linear) -> list[str]:
    def program(rank: int) -> list[str]:
        said: list[str] = []
        set_up.rank_zero_info = said.append  # pyright: ignore
        trainer_of(gossip(), 2).fit(module, loader(4, rank, 2))
        return [words for words in said if "buffers that are averaged" in words]

    return values(learners(2, program))[0]


def test_buffers_of_no_batch_norm_that_are_averaged_are_named() -> None:
    (said,) = said_of_buffers(Queues(["queue", "keys", "bank", "table", "rest"]))
    assert said.startswith("`queue`, `keys`, `bank` and 2 more: ")
    assert "register it with `persistent=False`" in said


@pytest.mark.parametrize("module", [Queues([]), Queues(["queue"], is_kept=False)])
def test_buffers_that_are_not_averaged_are_not_named(module: Linear) -> None:
    assert said_of_buffers(module) == []
