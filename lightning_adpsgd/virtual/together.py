"""Whether gradients may be taken together: what a module is made of, and what it does.

One pass over stacked weights (`batched`) is the same as a loop over super-learners only
for a module that makes a loss of a batch and does nothing else, and it is faster only
for small dense layers, whose time goes into calls. Both are decided by the module and
by its first gradient, which is taken in the loop and watched; never by a clock, so that
the same seed gives the same run.
"""

import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import getclosurevars, isfunction
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

# A pass costs the calls of four gradients or so, however many it takes.
FEWEST = 8
# Of the gradients of a pass: more are memory that the system has to find each time.
TOGETHER_BYTES = 24 << 20
# Of the weights of one super-learner: with more, calls are not what takes time.
LARGEST = 1 << 20
# Layers whose weights stack into products of matrices. Recurrent ones come apart into
# their steps, convolutions into groups.
_DENSE = (nn.Linear, nn.LayerNorm)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Of Python and of NumPy: nobody can tell whether one was drawn from.
_GENERATORS = ("Random", "SystemRandom", "Generator", "RandomState")
_HOLDERS = (list, tuple, set, dict, deque)


def rows_at_once(num_rows: int, row_bytes: int) -> int:
    """How many gradients of so many bytes one pass should take."""
    return min(num_rows, max(FEWEST, TOGETHER_BYTES // row_bytes))


def why_not(
    module: nn.Module, optimizer: torch.optim.Optimizer, num_rows: int, row_bytes: int
) -> str:
    """Why gradients are taken one after the other; empty if they need not be.

    Args:
        module: Before its first gradient.
        optimizer: Of a super-learner.
        num_rows: Super-learners.
        row_bytes: Of the weights of one.
    """
    parameters = list(module.parameters())
    if num_rows < FEWEST:
        return f"there are fewer than {FEWEST} super-learners, {num_rows}"
    if parameters[0].device.type != "cpu":
        return f"the module is on {parameters[0].device}, and not on the CPU"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS asks for several gradients in one step"
    if row_bytes > LARGEST:
        return (
            f"calls are not what takes time with more than {LARGEST} bytes of weights"
        )
    for name, _ in module.named_buffers():
        return f"a pass over stacked weights cannot keep the buffer `{name}`"
    return _why_not_its_layers(module)


def _why_not_its_layers(module: nn.Module) -> str:
    for name, part in module.named_modules():
        if part._parameters and not isinstance(part, _DENSE):
            return f"`{name}` has weights and is a {type(part).__name__}"
        if any(getattr(part, hooks) for hooks in _HOOKS):
            return f"`{name}` has a hook, which may do anything"
    for name, parameter in module.named_parameters():
        if any(getattr(parameter, hooks) for hooks in _OF_PARAMETERS):
            return f"`{name}` has a hook, which may do anything"
    return ""


class FirstGradient:
    """Watches what the computation of a loss leaves behind.

    A pass over stacked weights calls the module once for many super-learners. What it
    counts, keeps or draws by itself would be counted, kept and drawn once for all.

    Args:
        module: Whose loss it is.
        loss: A function of the user's, which may keep things in its closure.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._module, self._loss = module, loss
        self._made = _Made()
        self._changes: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around each call of the loss."""
        draws, before = _draws(), list(_traits(self._module, self._loss))
        with self._made:
            yield
        if draws != _draws():
            self._changes.append("draws random numbers")
        after = list(_traits(self._module, self._loss))
        if not _are_same(before, after):
            self._changes.append("counts or keeps something")

    def why_not(self) -> str:
        """Why the next gradients are taken in a loop; empty if they need not be.

        To be asked when the loss and its graph are gone.
        """
        if self._made.still_there():
            self._changes.append("keeps tensors of its computation")
        return f"its loss {self._changes[0]}" if self._changes else ""


class _Made(TorchFunctionMode):
    """Remembers the tensors that calls of torch have made, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[ref[Tensor]] = []

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        self._made += [
            ref(leaf)
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and id(leaf) not in given
        ]
        return output

    def still_there(self) -> bool:
        """Whether somebody keeps one of them."""
        if all(made() is None for made in self._made):
            return False
        gc.collect()  # a circle of objects that nobody knows keeps nothing
        return any(made() is not None for made in self._made)


def _draws() -> tuple[Any, ...]:
    """The states of the generators that a module may draw from."""
    numpy = sys.modules.get("numpy")  # who has not loaded it does not draw from it
    of_numpy = repr(numpy.random.get_state(legacy=False)) if numpy else ""
    return random.getstate(), of_numpy, torch.get_rng_state().tolist()


def _traits(module: nn.Module, loss: Callable[..., Any] | None) -> Iterator[object]:
    """What a module and a function hold, with what lists and the like of it hold."""
    for part in module.modules():
        yield from _held(vars(part))
    if isfunction(loss):
        seen = getclosurevars(loss)
        yield from _held({**seen.globals, **seen.nonlocals})


def _held(names: dict[str, Any]) -> Iterator[object]:
    for name, value in names.items():
        yield name
        if type(value).__name__ in _GENERATORS:
            yield object()  # as if it had changed
        yield value
        if isinstance(value, _HOLDERS):
            yield from list(value)
        if isinstance(value, dict):
            yield from list(value.values())


def _are_same(before: list[object], after: list[object]) -> bool:
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(a is b for a, b in pairs)
