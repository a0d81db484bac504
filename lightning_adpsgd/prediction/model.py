"""Predicts the samples per second of a cluster that need not exist.

`predict` trains nothing; it runs the event clock of the virtual cluster (`timeline`).
In modes that wait, it simulates all super-learners. In "async" each is as fast as on
its own, and a simulated neighbourhood (`exchanges`) gives the rate and staleness of
exchanges. The equations are in docs/prediction.md.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from lightning_adpsgd.dials import (
    DEFAULT_CPU_SHARE,
    WireDtype,
    as_dtype,
    check_number,
    check_positive,
)
from lightning_adpsgd.gossip.codecs import Lattice, make_codec, wire_dtypes
from lightning_adpsgd.gossip.forms import WORTH_BYTES
from lightning_adpsgd.prediction.exchanges import Form, observe
from lightning_adpsgd.topology.named import TopologyLike, find_topology
from lightning_adpsgd.virtual.clock import Compute, Link, StepTimes
from lightning_adpsgd.virtual.timeline import Lockstep, Scenario

Mode = Literal["sync", "delay_by_one", "async", "allreduce"]
"""Communication modes of the strategies, and "allreduce": DDP over all learners."""

_DRAWS = 2000  # steps of a super-learner on its own, of which the mean is taken
_SETTLED, _MEASURED = 20, 40  # rounds in lockstep: left out at first, then measured
_LEARNER_ROUNDS = 8000  # rounds times learners; few learners measure more rounds
_PARTS = 1 << 30  # a share is found to one of so many parts


@dataclass(frozen=True)
class Workload:
    """The computation and traffic of a learner.

    Args:
        weight_bytes: bytes of the model in float32.
        local_batch_size: number of samples in a step of one learner.
        wire_dtype: dtype in which "async" sends a weight, or its name; None: float32.
            "auto": the one of float32, int8 and int4 that the engine settles on
            (`gossip.forms.FormChoice`).
        backward: share of a step's time in which gradients become ready, in [0, 1].

    Raises:
        TypeError: A size is no number.
        ValueError: A size is not positive, or `backward` or the dtype out of bounds.
    """

    weight_bytes: float
    local_batch_size: int = 1
    wire_dtype: WireDtype | Literal["auto"] | None = "auto"
    backward: float = 2 / 3

    def __post_init__(self) -> None:
        as_dtype(self.wire_dtype)
        check_positive("weight_bytes", self.weight_bytes)
        check_positive("local_batch_size", self.local_batch_size)
        check_number("backward", self.backward)
        if not 0 <= self.backward <= 1:
            raise ValueError(f"`backward` must be in [0, 1], got {self.backward}")


@dataclass(frozen=True)
class Costs:
    """The processor time of communication, by default none.

    Unless a description says otherwise, a cost is in seconds per byte of the weights.

    Args:
        round: work of a synchronous round that does not run beside its links.
        gradient: work of a DDP step beside neither its links nor the backward pass.
        exchange: arithmetic of an exchange in float32, its bound on a fast link.
        lattice: arithmetic of an exchange that sends a weight in 8 or 4 bits.
        merge: work of a step boundary with a merge.
        step: extra seconds per step (not per byte) while learners that share cores
            compute at the same time.
        work: processor work of an exchange in float32 at one end, `exchange` included,
            in addition to training. All but `exchange` is in proportion to the bytes
            sent.
        cores: number of cores (not seconds) of a learner; a fraction if it shares them.
        busy: average number of these cores that a step keeps busy.
        machine_cores: number of cores of the machine, including other learners'.
    """

    round: float = 0.0
    gradient: float = 0.0
    exchange: float = 0.0
    lattice: float = 0.0
    merge: float = 0.0
    step: float = 0.0
    work: float = 0.0
    cores: float = 1.0
    busy: float = 1.0
    machine_cores: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """The expected speed in the steady state.

    Attributes:
        samples_per_second: samples of all learners per second.
        steps_per_second: steps of a learner per second, on average.
        exposed: share of the time for which a learner waits for communication and, in
            modes that wait, for slower learners.
        exchanges_per_step: of a super-learner; the number of rounds in modes that wait.
        staleness: share of exchanges or rounds by age, the number of optimizer steps
            from reading the weights to the merge.
        wire_dtype: dtype in which a weight is sent.
    """

    samples_per_second: float
    steps_per_second: float
    exposed: float
    exchanges_per_step: float
    staleness: dict[int, float] = field(default_factory=dict)
    wire_dtype: torch.dtype = torch.float32

    def hours(self, num_samples: float) -> float:
        """The hours for a total number of samples, over all epochs."""
        return num_samples / self.samples_per_second / 3600

    @property
    def mean_staleness(self) -> float:
        """The mean age in optimizer steps; NaN if nothing was exchanged."""
        total = sum(self.staleness.values())
        weighted = sum(steps * share for steps, share in self.staleness.items())
        return weighted / total if total else math.nan


def predict(
    workload: Workload,
    num_super_learners: int,
    super_learner_size: int = 1,
    *,
    compute: Compute,
    link: Link | None = None,
    inner_link: Link | None = None,
    topology: TopologyLike = "ring",
    communication: Mode = "async",
    gossip_every: int = 1,
    cpu_share: float = DEFAULT_CPU_SHARE,
    costs: Costs | None = None,
    seed: int = 0,
) -> Prediction:
    """Predicts the speed of S super-learners of N learners.

    The other options are those of `VirtualCluster`.

    Args:
        num_super_learners: S.
        super_learner_size: N.
        communication: "sync", "delay_by_one" or "async" as for the strategies, or
            "allreduce", which is DDP over all learners.
        cpu_share: largest share of the training time for exchanges, in "async".

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of bounds, or does not go with another.
    """
    _check(workload, communication, cpu_share)
    costs = costs or Costs()
    scenario = Scenario(
        topology=find_topology(topology),
        num_super_learners=num_super_learners,
        super_learner_size=super_learner_size,
        gossip_every=gossip_every,
        compute=compute,
        link=link or Link(),
        inner_link=inner_link or Link(),
        seed=seed,
        backward=workload.backward,
        gradient_seconds=costs.gradient * workload.weight_bytes,
    )
    if communication == "async":
        return _without_waiting(workload, scenario, costs, cpu_share)
    if communication == "allreduce" or num_super_learners == 1:
        scenario = _as_one(workload, scenario)
    return _in_step(workload, scenario, costs, communication)


def _check(workload: Workload, communication: str, cpu_share: float) -> None:
    if communication not in get_args(Mode):
        raise ValueError(
            f"`communication` must be one of {get_args(Mode)}, got {communication!r}"
        )
    if workload.wire_dtype not in (None, "auto") and communication != "async":
        raise ValueError(
            '`wire_dtype` applies to `communication="async"` alone, got '
            f"{workload.wire_dtype} with {communication!r}"
        )
    if not 0 < cpu_share <= 1:
        raise ValueError(f"`cpu_share` must be in (0, 1], got {cpu_share}")


# --- modes that wait


def _in_step(
    workload: Workload, scenario: Scenario, costs: Costs, mode: Mode
) -> Prediction:
    num_learners = scenario.num_learners
    boundary = _boundary_seconds(workload, scenario, costs)
    hidden = mode == "delay_by_one"
    rate = 1 / _step_seconds(workload, scenario, hidden, boundary)
    slow = scenario.compute.slow.values()
    factor = (num_learners - len(slow) + sum(slow)) / num_learners
    computed = scenario.compute.seconds * factor
    work = boundary
    if mode == "allreduce" and num_learners > 1:
        work += scenario.gradient_seconds
    if mode == "allreduce":
        rounds = float(scenario.num_learners > 1)
    else:
        rounds = (scenario.num_super_learners > 1) / scenario.gossip_every
    return Prediction(
        samples_per_second=rate * num_learners * workload.local_batch_size,
        steps_per_second=rate,
        exposed=max(0.0, 1 - (computed + work) * rate),
        exchanges_per_step=rounds,
        staleness={int(hidden): 1.0} if rounds else {},
    )


def _step_seconds(
    workload: Workload, scenario: Scenario, hidden: bool, boundary: float
) -> float:
    """The mean seconds of a step of the slowest super-learner."""
    num_bytes = workload.weight_bytes
    ends = Lockstep(scenario, num_bytes, hidden, boundary_seconds=boundary)
    learners = scenario.num_learners
    most = _MEASURED * max(1, _LEARNER_ROUNDS // (_MEASURED * learners))
    settled, measured = (scenario.gossip_every * n for n in (_SETTLED, most))
    first, last = itertools.islice(ends, settled, settled + measured + 1, measured)
    return (max(last) - max(first)) / measured


def _boundary_seconds(workload: Workload, scenario: Scenario, costs: Costs) -> float:
    """The mean processor work of a step boundary, with or without a round."""
    if scenario.num_learners == 1:
        return 0.0
    if scenario.num_super_learners == 1:
        return costs.step
    return costs.round * workload.weight_bytes / scenario.gossip_every + costs.step


def _as_one(workload: Workload, scenario: Scenario) -> Scenario:
    """All learners as one super-learner, with DDP's rings inside and across."""
    num, size = scenario.num_super_learners, scenario.super_learner_size
    num_bytes = workload.weight_bytes
    seconds = scenario.inner_link.allreduce_seconds(num_bytes, size)
    seconds += scenario.link.allreduce_seconds(num_bytes / size, num)
    turns = max(1, 2 * (num * size - 1))
    return replace(
        scenario,
        topology=find_topology("ring"),
        num_super_learners=1,
        super_learner_size=num * size,
        inner_link=Link(latency=seconds / turns),
        link=Link(),
    )


