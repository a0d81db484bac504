"""The problems: four models, their generated data, and held-out samples.

The perceptron learns a teacher's labels, as `workload` has them, at a fourth of its
bytes. The recurrent network labels the frames of generated speech: phones of random
durations, each a mean in feature space. They are smeared over time as by a mouth that
moves, moved by a speaker and covered with noise. Both train with momentum. The
transformer labels the same frames and trains with AdamW, whose moments stay in each
learner. The convolutional network tells textures apart, each noise through the filter
of its class. It has batch norm and trains with momentum. It is evaluated with the
statistics of the held-out batch, since methods in a loop average parameters alone.

Every step has a nominal length. The gradient is computed, and the rest of the length is
slept, in the forward and the backward pass as a slower processor would have spent it.
So steps take as long on any processor that is fast enough. But all hosts share the
cores of this machine, on which exchanges take time from steps: columns in slow motion
show what that costs.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import workload
from benchmarks.workload import Batch, loss

STEP_S = 0.07
WHOLE_BYTES = 4 * 8.5e6
"""The bytes of the model of `overlap`; links of smaller models are slower."""
MOMENTUM = 0.9
TO_CHOOSE_BY, TO_REPORT = 10**9, 10**9 + 1
"""Seeds of the held-out samples."""


class Pace:
    """The nominal length of a learner's step, and how much of it has passed."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._begin = seconds, time.monotonic()

    def begin(self) -> None:
        """A step begins."""
        self._begin = time.monotonic()

    def until(self, share: float) -> None:
        """Sleeps until this share of the step has passed, if it has not yet."""
        left = self._begin + share * self._seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


class Paced(nn.Module):
    """Layers one after another: a third of the step forward, the rest backward."""

    def __init__(self, layers: Sequence[nn.Module], pace: Pace) -> None:
        super().__init__()
        self.layers, self._pace = nn.ModuleList(layers), pace
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        # The share of the backward pass that precedes the gradients of each layer.
        self._before = [sum(sizes[n + 1 :]) / sum(sizes) for n in range(len(sizes))]

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        for layer, before in zip(self.layers, self._before, strict=True):
            inputs = layer(inputs)
            if inputs.requires_grad:
                inputs.register_hook(self._wait_until(1 / 3 + before * 2 / 3))
        return inputs

    def _wait_until(self, share: float) -> Callable[[Tensor], None]:
        return lambda gradient: self._pace.until(share)


