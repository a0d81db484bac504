"""The methods of the race: this package's through a Trainer, the others in a loop."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import plain_loops
from benchmarks.learners import Meetings, Place, end_with_parent
from benchmarks.plain_loops import decent_dp, torchft
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.racing import loops
from benchmarks.racing.course import Course, Finish, Heat
from benchmarks.racing.floor import train_floor
from benchmarks.racing.loops import Program, in_loop
from benchmarks.workload import Batch, loss
from lightning_adpsgd import HADPSGDStrategy

ISLANDS_PORT = 29500
TOKEN = "only for a benchmark on one machine"
SHORTEST_PERIOD, LONGEST_PERIOD = 8, 512


@dataclass(frozen=True)
class Entrant:
    """A method as a row of the report.

    Args:
        program: Program of each learner.
        is_ours: Whether it is a setting of this package.
        options: Bounds of its own setting, which is tuned by factors of two, and the
            start of the search; None: it has none.
        survives: Whether the others continue when a learner dies.
        own_pace: Whether learners make different numbers of steps.
        needs_peers: Whether it needs the libraries that `make peers` installs.
        is_sharded: Whether the learners of a host hold one model together.
    """

    program: Program
    is_ours: bool = False
    options: tuple[float, float, float] | None = None
    survives: bool = True
    own_pace: bool = False
    needs_peers: bool = False
    is_sharded: bool = False

    @property
    def has_period(self) -> bool:
        """Whether its setting is a number of steps between averages."""
        return self.options is not None and self.options[0] > 1


class Racer(L.LightningModule):
    """The course as a LightningModule."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self.model, self._course = course.model, course

    @override
    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, HADPSGDStrategy) and strategy.is_sharded:
            loops.shard(self.model, strategy.device_mesh["data_parallel"])

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._course, batch_size=None)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._course.tick()
        return loss(self.model, batch)

    @override
    def on_after_backward(self) -> None:
        self._course.pace.until(1.0)

    @override
    def on_train_end(self) -> None:
        # The strategy has taken the mean of all by now, which counts as in a loop.
        self._course.stop()

    @override
    def on_train_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, HADPSGDStrategy):
            found = strategy.gossip_statistics()
            self._course.exchanges = 0 if found is None else found.exchanges

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._course.optimizer


def ours(is_sharded: bool = False, **dials: Any) -> Entrant:
    """A setting of this package's strategy, with one super-learner on each host."""

    def program(place: Place, heat: Heat) -> Finish:
        quieten()
        course = Course(place, heat)
        trainer = quiet_trainer(
            HADPSGDStrategy(**{**_FLAT, **dials, **_where(place, heat)}),
            devices=place.per_host,
            num_nodes=1
            if heat.victim is not None
            else place.world_size // place.per_host,
        )
        trainer.fit(Racer(course))
        # After the fit: the weights are the mean of all.
        finish = course.finish()
        course.meetings.leave()
        return finish

    return Entrant(program, is_ours=True, own_pace=True, is_sharded=is_sharded)


_FLAT = {"topology": "ring", "communication": "async", "super_learner_size": 1}


def _where(place: Place, heat: Heat) -> dict[str, Any]:
    """Where a learner may be killed, each is an island: no one's death ends the job."""
    if heat.victim is None:
        return {}
    own = Place(0, 1, 1, place.address, place.address, place.port)
    own.set_environment()
    os.environ["LIGHTNING_ADPSGD_TOKEN"] = TOKEN
    # Hosts are network namespaces of this machine.
    os.environ["LIGHTNING_ADPSGD_UNPROTECTED"] = "1"
    return {"islands": f"tcp://{place.master}:{ISLANDS_PORT}"}


def peer(maker: Callable[[int], plain_loops.Maker], gloo: bool, **more: Any) -> Entrant:
    """A method of a library that `make peers` installs; a death ends its job."""
    program = in_loop(loops.borrowed(maker), gloo)
    return Entrant(program, survives=False, needs_peers=True, **more)


def run(entrant: Entrant, place: Place, heat: Heat) -> Finish | None:
    """Runs a method as one learner; returns None in the one that is killed."""
    if place.rank != heat.victim:
        return entrant.program(place, heat)
    if child := os.fork():
        _kill_half_way(child, place, heat)
        return None
    end_with_parent()
    entrant.program(place, heat)
    os._exit(0)


def _kill_half_way(child: int, place: Place, heat: Heat) -> None:
    meetings = Meetings(place)
    meetings.store.wait(["start/go"])
    time.sleep(heat.seconds / 2)
    if os.waitpid(child, os.WNOHANG)[0]:
        return  # It had ended: a calibration was far too low.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # In place of the dead learner, so that no other waits for it at the end.
    meetings.leave()


PERIODS = (SHORTEST_PERIOD, 64, LONGEST_PERIOD)
SHARDED = "hadpsgd, sharded"
DEFAULTS = ("adpsgd", "adpsgd_random", SHARDED)
AT_THE_END, FLOOR = "one average at the end", "floor"
ENTRANTS: Mapping[str, Entrant] = {
    "adpsgd": ours(),
    "adpsgd_random": ours(topology="random_ring"),
    "adpsgd, float32": ours(wire_dtype=torch.float32),
    "adpsgd, random pairs": ours(topology="random_pairs"),
    "adpsgd_random, int8": ours(topology="random_ring", wire_dtype=torch.int8),
    "adpsgd_random, bf16": ours(topology="random_ring", wire_dtype=torch.bfloat16),
    "adpsgd_random, cpu_share=1": ours(topology="random_ring", cpu_share=1.0),
    "rdpsgd": ours(topology="complete", communication="ready_pairs"),
    "ddp": Entrant(in_loop(loops.ddp())),
    "ddp, bf16": Entrant(in_loop(loops.ddp(loops.with_bf16))),
    "ddp, PowerSGD": Entrant(
        in_loop(loops.ddp(loops.with_power_sgd, loops.ONE_BUCKET_MB))
    ),
    "local SGD": Entrant(in_loop(loops.every(loops.plain_average)), options=PERIODS),
    "local SGD, timed rounds": Entrant(
        in_loop(loops.timed(loops.plain_average)),
        options=PERIODS,
        # Survivors have made different numbers of steps, which `regroup` makes equal.
        survives=False,
        own_pace=True,
    ),
    "DiLoCo": Entrant(in_loop(loops.every(loops.outer_step)), options=PERIODS),
    "random share": Entrant(in_loop(loops.random_share), options=(0.0025, 0.01, 0.32)),
    "Decent-DP ring": peer(lambda _: decent_dp("ring"), gloo=True),
    "Decent-DP one-peer-exp": peer(lambda _: decent_dp("one-peer-exp"), gloo=True),
    "torchft LocalSGD": peer(partial(torchft, False), gloo=False, options=PERIODS),
    "torchft DiLoCo": peer(partial(torchft, True), gloo=False, options=PERIODS),
    AT_THE_END: Entrant(in_loop(loops.solo, gloo=False), own_pace=True),
    SHARDED: ours(is_sharded=True, super_learner_size=2, inside="model_parallel"),
    "HSDP": Entrant(in_loop(loops.hsdp), is_sharded=True),
    "FSDP2 apart, one average at the end": Entrant(
        in_loop(loops.within_hosts), own_pace=True, is_sharded=True
    ),
    FLOOR: Entrant(lambda place, heat: train_floor(heat)),
}