# --- the mode in which no learner waits


def _without_waiting(
    workload: Workload, scenario: Scenario, costs: Costs, cpu_share: float
) -> Prediction:
    num_bytes = workload.weight_bytes
    scenario, costs = _with_enough_cores(scenario, costs)
    gradients = _alone(scenario, num_bytes)
    mean = sum(gradients) / len(gradients)
    forms = [*_forms(workload, scenario.super_learner_size, costs)]
    form, seen = observe(forms, scenario, num_bytes, gradients)
    merge = seen.merging * costs.merge * num_bytes
    work = form.work / scenario.super_learner_size  # each exchanges its part

    def taken(share: float) -> float:
        worked = share * seen.exchanges * work
        return share * merge + _taken_by_exchanges(worked, costs, mean)

    kept = 1.0 if cpu_share == 1 else _kept(taken, cpu_share * mean)
    added = taken(kept)
    # The same without links: the rest of a gradient is exposed.
    computed = _alone(replace(scenario, inner_link=Link()), num_bytes)
    rate = sum(1 / (g + added) for g in gradients) / len(gradients)
    exposed = [(g - c) / (g + added) for g, c in zip(gradients, computed, strict=True)]
    learners = scenario.num_learners
    return Prediction(
        samples_per_second=rate * learners * workload.local_batch_size,
        steps_per_second=rate,
        exposed=sum(exposed) / len(exposed),
        exchanges_per_step=kept * seen.exchanges,
        staleness=seen.staleness,
        wire_dtype=form.dtype,
    )


