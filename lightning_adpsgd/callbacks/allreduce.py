"""The time that training waits for DDP's gradient allreduce."""

import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


class AllreduceWait(Callback):
    """Measures the wait for DDP's gradient allreduce after the last gradient is ready.

    The part that runs beside the backward pass is not counted. The wait stays 0 on CUDA
    and similar devices, where the host does not wait for collectives, and with a
    user-defined communication hook.

    Attributes:
        seconds: Total wait in this `fit` so far.
        bytes_sent: Bytes that this learner has sent in this `fit` so far. An allreduce
            over N learners counts as 2 (N - 1)/N of the gradient's bytes, the least
            that it can send.
    """

    seconds = bytes_sent = 0.0
    _last_gradient: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = self.bytes_sent = 0.0
        self._last_gradient = None
        model = trainer.strategy.model
        hooked = getattr(trainer.strategy, "_ddp_comm_hook", None) is not None
        if not isinstance(model, DistributedDataParallel) or hooked:
            return
        if pl_module.device.type == "cpu":
            model.register_comm_hook(model.process_group, self._allreduce)

    def _allreduce(
        self, group: torch.distributed.ProcessGroup, bucket: GradBucket
    ) -> torch.futures.Future[Tensor]:
        self._last_gradient = time.perf_counter()
        share = 2 * (group.size() - 1) / group.size()
        self.bytes_sent += share * bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last_gradient is not None:
            self.seconds += time.perf_counter() - self._last_gradient
            self._last_gradient = None
