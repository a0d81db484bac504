"""Refuses, at set-up, what cannot work with gossip; gives the reason and a remedy."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_Kind = TypeVar("_Kind")
# By name, because torch imports them only on request.
_COMMUNICATE = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
_DDP_ARGUMENTS = signature(DistributedDataParallel).parameters


def callbacks_of(trainer: pl.Trainer, kind: type[_Kind]) -> list[_Kind]:
    """The callbacks of one type among a Trainer's."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    return [one for one in callbacks if isinstance(one, kind)]


def save_period(callback: ModelCheckpoint, argument: str) -> Any:
    """The period between the saves of a callback; None if it has none.

    A subclass of `ModelCheckpoint` may lack the attributes of Lightning's. The argument
    is "every_n_train_steps", "every_n_epochs" or "train_time_interval".
    """
    return getattr(callback, f"_{argument}", None) or None


def timers_of(trainer: pl.Trainer) -> list[Timer]:
    """The timers that may end the training after any batch."""
    return [
        timer
        for timer in callbacks_of(trainer, Timer)
        if timer._interval == Interval.step and timer._duration is not None
    ]


def validates_by_time(trainer: pl.Trainer) -> bool:
    """Whether `val_check_interval` is a duration, as Lightning allows since 2.6."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def check_ddp_arguments(arguments: Mapping[str, Any], strategy: str) -> None:
    """Raises TypeError for arguments that `DistributedDataParallel` does not know.

    It raises ValueError for those that would change which learners allreduce. A
    super-learner of one learner has no DDP that would refuse any. `strategy` is the
    name of the class that was given them.
    """
    for name in arguments:
        if name not in _DDP_ARGUMENTS:
            raise TypeError(
                f"{strategy}() got an unexpected keyword argument {name!r}: "
                "neither this strategy nor `DistributedDataParallel` takes it"
            )
    for name in ("module", "device_ids", "process_group", "device_mesh"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{name}` must not be given, got {arguments[name]!r}: the strategy "
                "decides which learners allreduce gradients; see `super_learner_size`"
            )


def check_arguments_of_shards(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of DDP, which sharded models do not use.

    An argument at its default value, as a command line may pass it, is accepted.
    """
    known = {**_DDP_ARGUMENTS, **signature(DDPStrategy).parameters}
    allowed = ("cluster_environment", "accelerator", "parallel_devices")
    allowed += ("checkpoint_io", "precision_plugin", "process_group_backend")
    for name, value in arguments.items():
        if name not in allowed and value != known[name].default:
            raise ValueError(
                f'`{name}` must not be set with `inside="model_parallel"`, got '
                f"{value!r}: there is no DDP inside a super-learner, and learners "
                "start as separate processes"
            )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Raises ValueError for optimizers whose steps send weights to all learners."""
    kinds = {kind.__name__ for one in optimizers for kind in type(one).__mro__}
    for name in kinds & _COMMUNICATE:
        raise ValueError(
            f"an optimizer must change this learner's weights alone, got a {name}, "
            "which takes those of other learners: use the optimizer that it wraps "
            '(with `inside="model_parallel"`, the learners of a super-learner hold one '
            "state of it together)"
        )


def check_island(sizes: str | int | tuple[int, ...], num_learners: int) -> None:
    """Raises ValueError unless `super_learner_size` allows an island of this size."""
    allowed = (sizes,) if isinstance(sizes, int) else sizes
    if isinstance(allowed, tuple) and num_learners not in allowed:
        raise ValueError(
            '`super_learner_size` must be "node" with `islands`, or list every size '
            f"that an island may have: this one has {num_learners} learners, got "
            f"{sizes}"
        )


def refuse_unsupported(
    trainer: pl.Trainer, strategy: DDPStrategy, super_learner_size: int, inside: str
) -> None:
    """Raises ValueError for settings that cannot be honoured while learners gossip."""
    check_device(strategy.root_device)
    _refuse_ddp_arguments(super_learner_size, strategy)
    is_on_cpu = strategy.root_device.type == "cpu"
    _refuse_layer_sync(strategy._layer_sync, super_learner_size, is_on_cpu)
    _refuse_layers(
        trainer.lightning_module,
        "use batch-norm, and `sync_batchnorm=True` to synchronise it inside "
        "super-learners",
    )
    if inside == "model_parallel":
        _refuse_with_shards(trainer, strategy)
    else:
        _refuse_shards(trainer.lightning_module)


def refuse_unsupported_in_fabric(
    module: torch.nn.Module, device: torch.device, ddp: Mapping[str, Any], size: int
) -> None:
    """Raises ValueError for what cannot be honoured in Fabric while learners gossip.

    Args:
        ddp: arguments of `DistributedDataParallel` by name.
        size: number of learners in a super-learner.
    """
    check_device(device)
    _refuse_without_allreduce(size, {"mixed_precision": ddp.get("mixed_precision")})
    _refuse_layers(module, "it would wait for learners that gossip; use batch-norm")
    _refuse_shards(module)


def _refuse_layers(module: torch.nn.Module, remedy: str) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise ValueError(f"`{name}` must not be a SyncBatchNorm: {remedy}")
        if isinstance(layer, FullyShardedDataParallel):
            raise ValueError(
                f"`{name}` must not be a `FullyShardedDataParallel`: use `fully_shard` "
                'with `inside="model_parallel"` and a Trainer'
            )


def _refuse_shards(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"`{name}` must be a whole tensor in each learner, got a shard of one: "
                'set `inside="model_parallel"`, with a Trainer'
            )


def _refuse_with_shards(trainer: pl.Trainer, strategy: DDPStrategy) -> None:
    if strategy._layer_sync is not None:
        raise ValueError(
            '`sync_batchnorm` must be False with `inside="model_parallel"`, got True: '
            "use a normalisation of single samples, such as layer-norm"
        )
    if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
        raise ValueError(
            '`precision` must not be "16-mixed" with `inside="model_parallel"`, got a '
            f"{type(scaler).__name__}: each learner would skip steps based on its own "
            'shard; use "bf16-mixed", or FSDP2\'s `MixedPrecisionPolicy`'
        )
    for name in _with_whole_weights(trainer):
        raise ValueError(
            f'`{name}` cannot be used with `inside="model_parallel"`: it works on '
            "whole weights"
        )


def refuse_callbacks_of_islands(trainer: pl.Trainer) -> None:
    """Raises ValueError for callbacks with averages or masks: islands exchange none."""
    for name in _with_whole_weights(trainer):
        raise ValueError(
            f"`{name}` cannot be used with `islands`: each island would keep its own "
            "averages or masks; use it with learners of one job, or on checkpoints"
        )


def _with_whole_weights(trainer: pl.Trainer) -> Iterator[str]:
    """The names of callbacks that keep or change whole weights."""
    for callback in callbacks_of(trainer, Callback):
        # `StochasticWeightAveraging` and `WeightAveraging` have the attribute.
        if isinstance(callback, ModelPruning) or hasattr(callback, "_average_model"):
            yield type(callback).__name__


def check_device(device: torch.device) -> None:
    """Raises ValueError for an unsupported device; warns about support that is new."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            "`accelerator` must be 'cpu' or 'cuda' for gossip in this release, got "
            f"{device.type!r}"
        )
    if device.type == "cuda":
        rank_zero_warn(
            "Gossip between GPUs is new, and not yet run on several hosts: compare a "
            'short run with `strategy="ddp"` before you rely on it'
        )


