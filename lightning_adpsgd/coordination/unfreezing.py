"""Weights that are frozen when DDP is made, and trained later.

DDP averages only the gradients of weights that require one when DDP is made. A weight
that is unfrozen later would silently get another gradient in each learner of a
super-learner.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_adpsgd.weights.flat import ignored_by_ddp

_Frozen = dict[str, nn.Parameter]
_FIND = (
    "the learners of a super-learner do not average its gradient; set "
    "`find_unused_parameters=True`, with `exchange_frozen=True` and without "
    "`static_graph`, or keep the weight frozen"
)
_AGAIN = (
    "no weight of its module was trained then, so learners exchange none of them; set "
    "the module up again with `fabric.setup`, or keep the weight frozen"
)


class Unfreezing:
    """Makes DDP average frozen weights too, or refuses to train them later.

    The first needs `find_unused_parameters`, which expects weights without a gradient.

    Args:
        exchange_frozen: whether frozen weights take part in averages.
        arguments: arguments of DDP.
    """

    def __init__(self, exchange_frozen: bool, arguments: Mapping[str, Any]) -> None:
        # In a static graph, a weight that is unused in the first step stays unused.
        is_static = arguments.get("static_graph", False)
        finds_unused = arguments.get("find_unused_parameters", False)
        self._reduces = exchange_frozen and finds_unused and not is_static
        # By module: two may have weights of one name, and one may be set up again.
        self._never_reduced = WeakKeyDictionary[nn.Module, tuple[_Frozen, str]]()

    def make(
        self, module: nn.Module, make: Callable[[], DistributedDataParallel]
    ) -> DistributedDataParallel:
        """Makes DDP of a module."""
        frozen = _frozen(module)
        with _trained(frozen if self._reduces else {}):
            wrapped = make()
        group = wrapped.process_group
        is_alone = group is None or group.size() == 1
        self._never_reduced[module] = {} if self._reduces or is_alone else frozen, _FIND
        return wrapped

    def __getstate__(self) -> dict[str, Any]:
        # A weak dictionary does not travel, and a Trainer may.
        return {**vars(self), "_never_reduced": {**self._never_reduced}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reduces = state["_reduces"]
        self._never_reduced = WeakKeyDictionary(state["_never_reduced"])

    def note(self, module: nn.Module, may_train: bool) -> None:
        """Notes whether frozen weights of a module that has no DDP may be trained."""
        noted = ({}, _FIND) if may_train else (_frozen(module), _AGAIN)
        self._never_reduced[module] = noted

    def checked(
        self, optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """The closure of an optimizer's step, with a check of its gradients.

        The closure raises a RuntimeError if DDP has not reduced one of them. A program
        may take gradients of weights that no optimizer changes.
        """

        def compute() -> Any:
            output = closure()
            self._check(_weights_of(optimizer))
            return output

        has_frozen = any(frozen for frozen, _ in self._never_reduced.values())
        return compute if has_frozen else closure

    def _check(self, changed: set[int]) -> None:
        for frozen, remedy in self._never_reduced.values():
            for name, weight in frozen.items():
                is_trained = weight.requires_grad and weight.grad is not None
                if not is_trained or id(weight) not in changed:
                    continue
                if remedy == _AGAIN and self._is_in_trained_module(weight):
                    continue
                raise RuntimeError(
                    f"`{name}` was frozen at set-up and is now trained, but {remedy}"
                )

    def _is_in_trained_module(self, weight: nn.Parameter) -> bool:
        """Whether it belongs to a trained module, too: a backbone to its model."""
        return any(
            weight is one
            for module, (_, remedy) in self._never_reduced.items()
            if remedy != _AGAIN
            for one in module.parameters()
        )


def _weights_of(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _frozen(module: nn.Module) -> _Frozen:
    """The frozen weights that DDP would reduce and that can have a gradient."""
    ignored = ignored_by_ddp(module)
    return {
        name: weight
        for name, weight in module.named_parameters()
        if name not in ignored
        and not weight.requires_grad
        and (weight.is_floating_point() or weight.is_complex())
    }


@contextmanager
def _trained(weights: _Frozen) -> Iterator[None]:
    for weight in weights.values():
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)