def _with_enough_cores(scenario: Scenario, costs: Costs) -> tuple[Scenario, Costs]:
    """The same, but steps take longer if they need more cores than a learner has."""
    times = max(1.0, costs.busy / costs.cores)
    compute = replace(scenario.compute, seconds=times * scenario.compute.seconds)
    return replace(scenario, compute=compute), replace(costs, busy=costs.busy / times)


def _alone(scenario: Scenario, num_bytes: float) -> list[float]:
    """The mean seconds of a gradient of each super-learner, on its own clock."""
    size, compute = scenario.super_learner_size, scenario.compute
    if size == 1:  # the mean is `compute.seconds`, and need not be measured
        compute = replace(compute, spread=0.0)
    num_steps = _DRAWS if compute.spread else 1

    def mean_of(index: int) -> float:
        times, end = StepTimes(compute, scenario.seed), 0.0
        for _ in range(num_steps):
            end = scenario.gradient_end(times, index, end, num_bytes)
        return end / num_steps

    slow = {learner // size for learner in compute.slow}
    # One measurement serves all super-learners without a slow learner.
    usual = mean_of(next(i for i in itertools.count() if i not in slow))
    numbers = range(scenario.num_super_learners)
    return [mean_of(i) if i in slow else usual for i in numbers]


def _kept(taken: Callable[[float], float], most: float) -> float:
    """The share of exchanges and merges that takes at most these seconds of a step."""

    def is_too_much(parts: int) -> bool:
        return taken(parts / _PARTS) > most

    return bisect_left(range(1, _PARTS + 1), True, key=is_too_much) / _PARTS


def _taken_by_exchanges(work: float, costs: Costs, step: float) -> float:
    """The seconds that exchanges take from training, as `CoreShare` counts them."""
    busy, cores = costs.busy * step + work, costs.cores * step
    machine = max(costs.cores, costs.machine_cores, 1.0)
    # The probability that all are busy, if each core is so busy.
    all_are_busy = min(busy / cores, 1.0) ** machine
    return max(busy - cores, work * all_are_busy)


def _forms(workload: Workload, size: int, costs: Costs) -> Iterator[Form]:
    """The forms that the engine chooses from, the widest first."""
    weight_bytes = workload.weight_bytes
    dtypes = wire_dtypes(as_dtype(workload.wire_dtype))
    if weight_bytes / size < WORTH_BYTES:  # each learner exchanges its shard
        dtypes = dtypes[:1]
    for dtype in dtypes:
        codec = make_codec(dtype, torch.float32)
        sent = codec.dtype.itemsize * codec.length(math.ceil(weight_bytes / 4))
        is_lattice = isinstance(codec, Lattice)
        arithmetic = (costs.lattice if is_lattice else costs.exchange) * weight_bytes
        network = max(0.0, costs.work - costs.exchange) * min(sent, weight_bytes)
        yield Form(dtype or torch.float32, sent, arithmetic, arithmetic + network)
