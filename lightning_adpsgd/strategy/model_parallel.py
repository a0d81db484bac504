"""Super-learners whose learners together hold one model, sharded by FSDP2.

`ModelParallelInside` does in this strategy what Lightning's `ModelParallelStrategy`
does elsewhere. It has the mesh that `configure_model` shards over, weights that start
on the meta device, and sharded checkpoints. With `inside="ddp"` it changes nothing.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_adpsgd.coordination.gather import ending_together, texts_of_all
from lightning_adpsgd.coordination.groups import make_mesh, make_super_learner_group
from lightning_adpsgd.strategy.checkpoints.loading_shards import (
    Folder,
    Source,
    load_optimizers,
    load_weights,
)
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.checkpoints.sharded import (
    META,
    has_optimizer,
    read_rest,
    sum_of,
    write_shards,
)
from lightning_adpsgd.strategy.gradients import reduce_gradients
from lightning_adpsgd.strategy.options import HADPSGDOptions
from lightning_adpsgd.weights.shards import (
    DATA_PARALLEL,
    TENSOR_PARALLEL,
    check_sharding,
)

_TENSORS = 8  # the number of tensors of a batch that are compared
_ON_HOST = StateDictOptions(cpu_offload=True)


class ModelParallelInside(HADPSGDOptions, DDPStrategy):
    """Lightning's hooks that differ with `inside="model_parallel"`."""

    _mesh: DeviceMesh | None = None
    _savers: dist.ProcessGroup | None = None
    _source: Source | None = None
    _is_strict, _is_prepared, _has_compared = True, False, False

    @property
    def is_sharded(self) -> bool:
        """Whether the learners of a super-learner together hold one model."""
        return self.dials.inside == "model_parallel"

    @property
    def device_mesh(self) -> DeviceMesh:
        """The learners of this super-learner: data_parallel x tensor_parallel.

        Raises:
            RuntimeError: The processes have not started, or `inside` is "ddp".
        """
        if self._mesh is None:
            raise RuntimeError(
                '`device_mesh` exists only with `inside="model_parallel"`, from '
                "`configure_model` on"
            )
        return self._mesh

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_sharded:
            # Once, because a module stays sharded over the mesh of its first run.
            if self._mesh is None:
                self._make_mesh()
            assert self.lightning_module is not None
            self.lightning_module._device_mesh = self._mesh

    def _make_mesh(self) -> None:
        shape = self.root_device.type, self.partition, self.dials.timeout
        self._mesh = make_mesh(*shape)
        self._savers = self._mesh.get_group(DATA_PARALLEL)
        if self.partition.tensor_parallel_size > 1:
            self._savers = make_super_learner_group(*shape)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Learners that share layers read the same batches.
        rank = self.global_rank // self.partition.tensor_parallel_size
        return {"num_replicas": self.partition.num_readers, "rank": rank}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up without training."""
        if not self.is_sharded:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.prepare_model()
        self.setup_precision_plugin()

    def prepare_model(self) -> None:
        """Moves the module, with its sharded weights, to its device and dtype."""
        model = self.model
        assert model is not None
        if self.is_sharded:
            check_torch(self.root_device)
            if not isinstance(io := self._checkpoint_io, BackgroundCheckpointIO | None):
                raise ValueError(
                    "`plugins` must hold no CheckpointIO with "
                    f'`inside="model_parallel"`, got {type(io).__name__}'
                )
            shared_by = self.partition.tensor_parallel_size
            # Before it is moved: a model that is not sharded may not fit.
            check_sharding(model, self.super_learner_size, shared_by)
            _materialize_distributed_module(model, self.root_device)
        self.model = self.precision_plugin.convert_module(model)
        self.model_to_device()
        if self.is_sharded:
            self._is_prepared = True
            self._load_weights()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.dials.tensor_parallel_size > 1 and not self._has_compared:
            group = self.device_mesh.get_group(TENSOR_PARALLEL)
            _check_same_batch(batch, group)
            self._has_compared = True
        super().on_train_batch_start(batch, batch_idx)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self.dials.tensor_parallel_size > 1:
            assert self.model is not None
            reduce_gradients(self.model.parameters())

    # --- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.is_sharded:
            return super().lightning_module_state_dict()
        assert self.model is not None
        return get_model_state_dict(self.model, options=_ON_HOST)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.is_sharded:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return get_optimizer_state_dict(self.model, optimizer, options=_ON_HOST)

    def save_shards(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any,
        all_come: bool,
    ) -> None:
        """Writes a folder of shards; only warns if not all learners come."""
        if not all_come:
            rank_zero_warn(
                f"{filepath} was not saved: after a failure not all learners that hold "
                "shards can be asked. Resume from the last checkpoint before it"
            )
            return
        if "://" in str(filepath) or storage_options is not None:
            raise ValueError(
                "a checkpoint in shards must be on a mounted file system, got "
                f"{filepath} with `storage_options` {storage_options}"
            )
        path = Path(self.broadcast(str(filepath)))
        # All super-learners hold the consensus model, and the first one writes it.
        if self.global_rank in self.partition.all_ranks[0]:
            states = enumerate(checkpoint.pop("optimizer_states", []))
            tensors = {f"optimizer_{n}": state for n, state in states}
            tensors["state_dict"] = checkpoint.pop("state_dict")
            assert self._savers is not None
            write_shards(tensors, checkpoint, path, self._savers)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the plain data of a checkpoint; tensors, once there is a model."""
        if not (self.is_sharded and os.path.isdir(checkpoint_path)):
            # Before 2.6 Lightning has no such argument.
            options = {} if weights_only is None else {"weights_only": weights_only}
            checkpoint = super().load_checkpoint(checkpoint_path, **options)
            self._source = checkpoint if self.is_sharded else None
            return checkpoint
        path, allowed = Path(checkpoint_path), weights_only is not False
        # Each learner checks some of the files; all end if one file is damaged.
        with ending_together(f"checkpoint {checkpoint_path} was not read"):
            share = slice(self.global_rank, None, self.world_size)
            rest, written = read_rest(path, allowed, share), sum_of(path / META)
        if len({*texts_of_all(written)}) > 1:
            raise ValueError(
                "all learners must resume from the same checkpoint in shards, got "
                f"different ones, here {path} of step {rest.get('global_step')}: start "
                "again once each learner sees the same folder, or has a copy of it"
            )
        self._source = Folder(path, allowed)
        if has_optimizer(path, 0):
            rest["optimizer_states"] = []  # Lightning asks whether there are any
        return rest

    @override
    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        if not self.is_sharded:
            super().load_model_state_dict(checkpoint, strict)
            return
        self._is_strict = strict
        self._load_weights()  # during training, for a callback that reloads weights

    def _load_weights(self) -> None:
        if self._is_prepared and self._source is not None:
            assert self.model is not None
            load_weights(self.model, self._source, self._is_strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self.is_sharded:
            super().load_optimizer_state_dict(checkpoint)
            return
        source, self._source = self._source, None
        if source is not None:
            assert self.model is not None
            load_optimizers(self.model, source, self.optimizers)

    @override
    def teardown(self) -> None:
        self._source, self._is_prepared, self._has_compared = None, False, False
        if not self.is_sharded:
            super().teardown()
            return
        # Shards stay on the device of their mesh.
        for part in (self.cluster_environment, self.accelerator):
            assert part is not None
            part.teardown()
        self.precision_plugin.teardown()


def check_torch(device: torch.device) -> None:
    """Raises RuntimeError if torch's `fully_shard` cannot train on this device."""
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise RuntimeError(
            '`inside="model_parallel"` on CPUs needs a newer torch than '
            f'{torch.__version__}: install torch 2.11, or set `inside="ddp"`'
        )


def _check_same_batch(batch: Any, group: dist.ProcessGroup) -> None:
    """Refuses learners that share layers if their first batches differ."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    wide = (one.detach().to(torch.complex128) for one in tensors[:_TENSORS])
    sums = [one.sum().item() for one in wide]
    # The last digits may depend on the order in which a device adds.
    mine = f"{len(tensors)} {[f'{one:.5g}' for one in sums]}"
    if len({*texts_of_all(mine, group)}) > 1:
        # Whoever leaves first would end the others' all_gather with another error.
        with suppress(RuntimeError):
            dist.barrier(group)
        raise ValueError(
            f"learners {dist.get_process_group_ranks(group)} share layers, and so "
            "must train on the same batches, got different ones: deal them by "
            "`trainer.strategy.distributed_sampler_kwargs`, with one seed for all"
        )
