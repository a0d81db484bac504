"""The methods that are compared, each as a program of one learner.

Lightning's own strategies and those of this package train through Lightning's Trainer,
as their users do; the other libraries train in a plain loop. Both loops take the same
batches of the same `Feed`, which also keeps the clock, so that what is compared is the
time from one step to the next. `solo` is there in both loops.
"""

import itertools
import logging
import os
import site
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks import workload
from benchmarks.learners import PATIENCE, Place
from benchmarks.workload import Batch
from lightning_adpsgd import HADPSGDStrategy

PEERS = Path(__file__).parents[1] / ".venv-peers"
PERIOD = 8  # local steps between the averages of the methods that have such
WARMUP = 3  # steps before the clock counts
SHORTEST, LONGEST = 3, 400


@dataclass(frozen=True)
class Task:
    """What the learners are to do.

    Args:
        seconds: For how long to measure; how many steps that is, learner 0 says.
        steps: Instead of `seconds`: exactly so many, and the weights at the end.
        counts: Instead of `seconds`: how many steps of each learner, by rank, count.
        period: Steps after which what a method does repeats.
        wait_s: Of a step in the timed form; none: it computes.
        widths: Of the model.
        slower: By how much each learner's timed step is longer, in seconds, by rank.
    """

    seconds: float = 3.0
    steps: int | None = None
    counts: Sequence[int] = ()
    period: int = 1
    wait_s: float | None = None
    widths: Sequence[int] = workload.WIDTHS
    slower: dict[int, float] = field(default_factory=dict)

    def count_for(self, step_s: float) -> int:
        """Steps that take about `seconds`: whole periods, and enough for a mean."""
        periods = round(self.seconds / step_s / self.period)
        return min(max(self.period * periods, self.period, SHORTEST), LONGEST)

    def make_model(self, rank: int) -> nn.Module:
        """The model of a learner: in the timed form, one that waits for its step."""
        if self.wait_s is None:
            return workload.make_model(widths=self.widths)
        workload.keep_memory()
        return workload.make_model(
            self.wait_s + self.slower.get(rank, 0.0), self.widths
        )


class Reading(NamedTuple):
    """The counters of a learner at one moment.

    Attributes:
        exposed_s: Seconds that the training thread has waited for communication, as
            the engine counts them.
        process_s: Of processor time, all threads.
        thread_s: Of processor time, the training thread.
        exchanges: As the engine counts them; 0 under methods that count nothing.
    """

    exposed_s: float
    process_s: float
    thread_s: float
    exchanges: int = 0


class Counted(NamedTuple):
    """What the engine counts; nothing under methods that have none."""

    exposed_s: float = 0.0
    exchanges: int = 0


class Trace(NamedTuple):
    """What one learner leaves.

    Attributes:
        stamps: When each counted step began, on the clock of the machine.
        first: Counters at the first of them.
        last: Counters at the last of them.
        shipped: The weights that the method would save, if they were asked for.
        local: This learner's weights before any averaging at the end.
    """

    stamps: list[float]
    first: Reading
    last: Reading
    shipped: Tensor | None = None
    local: Tensor | None = None


