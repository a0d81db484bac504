"""What is trained: samples in memory, a model, a loss."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_adpsgd.asr.frames.data import ChunkDataset, SpeechData
from lightning_adpsgd.asr.model import AcousticModel, frame_cross_entropy
from lightning_adpsgd.asr.sound.features import CONTEXT, add_differences

Samples = tuple[Tensor, Tensor]
_DIMENSIONS, _CLASSES, _WIDTH = 64, 32, 128
_SHIFT, _WRONG_LABELS = 0.5, 0.1


@dataclass(frozen=True)
class Workload:
    """A task.

    Args:
        name: "speech", "classifier", or what yours is to be called in its report.
        train: inputs and labels, `[sample, ...]` each.
        held_out: inputs and labels of other samples, at least two: one half chooses
            settings, the loss of the other is reported.
        make: function that makes a model, drawn from the common generator.
        loss: mean cross-entropy of the model on inputs and labels, in nats.
        num_classes: C; a model that has learnt nothing has the loss ln C.

    Raises:
        ValueError: There are other numbers of inputs and labels, or too few of them.
    """

    name: str
    train: Samples
    held_out: Samples
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Samples], Tensor]
    num_classes: int

    def __post_init__(self) -> None:
        for name, (inputs, labels) in (
            ("train", self.train),
            ("held_out", self.held_out),
        ):
            if len(inputs) != len(labels):
                raise ValueError(
                    f"`{name}` must have a label for each input, got {len(inputs)} "
                    f"inputs and {len(labels)} labels"
                )
        if len(self.held_out[0]) < 2:
            raise ValueError(
                "`held_out` must have at least 2 samples, one for each half, got "
                f"{len(self.held_out[0])}"
            )
        if self.num_classes < 2:
            raise ValueError(
                f"`num_classes` must be at least 2, got {self.num_classes}"
            )

    @property
    def to_choose_by(self) -> Samples:
        """Every second of the held-out samples, by which settings are chosen.

        On speech both halves are chunks of the same utterances.
        """
        return self.held_out[0][::2], self.held_out[1][::2]

    @property
    def to_report(self) -> Samples:
        """The other held-out samples, whose loss is reported."""
        return self.held_out[0][1::2], self.held_out[1][1::2]

    def cut(self, multiple: int) -> "Workload":
        """The same with a number of training samples that this number divides.

        Raises:
            ValueError: There are fewer samples than that.
        """
        inputs, labels = self.train
        length = len(inputs) // multiple * multiple
        if not length:
            raise ValueError(
                f"`batches` must not exceed the {len(inputs)} training samples, got "
                f"{multiple}"
            )
        cut = (inputs[:length], labels[:length])
        return Workload(
            self.name, cut, self.held_out, self.make, self.loss, self.num_classes
        )


def batches_of(
    samples: Samples, batch: int, num_shares: int, seed: int
) -> Callable[[int], Iterator[Samples]]:
    """Each learner's batches, epoch after epoch.

    Step k takes the k-th stretch of `batch` samples of one order, which the seed alone
    decides, and the learners take equal parts of it: the same samples in the same
    steps, whatever the number of shares. A batch that an epoch cannot fill continues
    into the next one.

    Args:
        samples: samples, at least as many as `batch`.
        batch: global batch.
        num_shares: number of learners; 1 takes whole batches.
        seed: seed of the order.
    """
    inputs, labels = samples
    share = batch // num_shares

    def of(learner: int) -> Iterator[Samples]:
        dice = torch.Generator().manual_seed(seed)
        left = torch.empty(0, dtype=torch.long)
        while True:
            order = torch.cat([left, torch.randperm(len(inputs), generator=dice)])
            whole = len(order) // batch * batch
            for part in order[:whole].view(-1, num_shares, share)[:, learner]:
                yield inputs[part], labels[part]
            left = order[whole:]

    return of


def speech(features: Path, alignment: Path, num_layers: int, hidden: int) -> Workload:
    """Frames of speech to HMM states, by the acoustic model of the papers in small.

    Args:
        features: folder of the stage `features` of `recipes/hybrid`.
        alignment: folder of its stage `align`.
        num_layers: number of bidirectional LSTM layers.
        hidden: number of cells per direction, and the width of the bottleneck.
    """
    data = SpeechData(features, alignment)
    train, held_out = (_chunks(data.dataset(split)) for split in ("train", "dev"))
    num_states = 1 + int(max(train[1].max(), held_out[1].max()))

    def make() -> nn.Module:
        return AcousticModel(
            num_states,
            input_size=train[0].shape[-1],
            num_layers=num_layers,
            hidden_size=hidden,
            bottleneck_size=hidden,
        )

    return Workload("speech", train, held_out, make, _frame_loss, num_states)


def _frame_loss(model: nn.Module, samples: Samples) -> Tensor:
    return frame_cross_entropy(model(samples[0]), samples[1])


def _chunks(dataset: ChunkDataset) -> Samples:
    """All of them, the deltas added once and not in every step."""
    frames, labels = dataset.__getitems__(list(range(len(dataset))))
    inputs = add_differences(frames.float())
    margin = (inputs.shape[1] - dataset.chunk) // 2
    assert 0 <= margin <= CONTEXT
    return inputs[:, margin : margin + dataset.chunk].contiguous(), labels


def classifier(num_train: int = 16_384, num_held_out: int = 2_048) -> Workload:
    """Points to classes, a tenth of the training labels wrong, by a ReLU network.

    The classes are those of a random network of two tanh layers. The points are normal
    around a mean that is not zero, which makes one direction of the loss steep.

    Args:
        num_train: number of training samples.
        num_held_out: number of other samples, all with their right labels.
    """
    dice = torch.Generator().manual_seed(0)
    teacher = _teacher(dice)
    train, held_out = (_points(n, teacher, dice) for n in (num_train, num_held_out))
    wrong = torch.rand(num_train, generator=dice) < _WRONG_LABELS
    other = torch.randint(_CLASSES, (num_train,), generator=dice)
    train = (train[0], torch.where(wrong, other, train[1]))
    return Workload("classifier", train, held_out, _network, _label_loss, _CLASSES)


def _teacher(dice: torch.Generator) -> Callable[[Tensor], Tensor]:
    widths = (_DIMENSIONS, 64, 64, _CLASSES)
    first, second, last = (
        torch.randn(rows, columns, generator=dice) / rows**0.5
        for rows, columns in itertools.pairwise(widths)
    )
    return lambda x: torch.tanh(2 * torch.tanh(2 * x @ first) @ second) @ last


def _points(
    number: int, teacher: Callable[[Tensor], Tensor], dice: torch.Generator
) -> Samples:
    points = torch.randn(number, _DIMENSIONS, generator=dice)
    return points + _SHIFT, teacher(points).argmax(1)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_DIMENSIONS, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _CLASSES),
    )


def _label_loss(model: nn.Module, samples: Samples) -> Tensor:
    return functional.cross_entropy(model(samples[0]), samples[1])
