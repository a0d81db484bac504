"""The virtual cluster and a network's scores on GPU 0 equal those on the CPU."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd.virtual.cluster import VirtualCluster
from tests.gpu.jobs import NEEDS_GPU
from tests.learners import trainer_of

pytestmark = [pytest.mark.gpu, NEEDS_GPU]


class Small(pl.LightningModule):
    """A layer over a recurrent one, whose weights cuDNN wants in one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 1)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        return (
            (self.head(self.lstm(rows)[0].mean(1))[:, 0] - rows[:, 0, 0])
            .square()
            .mean()
        )

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def samples() -> TensorDataset:
    return TensorDataset(
        torch.randn(240, 5, 4, generator=torch.Generator().manual_seed(1))
    )


def flat(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


@pytest.mark.parametrize(
    "communication", ["async", "sync", "delay_by_one", "ready_pairs"]
)
def test_a_virtual_cluster_trains_as_on_the_cpu(communication: Any) -> None:
    ended = {}
    for device in ("cpu", "cuda"):
        module = Small().to(device)
        topology = "complete" if communication == "ready_pairs" else "ring"
        cluster = VirtualCluster(module, 4, 1, topology, communication)
        cluster.fit(samples(), 480, local_batch_size=4)
        ended[device] = flat(module)
    torch.testing.assert_close(ended["cuda"], ended["cpu"], atol=2e-3, rtol=1e-2)


def test_the_virtual_strategy_trains_on_a_gpu() -> None:
    ended = {}
    for device in ("cpu", "cuda"):
        trainer = trainer_of("hadpsgd_virtual", 1, accelerator=device)  # pyright: ignore
        module = Small()
        trainer.fit(module, DataLoader(samples(), 4))
        ended[device] = flat(module)
    torch.testing.assert_close(ended["cuda"], ended["cpu"], atol=2e-3, rtol=1e-2)


def test_a_network_scores_on_a_gpu_as_on_the_cpu() -> None:
    pytest.importorskip("torchaudio")
    from lightning_adpsgd.asr.model import AcousticModel
    from recipes.hybrid.data.inputs import Inputs
    from recipes.hybrid.recognition.scorers import NetworkScorer

    torch.manual_seed(0)
    model = AcousticModel(
        50, input_size=12, num_layers=2, hidden_size=32, bottleneck_size=16
    )
    frames = np.random.default_rng(0).normal(size=(61, 12)).astype(np.float32)
    on_cpu = NetworkScorer(model)(Inputs.of(frames))
    on_gpu = NetworkScorer(model, "cuda")(Inputs.of(frames))
    assert on_gpu.dtype == on_cpu.dtype
    np.testing.assert_allclose(on_gpu, on_cpu, atol=0.05)
