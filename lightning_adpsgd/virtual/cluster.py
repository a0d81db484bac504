"""Many super-learners in one process, on a simulated clock.

docs/virtual-cluster.md says what is simulated, and how.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Unpack

from lightning_adpsgd.dials import Communication, check_positive
from lightning_adpsgd.topology.named import TopologyLike
from lightning_adpsgd.virtual.learner_data import BatchesOf, Source, shares_of
from lightning_adpsgd.virtual.learners import make_learners
from lightning_adpsgd.virtual.objective import (
    Loss,
    MakeOptimizer,
    Objective,
    Score,
    Update,
    evaluating,
    without_logging,
)
from lightning_adpsgd.virtual.options import ClusterOptions, dials_and_scenario
from lightning_adpsgd.virtual.report import Point, Report


class VirtualCluster:
    """S super-learners of N learners each, in one process and on one device.

    `num_super_learners=1` is the control: synchronous SGD with allreduce.

    Args:
        module: LightningModule, whose `training_step` and `configure_optimizers` are
            used without a Trainer; or any module if `loss` and `optimizer` are given.
            It must be on its final device. All super-learners start from its weights,
            and `fit` leaves the consensus model in it.
        num_super_learners: S.
        super_learner_size: N.
        topology: as for `HADPSGDStrategy`.
        communication: as for `HADPSGDStrategy`; `max_wait` is in simulated seconds.
        loss: ``loss(module, batch)``, a mean over the batch; by default the module's
            training step.
        optimizer: ``optimizer(parameters)``; by default what the module configures.
            Each super-learner has its own.
        gradient_clip: largest norm of a super-learner's mean gradient, over the weights
            of its optimizer; None: no bound.
        samples_in: function that counts the samples of a batch; by default it takes
            the length of the first tensor in the batch.
        **options: nine, each with a default:

            - `compute`: time that a learner computes for a step
            - `link`: link of each learner to its counterparts in other super-learners
            - `inner_link`: link of each learner to the others of its super-learner
            - `seed`: seed of times, topologies, the order of samples, and dropout
            - `order`, `mixing_gain`, `gossip_every`, `max_staleness`, `wire_dtype`: as
              for `HADPSGDStrategy`, but the last is None by default, never "auto"

    Raises:
        TypeError: An option is unknown, or an argument has a wrong type.
        ValueError: A value is out of its bounds.

    Attributes:
        scenario: numbers of super-learners and learners, speeds, links, topology, seed.
        learners: weights, simulated time and counters of all super-learners.
        samples: number of samples that all learners together have seen.
        learning_rate: learning rate of the last step in the first parameter group.
    """

    def __init__(
        self,
        module: nn.Module,
        num_super_learners: int,
        super_learner_size: int = 1,
        topology: TopologyLike = "ring",
        communication: Communication = "async",
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        gradient_clip: float | None = None,
        samples_in: Callable[[Any], int] = extract_batch_size,
        **options: Unpack[ClusterOptions],
    ) -> None:
        if gradient_clip is not None:
            check_positive("gradient_clip", gradient_clip)
        dials, self.scenario = dials_and_scenario(
            num_super_learners, super_learner_size, topology, communication, **options
        )
        self.module = module
        self._objective = Objective(module, loss, optimizer)
        self.learners = make_learners(module, dials, self.scenario)
        self._updates = [
            self._objective.make_update() for _ in range(num_super_learners)
        ]
        self._gradient_clip, self._samples_in = gradient_clip, samples_in
        self._sources: list[list[Source]] = []
        self._generator_states: list[Tensor] = []
        self.samples = 0
        self.learning_rate = self._updates[0].optimizer.param_groups[0]["lr"]

    @property
    def num_learners(self) -> int:
        """L = S N, the number of learners."""
        return self.scenario.num_learners

    def weights(self) -> list[Tensor]:
        """The weights of all super-learners as rows, [S, P] for each dtype."""
        return [matrix[:-1] for matrix in self.learners.rows.matrices]

    # --- training

    def fit(
        self,
        data: BatchesOf | DataLoader[Any] | Dataset[Any],
        max_samples: int,
        *,
        local_batch_size: int | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        evaluate: Score | Iterable[Any] | None = None,
        every_samples: int | None = None,
        local_losses: bool = False,
        on_point: Callable[[Point], None] | None = None,
    ) -> Report:
        """Trains until all learners together have seen `max_samples` samples.

        A further call continues from there, with the data of the first call.

        Args:
            data: data set or loader without a custom sampler, whose samples are dealt
                to the learners in a new order in each epoch. Or a function from a
                learner's number to the batches of its next epoch.
            max_samples: number of samples of all learners together, over all calls.
            local_batch_size: batch size of each learner if `data` is a data set or a
                loader; by default that of the loader. The batches of a function have
                their own.
            lr_schedule: function from the number of samples that all learners have seen
                to a factor on the learning rates. It excludes schedulers that the
                module configures, which count a super-learner's own steps.
            evaluate: function of the module that scores the consensus model at each
                point, or an iterable of batches, for which the mean loss is taken.
            every_samples: number of samples between two points; by default a twentieth
                of the samples of this call.
            local_losses: whether to score each super-learner's local weights, too.
            on_point: function called with each new point; the module then holds the
                consensus model.

        Returns:
            The curve and the counters. A run ends at the first point with a non-finite
            training loss, which `Report.diverged` records.

        Raises:
            TypeError: `data` is no data, or a number has a wrong type.
            ValueError: A number is out of its bounds, or arguments exclude each other.
        """
        if max_samples <= self.samples:
            raise ValueError(
                f"`max_samples` must be more than the {self.samples} that this cluster "
                f"has seen, got {max_samples}"
            )
        check_positive("every_samples", 1 if every_samples is None else every_samples)
        if lr_schedule is not None and any(u.schedulers for u in self._updates):
            raise ValueError(
                "`lr_schedule` takes the place of the schedulers that "
                "`configure_optimizers` returns; leave one of the two out"
            )
        every = every_samples or -(-(max_samples - self.samples) // 20)
        score = self._objective.score(evaluate, self._samples_in)
        curve = _Curve(self, score, local_losses, on_point)
        try:
            with self._own_generators(), without_logging(self.module):
                self._deal(data, local_batch_size)
                curve.add()
                self._run(curve, max_samples, every, lr_schedule)
        except BaseException:  # such as Ctrl-C, after which a program may go on
            with suppress(Exception):  # it would hide the first error
                curve.take_consensus()
            raise
        finally:
            self._give_consensus()
        return Report(
            curve.points,
            self.samples,
            self.learners.seconds,
            list(self.learners.steps),
            self.learners.totals(),
            curve.diverged,
        )

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Replaces torch's random generators by those of this cluster."""
        device = self._objective.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            if self._generator_states:
                torch.set_rng_state(self._generator_states[0])
                for device in devices:
                    torch.cuda.set_rng_state(self._generator_states[1], device)
            else:
                torch.manual_seed(self.scenario.seed)
            try:
                yield
            finally:
                of_devices = map(torch.cuda.get_rng_state, devices)
                self._generator_states = [torch.get_rng_state(), *of_devices]

    def _give_consensus(self) -> None:
        """Leaves the last mean in the module, in memory of its own, to be saved."""
        self.learners.hold_consensus()
        # With a view, `torch.save` would write the whole matrix behind it.
        self.learners.rows.release()

    def _run(
        self,
        curve: "_Curve",
        max_samples: int,
        every: int,
        lr_schedule: Callable[[int], float] | None,
    ) -> None:
        next_point, losses = self.samples + every, list[Tensor]()
        while self.samples < max_samples or not self.learners.between_rounds:
            losses.append(self._next_step(lr_schedule))
            if self.samples >= next_point and self.learners.between_rounds:
                next_point = self.samples + every
                curve.add(losses)
                losses = []
                if curve.diverged:
                    return
        if losses:
            curve.add(losses)

    def _next_step(self, lr_schedule: Callable[[int], float] | None) -> Tensor:
        index = self.learners.turn()
        batches, update = self._next_batches(index), self._updates[index]
        if lr_schedule is not None:
            update.scale(lr_schedule(self.samples))
        self.learning_rate = update.optimizer.param_groups[0]["lr"]
        number = self._sources[index][0].batches
        gradient = partial(self._gradient, update, batches, number - 1)
        loss = self.learners.update(update.optimizer.step, gradient)
        update.passed("step", number)
        self.samples += sum(self._samples_in(batch) for batch in batches)
        return loss

    def _next_batches(self, index: int) -> list[Any]:
        sources = self._sources[index]
        epochs = sources[0].epochs
        batches = [source.next() for source in sources]
        if sources[0].epochs > epochs:
            self._updates[index].passed("epoch", sources[0].epochs)
        return batches

    def _gradient(self, update: Update, batches: list[Any], number: int) -> Tensor:
        """Puts the mean of the learners' gradients into the module."""
        update.optimizer.zero_grad()
        self.module.zero_grad()  # includes parameters that no optimizer has
        rows, several = self.learners.rows, len(batches) > 1
        before = rows.buffers() if several else []
        loss = self._add_gradient(batches[0], number, len(batches))
        if several:
            # As in DDP, all learners begin with the buffers of the first learner, and
            # its buffers are kept.
            after = rows.buffers()
            for batch in batches[1:]:
                rows.put_buffers(before)
                loss = loss + self._add_gradient(batch, number, len(batches))
            rows.put_buffers(after)
        if self._gradient_clip is not None:
            nn.utils.clip_grad_norm_(update.parameters, self._gradient_clip)
        return loss

    def _add_gradient(self, batch: Any, number: int, num_learners: int) -> Tensor:
        loss = self._objective.loss(batch, number) / num_learners
        loss.backward()
        return loss.detach()

    def _deal(
        self,
        data: BatchesOf | DataLoader[Any] | Dataset[Any],
        local_batch_size: int | None,
    ) -> None:
        is_dealt = isinstance(data, DataLoader | Dataset)
        if callable(data) and not is_dealt and local_batch_size is not None:
            raise ValueError(
                "`local_batch_size` must be None if `data` is a function, whose "
                f"batches have a size, got {local_batch_size}"
            )
        if self._sources:
            return
        if is_dealt:
            seed, num = self.scenario.seed, self.num_learners
            data = shares_of(data, local_batch_size, num, seed)
        elif not callable(data):
            raise TypeError(
                "`data` must be a data set or loader of torch, or a function from the "
                f"number of a learner to its batches, got a {type(data).__name__}; for "
                "example `TensorDataset(tensor)`, or `module.train_dataloader()`"
            )
        size = self.scenario.super_learner_size
        self._sources = [
            [Source(data, i * size + n) for n in range(size)]
            for i in range(self.scenario.num_super_learners)
        ]


