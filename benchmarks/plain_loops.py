"""Programs of a learner that train in a plain loop, most by another library."""

import site
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from benchmarks import workload
from benchmarks.feed import Feed, Task, Trace
from benchmarks.learners import PATIENCE, Place
from benchmarks.quiet import quieten
from benchmarks.workload import Batch

PEERS = Path(__file__).parents[1] / ".venv-peers"
PERIOD = 8  # local steps between two averages, in methods that have them


class Loop(NamedTuple):
    """The parts of a method in the plain loop.

    Attributes:
        step: One training step on a batch.
        shipped: The weights that the method would save.
        before_shipping: Function that its users call when training is over.
    """

    step: Callable[[Batch], object]
    shipped: Callable[[], Tensor]
    before_shipping: Callable[[], object] = lambda: None


MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Maker = Callable[[Place, nn.Module, MakeOptimizer, ExitStack], Loop]


def in_plain_loop(make: Maker, gloo: bool = True) -> Callable[[Place, Task], Trace]:
    """A program that takes every batch of the feed to a method's step."""

    def program(place: Place, task: Task) -> Trace:
        quieten()
        feed = Feed(place, task)
        if gloo:
            dist.init_process_group("gloo", timeout=PATIENCE)
        model = task.make_model(place.rank)
        with ExitStack() as stack:
            loop = make(place, model, task.make_optimizer, stack)
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


def solo(
    place: Place, model: nn.Module, optimizer_of: MakeOptimizer, stack: ExitStack
) -> Loop:
    """No communication at all."""
    step = plain_step(model, optimizer_of(model.parameters()))
    return Loop(step, lambda: workload.weights_of(model))


def decent_dp(topology: str) -> Maker:
    """Decent-DP: exchanges with one peer a step, hidden behind the next gradient."""

    def make(
        place: Place, model: nn.Module, optimizer_of: MakeOptimizer, stack: ExitStack
    ) -> Loop:
        use_peers()
        from decent_dp.ddp import DecentralizedDataParallel  # pyright: ignore
        from loguru import logger  # pyright: ignore

        logger.remove()

        def optimizer(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
            parameters = [parameter for _, parameter in named]
            return optimizer_of(parameters)

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

    def make(
        place: Place, model: nn.Module, optimizer_of: MakeOptimizer, stack: ExitStack
    ) -> Loop:
        # Half a second, which the other methods need not wait.
        from torch.distributed.algorithms.ddp_comm_hooks import (
            post_localSGD_hook as hook,
        )
        from torch.distributed.algorithms.model_averaging import averagers
        from torch.distributed.algorithms.model_averaging import (
            hierarchical_model_averager as hierarchy,
        )
        from torch.distributed.optim import PostLocalSGDOptimizer

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
        optimizer = PostLocalSGDOptimizer(optimizer_of(model.parameters()), averager)
        step = plain_step(wrapped, optimizer)
        return Loop(step, lambda: workload.weights_of(model))

    return make


def torchft(diloco: bool, period: int = PERIOD) -> Maker:
    """torchft's LocalSGD or DiLoCo: the average of all every so many steps."""

    def make(
        place: Place, model: nn.Module, optimizer_of: MakeOptimizer, stack: ExitStack
    ) -> Loop:
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
        optimizer = optimizer_of(model.parameters())
        manager = _manager(place, f"http://{place.master}:{port}", not diloco)
        stack.callback(manager.shutdown, wait=False)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        stack.enter_context(
            DiLoCo(manager, [model], optimizer, outer, sync_every=period)
            if diloco
            else LocalSGD(manager, model, optimizer, sync_every=period)
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
    manager.kept_store = store  # must live as long as its manager
    return manager


def use_peers() -> None:
    """Lets this process import the libraries that `make peers` has installed."""
    for folder in PEERS.glob("lib/python*/site-packages"):
        site.addsitedir(str(folder))


def peers_missing() -> str | None:
    """The reason why other libraries cannot be compared; None if they can."""
    if not any(PEERS.glob("lib/python*/site-packages/decent_dp")):
        return "not installed: make peers"
    return None