class Feed(IterableDataset[Batch]):
    """A learner's batches, and the clock over its steps.

    After the warm-up all learners wait for one another, and learner 0, which knows by
    then what a step takes, says how many follow.
    """

    def __init__(self, place: Place, task: Task) -> None:
        super().__init__()
        self._place, self._task = place, task
        self.store = place.make_store()
        self._stamps: list[float] = []
        self._readings: dict[int, Reading] = {}
        # Numbers of the first and the last counted step. After a meeting, the second
        # step is the first to begin with communication under way.
        self._first, self._last = WARMUP + 1, -1
        self.counted: Callable[[], Counted] = Counted

    @override
    def __iter__(self) -> Iterator[Batch]:
        endless = workload.batches(seed=self._place.rank + 1)
        if self._task.steps is not None:
            self._first, self._last = 1, self._task.steps - 1
            yield from itertools.islice(endless, self._task.steps)
            return
        yield from itertools.islice(endless, WARMUP)
        count = self._agree()
        self._last = self._first + count
        yield from itertools.islice(endless, count + 2)

    def tick(self) -> None:
        """A step begins."""
        if len(self._stamps) in (self._first, self._last):
            self._readings[len(self._stamps)] = self._read()
        self._stamps.append(time.monotonic())

    def trace(self, shipped: Tensor | None, local: Tensor | None) -> Trace:
        """What was seen between the first counted step and the last."""
        counted = self._stamps[self._first : self._last + 1]
        ends = self._readings[self._first], self._readings[self._last]
        wanted = self._task.steps is not None
        return Trace(
            counted, *ends, shipped if wanted else None, local if wanted else None
        )

    def _read(self) -> Reading:
        exposed_s, exchanges = self.counted()
        times = time.process_time(), time.thread_time()
        return Reading(exposed_s, *times, exchanges)

    def meet(self, name: str) -> None:
        """Waits for all learners, without a process group."""
        self.store.add(f"{name}/arrived", 1)
        if self._place.rank == 0:
            self._await(f"{name}/arrived")
            self.store.set(f"{name}/go", "")
        self.store.wait([f"{name}/go"])

    def leave(self) -> None:
        """Ends together with all learners; learner 0, who hosts the store, is last."""
        self.meet("end")
        self.store.add("left", 1)
        if self._place.rank == 0:
            self._await("left")

    def _await(self, key: str) -> None:
        while self.store.add(key, 0) < self._place.world_size:
            time.sleep(0.005)

    def _shortest_step(self) -> float:
        # The first builds buckets and connections; others may wait for a late learner.
        stamps = [*self._stamps, time.monotonic()]
        return min(later - earlier for earlier, later in itertools.pairwise(stamps[1:]))

    def _agree(self) -> int:
        if self._place.rank == 0:
            self.store.set("count", str(self._task.count_for(self._shortest_step())))
        self.meet("start")
        mine = self._task.counts
        return mine[self._place.rank] if mine else int(self.store.get("count"))


# --- through Lightning's Trainer


class Module(L.LightningModule):
    """The workload as Lightning wants it."""

    def __init__(self, feed: Feed, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._feed = feed
        feed.counted = self._counted
        self.local: Tensor | None = None

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._feed, batch_size=None)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._feed.tick()
        return workload.loss(self.model, batch)

    @override
    def on_train_epoch_end(self) -> None:
        self.local = workload.weights_of(self.model)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)

    def _counted(self) -> Counted:
        strategy = self.trainer.strategy
        if not isinstance(strategy, HADPSGDStrategy):
            return Counted()
        found = strategy.gossip_statistics()
        if found is None:
            return Counted()
        return Counted(found.exposed_seconds, found.exchanges)


def through_trainer(strategy: str) -> Callable[[Place, Task], Trace]:
    """A program that trains with a strategy; none of Lightning's extras is on."""

    def program(place: Place, task: Task) -> Trace:
        num_hosts = place.world_size // place.per_host
        return train(place, task, strategy, place.per_host, num_hosts)

    return program


def alone(place: Place, task: Task) -> Trace:
    """Through a Trainer that is to see none of the other learners."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    return train(place, task, "auto", devices=1, num_nodes=1)


def within_host(place: Place, task: Task) -> Trace:
    """`ddp` of the learners of a host, which see none of the other hosts."""
    local = place.rank % place.per_host
    os.environ.update(
        RANK=str(local),
        WORLD_SIZE=str(place.per_host),
        GROUP_RANK="0",
        MASTER_ADDR=place.address,
    )
    return train(place, task, "ddp", place.per_host, num_nodes=1)


def train(
    place: Place,
    task: Task,
    strategy: Any,
    devices: int,
    num_nodes: int,
    callbacks: Sequence[L.Callback] = (),
) -> Trace:
    """One fit."""
    quieten()
    feed = Feed(place, task)
    module = Module(feed, task.make_model(place.rank))
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    feed.leave()
    return feed.trace(workload.weights_of(module.model), module.local)


def quieten() -> None:
    """Leaves only errors of Lightning's messages."""
    for package in ("lightning.pytorch", "lightning.fabric", "torch", "torchft"):
        logging.getLogger(package).setLevel(logging.ERROR)


