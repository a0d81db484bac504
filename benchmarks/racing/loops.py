"""Methods in a plain loop: the step of each, and the way survivors continue.

A loop's step costs a per cent or two more or less than a Trainer's. Where a learner is
killed, those that are left make a new process group at once and continue, which no
launcher does as fast.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import plain_loops
from benchmarks.learners import Place
from benchmarks.quiet import quieten
from benchmarks.racing.course import Course, Finish, Heat, weights_of
from benchmarks.racing.problems import MOMENTUM, Paced
from benchmarks.workload import Batch, loss

# Longer than the others wait for one that is slow, at periods that are worth a try.
PATIENCE, UNTIL_NOTICED = timedelta(seconds=60), timedelta(seconds=3)
OUTER_RATE = 0.7  # of DiLoCo, with Nesterov's momentum, as its authors recommend
POWER_RANK, PLAIN_STEPS = 2, 10  # of PowerSGD: its rank, and steps before it begins
ONE_BUCKET_MB = 1000.0
"""For PowerSGD, which waits for a collective in one of Gloo's two threads. With two
buckets at a time, no thread would be left for the collectives."""


class Loop(NamedTuple):
    """The parts of a method.

    Attributes:
        step: One training step on a batch.
        close: Function for the end, after the last step.
    """

    step: Callable[[Batch], object]
    close: Callable[[], object] = lambda: None


Maker = Callable[[Course, ExitStack], Loop]
Program = Callable[[Place, Heat], Finish]


def in_loop(make: Maker, gloo: bool = True) -> Program:
    """A program that takes every batch of the course to a method's step."""

    def program(place: Place, heat: Heat) -> Finish:
        quieten()
        course = Course(place, heat)
        if gloo:
            dist.init_process_group("gloo", timeout=PATIENCE)
            if heat.victim is not None:
                _set_pg_timeout(UNTIL_NOTICED)
        with ExitStack() as stack:
            method = make(course, stack)
            for batch in course:
                course.tick()
                if not done(course, partial(method.step, batch)):
                    method = make(course, stack)
            if not done(course, method.close):
                make(course, stack).close()
            course.stop()
            finish = course.finish()
            course.meetings.leave()
        return finish

    return program


def done(course: Course, act: Callable[[], object]) -> bool:
    """Whether an action succeeded; if a learner died in it, the others regrouped."""
    try:
        act()
    except RuntimeError:
        if course.heat.victim is None:
            raise
        regroup(course, course.heat.victim)
        return False
    return True


def regroup(course: Course, victim: int) -> None:
    """Makes the survivors agree on their step; a step in which one died is lost."""
    dist.destroy_process_group()
    left = [rank for rank in range(course.place.world_size) if rank != victim]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{course.place.master}:{course.place.port + 7}",
        rank=left.index(course.place.rank),
        world_size=len(left),
        timeout=PATIENCE,
    )
    given = torch.tensor(course.given)
    dist.all_reduce(given, dist.ReduceOp.MAX)
    course.given = int(given)


def gradient_step(course: Course, model: nn.Module) -> Callable[[Batch], None]:
    """Computes the gradient, waits for the rest of the step, and updates."""
    optimizer = course.optimizer

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        course.pace.until(1.0)
        optimizer.step()

    return step


def solo(course: Course, stack: ExitStack) -> Loop:
    """No communication: the models whose mean is taken at the end."""
    return Loop(local_step(course))


def local_step(course: Course) -> Callable[[Batch], None]:
    """The step of a learner by itself."""
    return gradient_step(course, course.model)


def ddp(
    register: Callable[[DistributedDataParallel], None] | None = None,
    bucket_mb: float | None = None,
) -> Maker:
    """torch's DDP, with a hook if there is one."""

    def make(course: Course, stack: ExitStack) -> Loop:
        wrapped = DistributedDataParallel(course.model, bucket_cap_mb=bucket_mb)  # pyright: ignore
        if register is not None:
            register(wrapped)
        step = gradient_step(course, wrapped)
        return Loop(counted(course, step))

    return make


def hsdp(course: Course, stack: ExitStack) -> Loop:
    """FSDP2 over all: shards within a host, an all-reduce between hosts each step."""
    shard(course.model, _mesh(course))
    return Loop(counted(course, local_step(course)))


def within_hosts(course: Course, stack: ExitStack) -> Loop:
    """FSDP2 of the learners of each host, without communication between hosts."""
    shard(course.model, _mesh(course)["shard"])
    return Loop(local_step(course))


def _mesh(course: Course) -> DeviceMesh:
    per_host = course.place.per_host
    sizes = course.place.world_size // per_host, per_host
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def shard(model: Paced, mesh: DeviceMesh) -> None:
    """Leaves each learner its part of every layer."""
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)


