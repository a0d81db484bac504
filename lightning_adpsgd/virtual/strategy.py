"""Many simulated super-learners behind Lightning's Trainer, on one device.

A batch of the Trainer is a local step of the super-learner whose turn is next in
simulated time. So the Trainer counts the samples and steps of all super-learners.
`learners` has the averages; this module connects them to Lightning.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import Unpack, override

from lightning_adpsgd.dials import Communication
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.strategy.checkpoints.saving import apart
from lightning_adpsgd.strategy.compatibility import callbacks_of
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.topology.named import TopologyLike
from lightning_adpsgd.virtual.learners import VirtualLearners, make_learners
from lightning_adpsgd.virtual.options import ClusterOptions, dials_and_scenario

_State = defaultdict[Any, Any]
# They would read or change the weights of whichever super-learner is in the module.
_OF_ONE_MODEL = (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)


class VirtualHADPSGDStrategy(SingleDeviceStrategy):
    """S super-learners that take turns on one device, on a simulated clock.

    The Trainer's loader feeds all of them. Each batch is a step of the super-learner
    whose turn it is, so schedules count the steps of all, and N multiplies no samples.
    docs/virtual-cluster.md says whose turn is next, and what a resumed run lacks.

    Args:
        num_super_learners: S.
        super_learner_size: N.
        topology: as for `HADPSGDStrategy`.
        communication: as for `HADPSGDStrategy`, with simulated seconds.
        **options: as for `VirtualCluster`; `seed` applies to simulated times and random
            topologies.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A value is out of its bounds.

    Attributes:
        dials: checked options.
        learners: weights, simulated time and counters of all; None outside of `fit`.
        last_consensus: consensus distance when the mean was last taken; None before.
    """

    strategy_name = "hadpsgd_virtual"

    def __init__(
        self,
        num_super_learners: int = 8,
        super_learner_size: int = 1,
        topology: TopologyLike = "ring",
        communication: Communication = "async",
        **options: Unpack[ClusterOptions],
    ) -> None:
        super().__init__()
        self.dials, self._scenario = dials_and_scenario(
            num_super_learners, super_learner_size, topology, communication, **options
        )
        self.num_super_learners = self._scenario.num_super_learners
        self.super_learner_size = self._scenario.super_learner_size
        self._overrides = Overrides()
        # The Trainer sets those that it was given; `setup` refuses more than one.
        self.parallel_devices: list[torch.device] = []
        self._states: list[_State] = []
        self.learners: VirtualLearners | None = None
        self._turn = -1
        self._statistics: Statistics | None = None
        self.last_consensus: Consensus | None = None

    # --- the state of all

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of all learners."""
        return (self.parallel_devices or [super().root_device])[0]

    def gossip_statistics(self) -> Statistics | None:
        """The counters of all super-learners' communication; None before `fit`."""
        if self.learners is not None:
            self._statistics = self.learners.totals()
        return self._statistics

    # --- set-up and end

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            _refuse_unsupported(trainer, self.parallel_devices)
        super().setup(trainer)
        if fits:
            self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        if len(self.optimizers) != 1:
            raise ValueError(
                "`configure_optimizers` must give one optimizer to "
                f'`strategy="hadpsgd_virtual"`, got {len(self.optimizers)}'
            )
        assert self.model is not None
        self.learners = make_learners(self.model, self.dials, self._scenario)
        self._states = self._copied_states()
        self._turn = -1  # the last `fit` may have failed within a turn
        # Both come before all hooks of the same occasion.
        self._overrides.wrap(trainer.fit_loop, "on_run_end", self._end_run)
        validation = trainer.fit_loop.epoch_loop.val_loop
        self._overrides.wrap(validation, "_on_evaluation_start", self._begin_validation)

    def _end_run(self, on_run_end: Callable[[], None]) -> None:
        self._turn = -1  # the run may end within a turn, which is not resumed
        self._enter_consensus()
        on_run_end()

    @override
    def teardown(self) -> None:
        if self.learners is not None:
            self.gossip_statistics()
            self.learners.rows.release()
            self.learners = None
        self._overrides.undo()
        super().teardown()

    # --- the step

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.learners is not None and self._turn < 0:
            # The turn lasts until the optimizer step, over accumulated batches.
            self._turn = self.learners.turn()
            self.optimizers[0].state = self._states[self._turn]
        super().on_train_batch_start(batch, batch_idx)

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self.learners is not None
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        output = self.learners.update(step, closure)
        self._turn = -1
        return output

    # --- evaluation and checkpoints: the consensus model

    def _begin_validation(self, begin: Callable[..., None], *args: Any) -> None:
        # Before all hooks: a hook may replace the weights for the validation, and puts
        # back those that it found.
        self._enter_consensus()
        begin(*args)

    @override
    def on_validation_end(self) -> None:
        # Between two turns the module is free for the next one.
        if self.learners is not None and self._turn >= 0:
            self.learners.hold(self._turn)
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the consensus model."""
        if self.learners is None:
            return super().lightning_module_state_dict()
        held = self.learners.rows.held
        self._enter_consensus()
        state = apart(super().lightning_module_state_dict())
        self.learners.hold(held)
        return state

    def _enter_consensus(self) -> None:
        if self.learners is not None:
            self.last_consensus = self.learners.consensus()
            self.learners.hold_consensus()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The state of the first super-learner's optimizer."""
        if self.learners is None:
            return super().optimizer_state(optimizer)
        mine = self.optimizers[0].state
        self.optimizers[0].state = self._states[0]
        state = deepcopy(super().optimizer_state(optimizer))
        self.optimizers[0].state = mine
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        rank_zero_warn(
            '`strategy="hadpsgd_virtual"` does not continue where the checkpoint was '
            f"written: all {self.num_super_learners} super-learners start from the "
            "consensus model, at simulated time 0; for the same numbers as without a "
            "break, train again from the start, without `ckpt_path`"
        )
        self._states = self._copied_states()

    def _copied_states(self) -> list[_State]:
        """A copy of the optimizer's state, which may not be empty, for each of them."""
        items = self.optimizers[0].state.items()
        return [
            defaultdict(dict, {weight: deepcopy(kept) for weight, kept in items})
            for _ in range(self.num_super_learners)
        ]


def _refuse_unsupported(trainer: pl.Trainer, devices: Sequence[torch.device]) -> None:
    if len(devices) > 1 or trainer.num_nodes > 1:
        raise ValueError(
            '`devices` and `num_nodes` must be 1 with `strategy="hadpsgd_virtual"`, '
            f"which simulates all learners on one device, got {len(devices)} and "
            f'{trainer.num_nodes}; to use them all, set `strategy="hadpsgd"`'
        )
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            "`automatic_optimization` must be True with "
            '`strategy="hadpsgd_virtual"`, because a turn ends with an optimizer step '
            f"of the Trainer, got False in {type(module).__name__}"
        )
    for kind in _OF_ONE_MODEL:
        if found := callbacks_of(trainer, kind):
            raise ValueError(
                f"`callbacks` must hold no {type(found[0]).__name__} with "
                '`strategy="hadpsgd_virtual"`: it would see the weights of the '
                "super-learner that made the last step"
            )
