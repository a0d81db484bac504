"""The training objective without a Trainer: loss, optimizer and schedulers.

A LightningModule brings all three; a plain module needs a loss function and a function
that makes an optimizer.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]
Score = Callable[[nn.Module], float]
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

# Hooks that only a Trainer calls, and that change a batch, a gradient or a step, or
# prepare for them. Hooks after an epoch or a run mostly log, and are not refused.
_HOOKS = (
    "setup",
    "configure_model",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
)


@dataclass
class Update:
    """The optimizer of one super-learner, with its learning-rate schedulers."""

    optimizer: torch.optim.Optimizer
    schedulers: Sequence[LRSchedulerConfig] = ()

    def __post_init__(self) -> None:
        self._first_rates = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def scale(self, factor: float) -> None:
        """Sets each learning rate to its initial value times a factor."""
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self._first_rates, strict=True):
            group["lr"] = rate * factor

    def passed(self, interval: str, number: int) -> None:
        """Advances the schedulers after step `number` of an epoch or epoch `number`."""
        for config in self.schedulers:
            if config.interval == interval and number % config.frequency == 0:
                config.scheduler.step()  # pyright: ignore[reportCallIssue]


class Objective:
    """A module with its loss and optimizer, the arguments of `VirtualCluster`."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.module, self._make_optimizer = module, optimizer
        if loss is None or optimizer is None:  # with both, it is as a plain module
            _check_lightning(module)
        if loss is None:
            self._loss = training_step_of(module)
        else:
            self._loss = lambda batch, number: loss(module, batch)
        if (first := next(module.parameters(), None)) is None:
            raise ValueError(
                f"`module` must have weights, but {type(module).__name__} has none; "
                "build its layers first, for example with `module.configure_model()`"
            )
        self.device = first.device

    def loss(self, batch: Any, number: int = 0) -> Tensor:
        """The mean loss of batch `number`, on any device, with its autograd graph."""
        if self.device.type != "cpu":
            batch = move_data_to_device(batch, self.device)
        return loss_in(self._loss(batch, number))

    def make_update(self) -> Update:
        """Makes an optimizer without state over the parameters; a TypeError if none."""
        if self._make_optimizer is not None:
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            made: Any = self._make_optimizer(parameters)
            if not isinstance(made, torch.optim.Optimizer):
                raise TypeError(
                    "`optimizer` must return one optimizer of torch, got a "
                    f"{type(made).__name__}; for example "
                    "`lambda parameters: torch.optim.SGD(parameters, lr=0.1)`"
                )
            return Update(made)
        assert isinstance(self.module, pl.LightningModule)
        return _configured(self.module)

    def score(
        self, evaluate: Score | Iterable[Any] | None, samples_in: Callable[[Any], int]
    ) -> Score | None:
        """The given function, or one for the mean loss per sample over batches."""
        if evaluate is None or callable(evaluate):
            return evaluate
        if not (batches := list(evaluate)):
            raise ValueError("`evaluate` must have a batch, got none; leave it out")
        counts = [samples_in(batch) for batch in batches]

        def mean_loss(module: nn.Module) -> float:
            losses = [float(self.loss(batch)) for batch in batches]
            pairs = zip(losses, counts, strict=True)
            return sum(loss * count for loss, count in pairs) / sum(counts)

        return mean_loss


def loss_in(output: Any) -> Tensor:
    """The loss in the result of a training step, with its graph; or a TypeError."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            "the loss of a batch must be a tensor, or under the key `loss` of a "
            f"dictionary, got {type(loss).__name__}"
        )
    return loss


@contextmanager
def without_logging(module: nn.Module) -> Iterator[None]:
    """Disables `self.log` and `self.log_dict`, which need a Trainer; may be nested."""
    is_lightning = isinstance(module, pl.LightningModule)
    names = ("log", "log_dict") if is_lightning else ()
    own = vars(module)
    before = {name: own[name] for name in names if name in own}
    own.update(dict.fromkeys(names, lambda *_, **__: None))
    try:
        yield
    finally:
        for name in names:
            del own[name]
        own.update(before)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without autograd; the random draws of training stay the same."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    on_gpu = next(module.parameters()).is_cuda
    try:
        with torch.no_grad(), isolate_rng(include_cuda=on_gpu):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check_lightning(module: nn.Module) -> None:
    if not isinstance(module, pl.LightningModule):
        raise ValueError(
            "`loss` and `optimizer` are needed with a plain module, a "
            f"{type(module).__name__} here; a LightningModule has its own"
        )
    if not module.automatic_optimization:
        raise ValueError(
            "`module` must use automatic optimization, got "
            f"{type(module).__name__}.automatic_optimization = False"
        )
    if own := [name for name in _HOOKS if is_overridden(name, module)]:
        raise ValueError(
            f"`module` must not define `{own[0]}`, which is not called without a "
            f"Trainer, got {type(module).__name__}; train it by "
            '`Trainer(strategy="hadpsgd_virtual")`, or give `loss` and `optimizer`'
        )


def training_step_of(module: Any) -> Callable[[Any, int], Any]:
    """The module's `training_step`, with `batch_idx` only if it takes one."""
    # By position and not by name, as the Trainer does.
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        return lambda batch, number: module.training_step(batch, number)
    return lambda batch, number: module.training_step(batch)


def _configured(module: pl.LightningModule) -> Update:
    with warnings.catch_warnings():
        # A scheduler is made for each super-learner, before any of their steps.
        warnings.simplefilter("ignore")
        configured = _configure(module)
        optimizers, schedulers, monitor = _configure_optimizers(configured)
        configs = _configure_schedulers_automatic_opt(schedulers, monitor)
    if len(optimizers) != 1:
        raise ValueError(
            "`configure_optimizers` must return one optimizer, got "
            f"{len(optimizers)} of {type(module).__name__}"
        )
    if any(config.reduce_on_plateau for config in configs):
        raise ValueError(
            "`configure_optimizers` must not return `ReduceLROnPlateau`, which "
            "needs the metrics of a Trainer; use `lr_schedule`"
        )
    return Update(optimizers[0], configs)


def _configure(module: pl.LightningModule) -> Any:
    try:
        return module.configure_optimizers()
    except RuntimeError as error:
        if module._trainer is not None or "attached to a `Trainer`" not in str(error):
            raise
        raise ValueError(
            "`configure_optimizers` must not use the Trainer, because there is none, "
            f"got {type(module).__name__}; train it by "
            '`Trainer(strategy="hadpsgd_virtual")`, or give `optimizer` and '
            "`lr_schedule`"
        ) from error