@dataclass
class _Curve:
    cluster: VirtualCluster
    score: Score | None
    scores_all: bool
    on_point: Callable[[Point], None] | None
    begin: float = field(default_factory=time.perf_counter)
    points: list[Point] = field(default_factory=list)
    diverged: str = ""

    def add(self, losses: Sequence[Tensor] = ()) -> None:
        cluster, loss = self.cluster, _mean([float(x) for x in losses])
        if losses and not math.isfinite(loss):
            samples = cluster.samples
            self.diverged = f"the training loss was {loss} after {samples} samples"
        distance, relative_distance = self.take_consensus()
        held_out_loss, own = self._score_held(), self._own_scores()
        point = Point(
            samples=cluster.samples,
            steps=_mean(cluster.learners.steps),
            seconds=cluster.learners.seconds,
            loss=loss,
            held_out_loss=held_out_loss,
            consensus_distance=distance,
            relative_distance=relative_distance,
            local_min=min(own),
            local_mean=_mean(own),
            local_max=max(own),
            learning_rate=cluster.learning_rate,
            wall_seconds=time.perf_counter() - self.begin,
        )
        self.points.append(point)
        if self.on_point is not None:
            cluster._give_consensus()  # local scores have put other weights there
            self.on_point(point)

    def take_consensus(self) -> tuple[float, float]:
        learners = self.cluster.learners
        try:
            consensus = learners.consensus()
        except FloatingPointError:  # no super-learner has finite weights
            return math.nan, math.nan
        learners.hold_consensus()
        return consensus.distance, consensus.relative_distance

    def _own_scores(self) -> list[float]:
        if not self.scores_all:
            return [math.nan]
        learners, scores = self.cluster.learners, []
        for index in range(len(learners.steps)):
            learners.hold(index)
            scores.append(self._score_held())
        return scores

    def _score_held(self) -> float:
        if self.score is None:
            return math.nan
        with evaluating(self.cluster.module):
            return float(self.score(self.cluster.module))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