@contextmanager
def one_gpu_per_learner() -> Iterator[None]:
    """A context that names the remedy if NCCL refuses two learners on one GPU."""
    try:
        yield
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise RuntimeError(
            "each learner must have a GPU of its own with NCCL, but two learners have "
            "the same: start as many learners on a host as it has GPUs, or pass "
            '`process_group_backend="gloo"` to the strategy'
        ) from error


def _refuse_ddp_arguments(size: int, strategy: DDPStrategy) -> None:
    if (period := strategy._model_averaging_period) is not None:
        raise ValueError(
            f"`model_averaging_period` must not be set, got {period}: this strategy "
            "averages models itself; see `topology` and `gossip_every`"
        )
    # They change what is trained, and not only how an allreduce is carried out.
    of_an_allreduce = {
        "ddp_comm_hook": strategy._ddp_comm_hook,
        "ddp_comm_wrapper": strategy._ddp_comm_wrapper,
        "mixed_precision": strategy._ddp_kwargs.get("mixed_precision"),
    }
    _refuse_without_allreduce(size, of_an_allreduce)


def _refuse_without_allreduce(size: int, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if size == 1 and value is not None:
            raise ValueError(
                f"`{name}` must not be set with `super_learner_size=1`, got {value}: a "
                "single learner has no gradient allreduce that it could apply to"
            )


def _refuse_layer_sync(layer_sync: Any, size: int, is_on_cpu: bool) -> None:
    if layer_sync is None:
        return
    if not isinstance(layer_sync, TorchSyncBatchNorm):
        raise ValueError(
            f"`plugins` must hold no layer synchronisation but Lightning's own, got "
            f"{type(layer_sync).__name__}"
        )
    if size > 1 and is_on_cpu:
        raise ValueError(
            "`sync_batchnorm` must be False on CPUs with super-learners of more than "
            f"one learner, got True with {size}: torch's SyncBatchNorm needs a GPU"
        )


_ALLOWED_WITH_WORK_SHARING: dict[str, tuple[Any, str]] = {
    "use_distributed_sampler": (True, "give all learners all data"),
    "limit_train_batches": (
        1.0,
        "no learner knows its number of batches; use torch.utils.data.Subset (also "
        "instead of `overfit_batches`, which sets it)",
    ),
    "val_check_interval": (
        1.0,
        "learners reach a number of batches at different times, or never",
    ),
    "max_steps": (-1, "learners make different numbers of steps; use `max_epochs`"),
    "min_steps": (None, "learners make different numbers of steps; use `min_epochs`"),
}
_COUNTING: dict[type[Callback], str] = {
    StochasticWeightAveraging: "no learner knows its number of batches",
    LearningRateFinder: "it counts the steps of one learner",
    SpikeDetection: "all learners meet in each of its batches",
}
"""Callbacks that count batches or meet in them, each with the reason or remedy."""


def problems_with_work_sharing(trainer: pl.Trainer) -> Iterator[str]:
    """What counts batches or steps, in which learners differ that share epochs."""
    connector = trainer._accelerator_connector
    for name, (allowed, reason) in _ALLOWED_WITH_WORK_SHARING.items():
        owner = connector if name == "use_distributed_sampler" else trainer
        value = getattr(owner, name, allowed)
        # 1.0 is the whole epoch, but 1 is one batch.
        is_count = isinstance(allowed, float) and isinstance(value, int)
        if is_count or value != allowed:
            yield (
                f"`{name}` must be {allowed!r} with `work_sharing=True`, got "
                f"{value!r}{' (a number of batches)' if is_count else ''}: {reason}"
            )
    if validates_by_time(trainer):
        yield _clock("val_check_interval")
    if timers_of(trainer):
        yield _clock("max_time")
    for callback in callbacks_of(trainer, Callback):
        yield from _problems_with_callback(callback)
    step = trainer.lightning_module.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        yield (
            "`training_step` must not take `dataloader_iter` with `work_sharing=True`: "
            "the loop would learn too late which batch is the last; take `batch`"
        )


def _problems_with_callback(callback: Callback) -> Iterator[str]:
    if isinstance(callback, ModelCheckpoint):
        if every := save_period(callback, "every_n_train_steps"):
            yield (
                "`every_n_train_steps` must not be set with `work_sharing=True`, "
                f"got {every}: use `lightning_adpsgd.callbacks.SaveWithinEpoch`"
            )
        if save_period(callback, "train_time_interval"):
            yield _clock("train_time_interval")
    for kind, reason in _COUNTING.items():
        if isinstance(callback, kind):
            name = type(callback).__name__
            yield f"`{name}` cannot be used with `work_sharing=True`: {reason}"


def _clock(argument: str) -> str:
    return (
        f"`{argument}` must not be set with `work_sharing=True`: use `max_epochs` and "
        "`lightning_adpsgd.callbacks.SaveWithinEpoch`"
    )


def forget_loader_without_iterator(trainer: pl.Trainer | None) -> None:
    """Keeps Lightning's teardown from hiding why a loader has yielded no batch.

    The teardown asks the loader for its length, which raises an error of its own while
    there is no iterator.
    """
    fetcher = trainer.fit_loop._data_fetcher if trainer is not None else None
    combined = getattr(fetcher, "_combined_loader", None)
    if fetcher is not None and combined is not None and combined._iterator is None:
        combined.reset()
        fetcher._combined_loader = None


def explain_unused_parameters(exception: BaseException) -> None:
    """Replaces the message of DDP on unused parameters by one with our remedy."""
    if any("Expected to have finished reduction" in str(a) for a in exception.args):
        exception.args = (
            "the loss does not depend on all parameters. If that is intended, pass "
            "`find_unused_parameters=True` to the strategy's class, as in "
            "`HADPSGDStrategy(..., find_unused_parameters=True)`",
        )
