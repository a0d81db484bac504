"""After training, a part of a model is no larger in a file than its own weights."""

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.learners import LR, Linear, gossip, learners, loader, trainer_of, values
from tests.strategy import fabric_learners
from tests.strategy.fabric_learners import Slope, launched, sgd, strategy_of, train

NUM_BODY = 10_000


class WithBody(Linear):
    """A large part beside the three weights that learn; keeps its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.zeros(NUM_BODY, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.norm(self.weight.expand(2, 3)).sum() * 0

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.parameters(), LR)
        return self.optimizer


def size_of(part: Any) -> int:
    return len(pickle.dumps(part))


def test_a_part_is_small_after_fit_and_a_second_fit_goes_on() -> None:
    def program(rank: int) -> list[Any]:
        module, facts = WithBody(), []
        for _ in range(2):
            trainer_of(gossip("complete", "sync"), 2).fit(module, loader(8, rank, 2))
            (group,) = module.optimizer.param_groups
            kept = [id(weight) for weight in group["params"]]
            same = kept == [id(weight) for weight in module.parameters()]
            facts += [size_of(module.norm), size_of(module.weight), same]
            facts += [module.weight.detach().clone()]
        return facts

    for norm, weight, same, first, *again, second in values(learners(2, program)):
        assert max(norm, weight, *again[:2]) < NUM_BODY
        assert same
        assert again[2]
        torch.testing.assert_close(second, 2 * first)


def test_a_part_is_small_after_fabrics_end() -> None:
    class WithBody(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Parameter(torch.zeros(NUM_BODY, dtype=torch.float64))

    def program(rank: int) -> list[int]:
        sizes = []
        for end in ("finish", "teardown"):
            module, strategy = WithBody(), fabric_learners.gossip()
            fabric = launched(strategy, 2)
            model, optimizer = fabric.setup(module, sgd(module))
            train(fabric, model, optimizer, loader(4, rank, 2))
            getattr(strategy_of(fabric), end)()
            sizes.append(size_of(module.weight))
        return sizes

    assert all(max(sizes) < NUM_BODY for sizes in values(learners(2, program)))