# --- in a plain loop


class Loop(NamedTuple):
    """What a method adds to the plain loop.

    Attributes:
        step: One training step on a batch.
        shipped: The weights that the method would save.
        before_shipping: What its users call when training is over.
    """

    step: Callable[[Batch], object]
    shipped: Callable[[], Tensor]
    before_shipping: Callable[[], object] = lambda: None


Maker = Callable[[Place, nn.Module, ExitStack], Loop]


def in_plain_loop(make: Maker, gloo: bool = True) -> Callable[[Place, Task], Trace]:
    """A program that takes every batch of the feed to a method's step."""

    def program(place: Place, task: Task) -> Trace:
        quieten()
        feed = Feed(place, task)
        if gloo:
            dist.init_process_group("gloo", timeout=PATIENCE)
        model = task.make_model(place.rank)
        with ExitStack() as stack:
            loop = make(place, model, stack)
            for batch in feed:
                feed.tick()
                loop.step(batch)
            local = loop.shipped()
            feed.meet("trained")
            loop.before_shipping()
            trace = feed.trace(loop.shipped(), local)
            feed.leave()
        return trace

    return program


def plain_step(model: nn.Module, optimizer: Any) -> Callable[[Batch], None]:
    """Gradient and step, with nothing around them."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()

    return step


def solo(place: Place, model: nn.Module, stack: ExitStack) -> Loop:
    """No communication at all."""
    step = plain_step(model, workload.make_optimizer(model))
    return Loop(step, lambda: workload.weights_of(model))


def decent_dp(topology: str) -> Maker:
    """Decent-DP: exchanges with one peer a step, hidden behind the next gradient."""

    def make(place: Place, model: nn.Module, stack: ExitStack) -> Loop:
        use_peers()
        from decent_dp.ddp import DecentralizedDataParallel  # pyright: ignore
        from loguru import logger  # pyright: ignore

        logger.remove()

        momentum = workload.momentum_of(model)

        def optimizer(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
            parameters = [parameter for _, parameter in named]
            return torch.optim.SGD(parameters, lr=workload.LR, momentum=momentum)

        wrapped = DecentralizedDataParallel(model, optimizer, topology=topology)
        wrapped.train()
        return Loop(
            # The optimizer is inside the hooks of the backward pass.
            lambda batch: workload.loss(wrapped, batch).backward(),
            lambda: workload.weights_of(model),
            lambda: _decent_average(wrapped),
        )

    return make


def _decent_average(wrapped: Any) -> None:
    for work in wrapped._comm_ops:
        if work is not None:
            work.wait()
    wrapped.eval()
    wrapped.global_avg(will_revert=False)


def post_local(hierarchical: bool) -> Maker:
    """torch's post-local SGD: an average of all every 8 steps, of pairs every 4."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.algorithms.model_averaging import (
        hierarchical_model_averager as hierarchy,
    )
    from torch.distributed.optim import PostLocalSGDOptimizer

    def make(place: Place, model: nn.Module, stack: ExitStack) -> Loop:
        wrapped = nn.parallel.DistributedDataParallel(model)
        nearby, _ = dist.new_subgroups(place.per_host)
        state = hook.PostLocalSGDState(
            process_group=None, subgroup=nearby, start_localSGD_iter=2
        )
        wrapped.register_comm_hook(state, hook.post_localSGD_hook)
        sizes = OrderedDict([(PERIOD // 2, 2), (PERIOD, place.world_size)])
        averager = (
            hierarchy.HierarchicalModelAverager(sizes, warmup_steps=2)
            if hierarchical
            else averagers.PeriodicModelAverager(period=PERIOD, warmup_steps=2)
        )
        optimizer = PostLocalSGDOptimizer(workload.make_optimizer(model), averager)
        step = plain_step(wrapped, optimizer)
        return Loop(step, lambda: workload.weights_of(model))

    return make


def torchft(diloco: bool) -> Maker:
    """torchft's LocalSGD or DiLoCo: the average of all every 8 steps."""

    def make(place: Place, model: nn.Module, stack: ExitStack) -> Loop:
        use_peers()
        from torchft.coordination import LighthouseServer  # pyright: ignore
        from torchft.local_sgd import DiLoCo, LocalSGD  # pyright: ignore

        port = place.port + 2
        if place.rank == 0:
            server = LighthouseServer(
                bind=f"0.0.0.0:{port}",
                min_replicas=place.world_size,
                quorum_tick_ms=10,
                join_timeout_ms=10_000,
            )
            stack.callback(server.shutdown)
        optimizer = workload.make_optimizer(model)
        manager = _manager(place, f"http://{place.master}:{port}", not diloco)
        stack.callback(manager.shutdown, wait=False)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        stack.enter_context(
            DiLoCo(manager, [model], optimizer, outer, sync_every=PERIOD)
            if diloco
            else LocalSGD(manager, model, optimizer, sync_every=PERIOD)
        )
        step = plain_step(model, optimizer)
        return Loop(step, lambda: workload.weights_of(model))

    return make


def _manager(place: Place, lighthouse: str, asynchronous_quorum: bool) -> Any:
    from torchft.manager import Manager  # pyright: ignore
    from torchft.process_group import ProcessGroupGloo  # pyright: ignore

    port = place.port + 100 + place.rank
    store = TCPStore(place.address, port, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=place.world_size,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"learner{place.rank}",
        store_addr=place.address,
        store_port=port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname=place.address,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=timedelta(seconds=20),
        # All begin with the same weights.
        init_sync=False,
        use_async_quorum=asynchronous_quorum,
    )
    manager.kept_store = store  # lives as long as its manager
    return manager


def use_peers() -> None:
    """Lets this process import what `make peers` has installed."""
    for folder in PEERS.glob("lib/python*/site-packages"):
        site.addsitedir(str(folder))


def peers_missing() -> str | None:
    """Why other libraries cannot be compared with; none if they can."""
    if not any(PEERS.glob("lib/python*/site-packages/decent_dp")):
        return "not installed: make peers"
    return None


SOLO, SOLO_LOOP = "solo", "solo, plain loop"
WITHIN_HOST = "ddp within each host"
PROGRAMS: dict[str, Callable[[Place, Task], Trace]] = {
    SOLO: alone,
    "ddp": through_trainer("ddp"),
    WITHIN_HOST: within_host,
    "sdpsgd": through_trainer("sdpsgd"),
    "d1psgd": through_trainer("d1psgd"),
    "adpsgd": through_trainer("adpsgd"),
    "adpsgd_random": through_trainer("adpsgd_random"),
    "hadpsgd": through_trainer("hadpsgd"),
    SOLO_LOOP: in_plain_loop(solo, gloo=False),
    "torch post-local": in_plain_loop(post_local(hierarchical=False)),
    "torch hierarchical": in_plain_loop(post_local(hierarchical=True)),
    "Decent-DP ring": in_plain_loop(decent_dp("ring")),
    "Decent-DP one-peer-exp": in_plain_loop(decent_dp("one-peer-exp")),
    "torchft LocalSGD": in_plain_loop(torchft(diloco=False), gloo=False),
    "torchft DiLoCo": in_plain_loop(torchft(diloco=True), gloo=False),
}
# These average after so many steps of their own.
PERIODS = {name: PERIOD for name in PROGRAMS if name.startswith(("torch ", "torchft"))}
NEED_PEERS = {name for name in PROGRAMS if name.startswith(("Decent-DP", "torchft"))}


def rate(traces: list[Trace]) -> float:
    """Steps per second of a learner, in the time in which all of them trained."""
    begin = max(trace.stamps[0] for trace in traces)
    end = min(trace.stamps[-1] for trace in traces)
    rates = [_rate_between(trace.stamps, begin, end) for trace in traces]
    return sum(rates) / len(rates)


def _rate_between(stamps: list[float], begin: float, end: float) -> float:
    inside = [stamp for stamp in stamps if begin <= stamp <= end]
    if len(inside) < 2:  # it stepped less than once while all trained
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])
    return (len(inside) - 1) / (inside[-1] - inside[0])