def counted(
    course: Course, step: Callable[[Batch], None], each: float = 1.0
) -> Callable[[Batch], None]:
    """A step with an exchange, or with a part of one."""

    def with_exchange(batch: Batch) -> None:
        step(batch)
        course.exchanges += each

    return with_exchange


def with_bf16(wrapped: DistributedDataParallel) -> None:
    """Gradients travel in bfloat16."""
    wrapped.register_comm_hook(None, bf16_compress_hook)


def with_power_sgd(wrapped: DistributedDataParallel) -> None:
    """Gradients travel as products of two thin matrices."""
    state = powerSGD_hook.PowerSGDState(
        None, POWER_RANK, start_powerSGD_iter=PLAIN_STEPS
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


Average = Callable[[Course], Callable[[], None]]


def every(average: Average) -> Maker:
    """Local steps, and an average of some kind after every `heat.option` of them."""

    def counted_by_step(course: Course) -> Callable[[], int]:
        numbers, period = itertools.count(1), round(course.heat.option)
        return lambda: int(next(numbers) % period == 0)

    return in_rounds(average, counted_by_step)


def timed(average: Average) -> Maker:
    """Local steps, and averages at the same times, however many steps each has made.

    A round lasts `heat.option` steps of the fastest learner. Where one is slow, the
    others wait for the rest of its step, and not for as many steps as they make.
    """

    def counted_by_time(course: Course) -> Callable[[], int]:
        return partial(course.rounds_ended, round(course.heat.option))

    return in_rounds(average, counted_by_time)


def in_rounds(
    average: Average, counter: Callable[[Course], Callable[[], int]]
) -> Maker:
    """Local steps, and after each as many averages as it has ended rounds."""

    def make(course: Course, stack: ExitStack) -> Loop:
        step, take, num_ended = local_step(course), average(course), counter(course)
        ended = 0

        def with_average(batch: Batch) -> None:
            nonlocal ended
            step(batch)
            ended = num_ended()
            for _ in range(ended):
                take()
                course.exchanges += 1

        def close() -> None:
            if not ended:  # else the last step ended a round
                take()

        return Loop(with_average, close)

    return make


def mean_of_all(weights: Tensor) -> Tensor:
    """The mean of a vector over all learners; it is overwritten."""
    dist.all_reduce(weights)
    return weights.div_(dist.get_world_size())


def plain_average(course: Course) -> Callable[[], None]:
    """Local SGD: all take the mean."""
    return lambda: set_weights(course.model, mean_of_all(weights_of(course.model)))


def outer_step(course: Course) -> Callable[[], None]:
    """DiLoCo: the mean update of all is one gradient of an outer optimizer."""
    # Equal at the start; after a death, each has continued alone for a while.
    anchor = nn.Parameter(mean_of_all(weights_of(course.model)))
    outer = torch.optim.SGD([anchor], OUTER_RATE, momentum=MOMENTUM, nesterov=True)

    def take() -> None:
        anchor.grad = anchor.detach() - mean_of_all(weights_of(course.model))
        outer.step()
        set_weights(course.model, anchor.detach())

    return take


def set_weights(model: nn.Module, weights: Tensor) -> None:
    """Copies a vector into the parameters."""
    with torch.no_grad():
        offset = 0
        for parameter in model.parameters():
            part = weights[offset : offset + parameter.numel()]
            parameter.copy_(part.view_as(parameter))
            offset += parameter.numel()


def random_share(course: Course, stack: ExitStack) -> Loop:
    """After each step, takes the mean of a random share of the weights (SPARTA)."""
    step, share = local_step(course), course.heat.option
    generator = torch.Generator().manual_seed(course.heat.seed)

    def with_average(batch: Batch) -> None:
        step(batch)
        weights = weights_of(course.model)
        num = max(1, round(share * weights.numel()))
        # A weight that is drawn twice gets the same average twice.
        chosen = torch.randint(weights.numel(), (num,), generator=generator)
        weights[chosen] = mean_of_all(weights[chosen])
        set_weights(course.model, weights)

    return Loop(counted(course, with_average, share))


def borrowed(maker: Callable[[int], plain_loops.Maker]) -> Maker:
    """A method of another library, with this course's optimizer and pace.

    Args:
        maker: Function that makes the method, from the steps between its averages.
    """

    def make(course: Course, stack: ExitStack) -> Loop:
        period = max(1, round(course.heat.option))
        loop = maker(period)(course.place, course.model, course.make_optimizer, stack)

        def step(batch: Batch) -> None:
            loop.step(batch)
            course.pace.until(1.0)

        return Loop(counted(course, step, 1 / period))

    return make
