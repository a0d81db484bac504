"""Networks from six numbers to three classes: one of each kind that matters here."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _convolution() -> nn.Module:
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def _tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(6, 3))


def _frozen() -> nn.Module:
    layers = _layers()
    layers[0].requires_grad_(False)
    return layers


def _with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, bidirectional=True, batch_first=True)
        self.out = nn.Linear(8, 3)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        return self.out(self.lstm(rows.view(-1, 3, 2))[0][:, -1])


class Centred(nn.Module):
    """Has buffers of several kinds, two of which change in training."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("own", torch.zeros(2), persistent=False)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(rows.detach().mean(0), alpha=0.1)
            self.count += len(rows)
        return self.out(rows - self.mean)


class PartlyUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.never = nn.Linear(6, 3), nn.Linear(3, 3)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        return self.out(rows)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": _layers,
    "linear": lambda: nn.Linear(6, 3),
    "convolution": _convolution,
    "tied": _tied,
    "recurrent": Recurrent,
    "frozen": _frozen,
    "buffers": Centred,
    "dropout": _with_dropout,
    "partly unused": PartlyUnused,
}