class Recurrent(nn.LSTM):
    """A bidirectional LSTM that returns only its outputs."""

    def __init__(self, features: int, cells: int) -> None:
        super().__init__(features, cells, batch_first=True, bidirectional=True)

    @override
    def forward(self, inputs: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(inputs)[0]


MakeOptimizer = Callable[[Iterable[Tensor], float], torch.optim.Optimizer]
"""A function that makes an optimizer, from parameters and a peak rate."""


def momentum(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate, momentum=MOMENTUM)


def adamw(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    # Second moments over 50 steps: in a run of some 600, 1,000 would be too many.
    return torch.optim.AdamW(parameters, rate, betas=(0.9, 0.98))


@dataclass(frozen=True)
class Problem:
    """A model with its data.

    Args:
        layers: Function that makes new layers, from torch's global generator.
        batches: Function for endless batches of a size, determined by the seed.
        batch: Samples of a learner's batch.
        held_out: Samples for the reported loss.
        rate: Learning rate at which the search begins.
        make_optimizer: Function for the optimizer of every method.
    """

    layers: Callable[[], list[nn.Module]]
    batches: Callable[[int, int], Iterator[Batch]]
    batch: int
    held_out: int
    rate: float
    make_optimizer: MakeOptimizer = momentum

    def make_model(self, seed: int, pace: Pace | None = None) -> Paced:
        """Makes the model, with the same weights for the same seed."""
        torch.manual_seed(seed)
        return Paced(self.layers(), pace or Pace(0.0))

    def batches_of(self, seed: int, rank: int) -> Iterator[Batch]:
        """The batches of one learner."""
        return self.batches(1000 * seed + rank + 1, self.batch)

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights."""
        return 4 * sum(p.numel() for p in self.make_model(0).parameters())

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The vector of all weights, from the shards of each learner."""
        shapes = [weight.shape for weight in self.make_model(0).parameters()]
        # Each has some rows of every weight.
        cuts = [torch.empty(shape).chunk(len(parts)) for shape in shapes]
        pieces = [
            part.split([cut[number].numel() for cut in cuts])
            for number, part in enumerate(parts)
        ]
        by_weight = zip(*pieces, strict=True)
        return torch.cat([piece for of_one in by_weight for piece in of_one])

    @torch.no_grad()
    def held_out_loss(self, weights: Tensor, seed: int) -> float:
        """The held-out loss of the model with these weights, a vector."""
        model = self.make_model(0)
        nn.utils.vector_to_parameters(weights, model.parameters())
        return loss(model, next(self.batches(seed, self.held_out))).item()


# --- the perceptron


PERCEPTRON_WIDTHS = (256, 1000, 1000, 1000, 10)


def perceptron_layers() -> list[nn.Module]:
    *sizes, (inputs, classes) = list(itertools.pairwise(PERCEPTRON_WIDTHS))
    hidden = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in sizes]
    return [*hidden, nn.Linear(inputs, classes)]


# --- generated speech


FEATURES, PHONES, SPEAKERS, CELLS = 40, 64, 64, 192
WIDTH, HEADS = 128, 4
FRAMES = 21  # of a chunk, as in the papers
CHANGE, PREFERRED = 0.25, 16
"""Odds that a phone ends at a frame; phones that may follow a phone."""
CONTEXT, NOISE, SPEAKER = 1.5, 1.5, 0.7
"""Standard deviations, relative to that of the means of phones."""


def recurrent_layers() -> list[nn.Module]:
    return [Recurrent(FEATURES, CELLS), nn.Linear(2 * CELLS, PHONES)]


class Embedding(nn.Linear):
    """Embeds frames and their positions."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.positions = nn.Parameter(0.02 * torch.randn(FRAMES, width))

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.positions


def transformer_layers() -> list[nn.Module]:
    encoders = [
        nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, 2 * WIDTH), 0.0, batch_first=True, norm_first=True
        )
        for _ in range(2)
    ]
    ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PHONES)
    return [Embedding(FEATURES, WIDTH), *encoders, *ends]


def speech(seed: int, size: int) -> Iterator[Batch]:
    """Chunks of frames [size, FRAMES, FEATURES] with their phones [size, FRAMES]."""
    world = torch.Generator().manual_seed(4321)
    means = torch.randn(PHONES, FEATURES, generator=world)
    # The sound of a phone depends on the phone before it.
    context = CONTEXT * torch.randn(PHONES, PHONES, FEATURES, generator=world)
    follows = torch.randint(PHONES, (PHONES, PREFERRED), generator=world)
    speakers = SPEAKER * torch.randn(SPEAKERS, FEATURES, generator=world)
    generator = torch.Generator().manual_seed(seed)
    while True:
        before, phones = _phones(follows, size, generator)
        of_speaker = torch.randint(SPEAKERS, (size, 1), generator=generator)
        clean = _smeared(means[phones] + context[before, phones])
        clean += speakers[of_speaker]
        noise = NOISE * torch.randn(clean.shape, generator=generator)
        yield Batch(clean + noise, phones)


def _phones(
    follows: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The phone before and the phone of each frame: a chain that stays or continues."""
    before, phone = torch.randint(PHONES, (2, size), generator=generator)
    changes = torch.rand(size, FRAMES, generator=generator) < CHANGE
    choices = torch.randint(PREFERRED, (size, FRAMES), generator=generator)
    found = []
    for frame in range(FRAMES):
        successor = follows[phone, choices[:, frame]]
        before = torch.where(changes[:, frame], phone, before)
        phone = torch.where(changes[:, frame], successor, phone)
        found.append((before, phone))
    befores, phones = zip(*found, strict=True)
    return torch.stack(befores, 1), torch.stack(phones, 1)


def _smeared(targets: Tensor) -> Tensor:
    """Each frame, as the mean of its target and the smeared frame before it."""
    frames = [targets[:, 0]]
    for frame in range(1, FRAMES):
        frames.append((frames[-1] + targets[:, frame]) / 2)
    return torch.stack(frames, 1)


# --- generated textures


PIXELS, COLOURS, TEXTURES, CHANNELS = 16, 3, 32, 24
"""Width of an image, its colours, its classes; width of the network."""
GRAIN = 2.0
"""Standard deviation of what covers a texture, whose own is about 1.7."""


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = convolution(channels, channels)
        self.second = convolution(channels, channels)[:2]

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs + self.second(self.first(inputs)))


def convolutional_layers() -> list[nn.Module]:
    narrow, middle, wide = CHANNELS, 2 * CHANNELS, 4 * CHANNELS
    return [
        convolution(COLOURS, narrow),
        convolution(narrow, middle, stride=2),
        Residual(middle),
        convolution(middle, wide, stride=2),
        Residual(wide),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, TEXTURES)),
    ]


def textures(seed: int, size: int) -> Iterator[Batch]:
    """Images [size, COLOURS, PIXELS, PIXELS] with their classes [size]."""
    world = torch.Generator().manual_seed(4321)
    filters = torch.randn(TEXTURES, COLOURS, COLOURS, 3, 3, generator=world) / 3
    generator = torch.Generator().manual_seed(seed)
    image = size, COLOURS, PIXELS, PIXELS
    while True:
        labels = torch.randint(TEXTURES, (size,), generator=generator)
        chosen = filters[labels].flatten(0, 1)
        white = torch.randn(image, generator=generator).flatten(0, 1)
        # Each image has filters of its own, so all are one image of many groups.
        texture = nn.functional.conv2d(white[None], chosen, padding=1, groups=size)
        grain = GRAIN * torch.randn(image, generator=generator)
        yield Batch(texture.view(image) + grain, labels)


PROBLEMS = {
    "perceptron": Problem(perceptron_layers, workload.batches, 32, 4000, 0.05),
    "bilstm": Problem(recurrent_layers, speech, 16, 400, 0.4),
    "transformer": Problem(transformer_layers, speech, 16, 400, 0.008, adamw),
    "convnet": Problem(convolutional_layers, textures, 16, 2000, 0.025),
}
