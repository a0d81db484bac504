"""The one model, data and loss that all methods train on.

A teacher draws the labels of random inputs; the student is a perceptron of 8.5 million
weights (34 MB): large beside its computation, so that communication shows. In the timed
form its layers wait instead of computing, and their gradients are filled with a number.
Then the figures do not depend on how learners share the cores of this machine.
"""

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

WIDTHS = (256, 2000, 2000, 2000, 10)
NARROW = (256, 256, 10)  # 68,000 weights, if their exchange does not matter
BATCH, HELD_OUT = 32, 4000
LR, PEAK, MOMENTUM = 0.02, 0.05, 0.9


class Batch(NamedTuple):
    """Inputs [batch, 256] and classes [batch]."""

    inputs: Tensor
    classes: Tensor


def make_model(
    seconds: float | None = None, widths: Sequence[int] = WIDTHS, seed: int = 0
) -> nn.Sequential:
    """Makes the model, with the same weights for the same seed.

    Args:
        seconds: Length of forward and backward in the timed form; None: it computes.
        widths: Widths from the inputs, which must be 256, to the 10 classes.
        seed: Seed of torch's global generator.
    """
    torch.manual_seed(seed)
    sizes = list(itertools.pairwise(widths))
    total = sum(i * o for i, o in sizes)
    layers: list[nn.Module] = []
    for inputs, outputs in sizes:
        share = None if seconds is None else seconds * inputs * outputs / total
        layers += [TimedLinear(inputs, outputs, share), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def num_weights(widths: Sequence[int]) -> int:
    """The number of weights of a model with these widths."""
    return sum((i + 1) * o for i, o in itertools.pairwise(widths))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimizer of a computed model without annealing."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


WARM_UP, AT_PEAK, FALLS = 0.1, 0.6, 8
"""Share of the steps; share after which the rate falls; how often it does."""


def rate_at(share: float) -> float:
    """The rate, relative to its peak, after a share of the steps.

    Linear, then level, then falling by the square root of a half, as in the papers.
    """
    if share < WARM_UP:
        return max(share, 0.01) / WARM_UP
    if share < AT_PEAK:
        return 1.0
    return 0.5 ** ((1 + int(FALLS * (share - AT_PEAK) / (1 - AT_PEAK))) / 2)


def anneal(
    optimizer: torch.optim.Optimizer, peak: float, num_steps: int
) -> torch.optim.Optimizer:
    """Makes an optimizer follow the schedule by itself, in any loop."""
    numbers = itertools.count()

    def set_rate(stepping: torch.optim.Optimizer, *_: object) -> None:
        rate = peak * rate_at(next(numbers) / num_steps)
        for group in stepping.param_groups:
            group["lr"] = rate

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


class TimedLinear(nn.Linear):
    """A linear layer that can wait instead of computing: a third of it forward."""

    def __init__(self, inputs: int, outputs: int, seconds: float | None) -> None:
        super().__init__(inputs, outputs)
        self.seconds = seconds

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.seconds is None:
            return super().forward(input)
        return _Wait.apply(input, self.weight, self.bias, self.seconds)  # pyright: ignore


class _Wait(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: "torch.autograd.function.FunctionCtx",
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        seconds: float,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.seconds = seconds  # pyright: ignore
        time.sleep(seconds / 3)
        return input.new_zeros(len(input), len(weight))

    @staticmethod
    @override
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: Tensor):  # pyright: ignore
        input, weight, bias = ctx.saved_tensors  # pyright: ignore
        time.sleep(ctx.seconds * 2 / 3)  # pyright: ignore
        filled = [torch.full_like(tensor, 1e-6) for tensor in (weight, bias)]
        return torch.zeros_like(input), *filled, None


def keep_memory() -> None:
    """Makes the C library keep freed memory, so that large gradients fault no pages.

    For the timed form, in which filling a gradient is to cost little, and where steps
    of different processes are compared.
    """
    threshold, trim = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(threshold, 32 << 20)
        library.mallopt(trim, 1 << 30)


def make_teacher() -> Callable[[Tensor], Tensor]:
    """Makes the teacher, from inputs to classes."""
    generator = torch.Generator().manual_seed(1234)
    first = torch.randn(WIDTHS[0], 64, generator=generator) * 3 / WIDTHS[0] ** 0.5
    second = torch.randn(64, WIDTHS[-1], generator=generator)
    return lambda inputs: (torch.tanh(inputs @ first) @ second).argmax(1)


def batches(seed: int, size: int = BATCH) -> Iterator[Batch]:
    """Endless batches, which the seed alone decides."""
    generator, teacher = torch.Generator().manual_seed(seed), make_teacher()
    while True:
        inputs = torch.randn(size, WIDTHS[0], generator=generator)
        yield Batch(inputs, teacher(inputs))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of samples, or of the frames of sequences."""
    logits: Tensor = model(batch.inputs)
    classes = logits.shape[-1]
    targets = batch.classes.flatten()
    return nn.functional.cross_entropy(logits.reshape(-1, classes), targets)


@torch.no_grad()
def held_out_loss(weights: Tensor, widths: Sequence[int] = WIDTHS) -> float:
    """The loss of the model with these weights, a vector, on held-out samples."""
    model = make_model(widths=widths)
    nn.utils.vector_to_parameters(weights, model.parameters())
    return loss(model, next(batches(seed=99, size=HELD_OUT))).item()


def weights_of(model: nn.Module) -> Tensor:
    """A copy of all weights as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
