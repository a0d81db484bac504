"""How fast training will be: samples per second of a cluster that need not exist.

`predict` runs no model. In the modes that keep step it follows the time of every
super-learner, all of them at once as rows of a tensor; without synchronisation nobody
waits, so that the speed is arithmetic, and the event clock of `timeline` is asked only
how often exchanges end and how stale they are. The equations are in docs/prediction.md.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_adpsgd.gossip.protocol import due_round
from lightning_adpsgd.gossip.wire import make_codec
from lightning_adpsgd.topology import TOPOLOGIES, TopologyLike, find_topology
from lightning_adpsgd.virtual.clock import Compute, Link, check_positive
from lightning_adpsgd.virtual.timeline import (
    Asynchronous,
    Begun,
    Ended,
    Event,
    Exchange,
    Scenario,
    Stepped,
    parts_of,
)

Mode = Literal["sync", "delay_by_one", "async", "allreduce"]
"""The strategies' communications, and their control: gradients reduced by all (DDP)."""

BUCKET_BYTES = 25 << 20
"""Of gradients that torch's DDP reduces together while the rest is computed."""

_LOCAL = 32  # super-learners: an exchange knows neighbours, not how many others are
_DRAWS = 4096  # of a super-learner's slowest learner, for its mean
_MEASURED = 200  # steps of a random timeline
_SETTLED, _FURTHEST = 50, 6000  # and before them, the latter with a straggler far away
_SAMPLED_ROUNDS = 16  # of a topology that never repeats, used again and again


@dataclass(frozen=True)
class Workload:
    """What a learner computes and sends.

    Args:
        weight_bytes: Of the model, in float32.
        local_batch_size: Samples of a step of one learner.
        wire_dtype: What travels in "async"; none: the weights as they are.
        backward: Share of a step's time in which gradients become ready.
        update: Share of it after the gradients, beside which nothing is hidden.

    Raises:
        ValueError: Bytes or samples are not positive, or the shares more than a step.
    """

    weight_bytes: float
    local_batch_size: int = 1
    wire_dtype: torch.dtype | None = None
    backward: float = 2 / 3
    update: float = 0.0

    def __post_init__(self) -> None:
        check_positive("weight_bytes", self.weight_bytes)
        check_positive("local_batch_size", self.local_batch_size)
        shares = (self.backward, self.update)
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError(
                f"`backward` and `update` are shares of a step, got {shares}"
            )

    @property
    def message_bytes(self) -> float:
        """Of the weights as they travel in an exchange."""
        codec = make_codec(self.wire_dtype, torch.float32)
        return codec.dtype.itemsize * codec.length(math.ceil(self.weight_bytes / 4))


@dataclass(frozen=True)
class Costs:
    """What communication takes of the processor, in seconds per byte of the weights.

    Args:
        round: Of a round in which all wait: what its links do not hide.
        gradient: Of a DDP step: what links and the backward pass do not hide.
        exchange: Of the arithmetic of an exchange, which a fast link waits for.
        merge: Of a step boundary that has something to merge.
        step: Seconds, of no bytes, by which a step is longer where learners that share
            cores make it at the same moment.
        work: Of all that an exchange takes at one end, beside training.
        cores: No bytes either: that a learner has, those that it shares in part.
        busy: Nor this: how many of them a step keeps busy, on average.
        machine_cores: Nor this: of its machine, those of other learners too.
    """

    round: float = 0.0
    gradient: float = 0.0
    exchange: float = 0.0
    merge: float = 0.0
    step: float = 0.0
    work: float = 0.0
    cores: float = 1.0
    busy: float = 1.0
    machine_cores: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """What to expect, once the start is over.

    Attributes:
        samples_per_second: Of all learners.
        steps_per_second: Of a learner, on average.
        exposed: Share of the time in which a learner waits for communication or, where
            learners wait for one another, for slower ones.
        exchanges_per_step: That a super-learner takes part in; rounds where all wait.
        staleness: Optimizer steps between what was read and its merge, and the share
            of exchanges or rounds that were so old.
    """

    samples_per_second: float
    steps_per_second: float
    exposed: float
    exchanges_per_step: float
    staleness: dict[int, float] = field(default_factory=dict)

    def hours(self, num_samples: float) -> float:
        """Until so many samples are seen, over all epochs."""
        return num_samples / self.samples_per_second / 3600

    @property
    def mean_staleness(self) -> float:
        """In optimizer steps; NaN where nothing was exchanged."""
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
    cpu_share: float = 0.01,
    costs: Costs | None = None,
    seed: int = 0,
) -> Prediction:
    """The speed of S super-learners of N learners.

    Args:
        workload: What each learner computes and sends.
        num_super_learners: S.
        super_learner_size: N.
        compute: How long a step of a learner takes: forward, backward and update.
        link: Of each learner, to its counterparts in other super-learners.
        inner_link: Of each learner, to the others of its super-learner.
        topology: Who averages with whom.
        communication: As of the strategies; "allreduce" is DDP over all learners.
        gossip_every: Optimizer steps per round.
        cpu_share: In "async", the share of the training's time that exchanges may take.
        costs: Of the processor.
        seed: Of random times and topologies.

    Raises:
        ValueError: An argument is out of its bounds, or has no meaning with another.
    """
    _check(workload, compute, communication, cpu_share)
    scenario = Scenario(
        topology=find_topology(topology),
        num_super_learners=num_super_learners,
        super_learner_size=super_learner_size,
        gossip_every=gossip_every,
        compute=compute,
        link=link or Link(),
        inner_link=inner_link or Link(),
        seed=seed,
    )
    costs = costs or Costs()
    if communication == "async":
        return _without_waiting(workload, scenario, costs, cpu_share)
    return _in_step(workload, scenario, costs, communication)


def overlapped(allreduce: Tensor, backward: Tensor, num_bytes: float) -> Tensor:
    """Seconds by which a DDP step is longer than its computation.

    Of K buckets of gradients, number k is ready after k/K of the backward pass, and
    its all-reduce waits for those before it.

    Args:
        allreduce: Seconds of all buckets.
        backward: Seconds of the backward pass, of as many steps.
        num_bytes: Of the gradients.
    """
    buckets = math.ceil(num_bytes / BUCKET_BYTES)
    bound_by_links = backward / buckets + allreduce
    bound_by_compute = backward + allreduce / buckets
    return torch.maximum(bound_by_links, bound_by_compute) - backward


def _check(
    workload: Workload, compute: Compute, communication: str, cpu_share: float
) -> None:
    if communication not in get_args(Mode):
        raise ValueError(
            f"`communication` must be one of {get_args(Mode)}, got {communication!r}"
        )
    if workload.wire_dtype is not None and communication != "async":
        raise ValueError(
            '`wire_dtype` applies to `communication="async"` alone, got '
            f"{workload.wire_dtype} with {communication!r}"
        )
    if not 0 < cpu_share <= 1:
        raise ValueError(f"`cpu_share` must be in (0, 1], got {cpu_share}")
    if compute.pauses:
        raise ValueError(
            "`pauses` have no place in a prediction, which is of a steady state; "
            "`VirtualCluster` simulates them"
        )


class _Steps:
    """Draws what the gradients of all super-learners take, [S] at a time.

    Attributes:
        work: Mean of what their learners compute, waits inside not counted.
    """

    def __init__(self, workload: Workload, scenario: Scenario, costs: Costs) -> None:
        self._workload, self._costs = workload, costs
        self._compute, self._num = scenario.compute, scenario.super_learner_size
        shape = (scenario.num_super_learners, scenario.super_learner_size)
        factors = torch.ones(shape, dtype=torch.float64)
        for learner, factor in scenario.compute.slow.items():
            if learner < factors.numel():
                factors.view(-1)[learner] = factor
        self._factors = factors
        self._generator = torch.Generator().manual_seed(scenario.seed)
        seconds = scenario.inner_link.allreduce_seconds(
            workload.weight_bytes, self._num
        )
        self._allreduce = torch.tensor(seconds, dtype=torch.float64)
        self.work = scenario.compute.seconds * float(factors.mean())

    @property
    def vary(self) -> bool:
        """Whether one step differs from the next."""
        return self._compute.spread > 0

    def computed(self) -> Tensor:
        """Of the slowest learner of each super-learner, [S]."""
        return self._compute.seconds * self._drawn(self._factors).amax(1)

    def gradient(self) -> Tensor:
        """The same with the all-reduce inside the super-learner, [S]."""
        slowest = self.computed()
        return slowest + self.inside(slowest)

    def inside(self, slowest: Tensor) -> Tensor:
        """What the all-reduce inside adds to steps of so many seconds."""
        if self._num == 1:
            return torch.zeros_like(slowest)
        bytes_ = self._workload.weight_bytes
        backward = slowest * self._workload.backward
        waited = overlapped(self._allreduce, backward, bytes_)
        return waited + self._costs.gradient * bytes_

    def means(self) -> Tensor:
        """Mean seconds of `computed`, [S], from draws that those of a kind share."""
        kinds, which = self._factors.unique(dim=0, return_inverse=True)
        count = _DRAWS if self.vary else 1
        drawn = self._drawn(kinds.expand(count, *kinds.shape)).amax(2).mean(0)
        if self.vary and self._num == 1:  # the mean is known
            drawn = kinds[:, 0]
        return self._compute.seconds * drawn[which]

    def _drawn(self, factors: Tensor) -> Tensor:
        spread = self._compute.spread
        if not spread:
            return factors
        normal = torch.randn(
            factors.shape, generator=self._generator, dtype=torch.float64
        )
        # The mean of exp(N(m, s²)) is exp(m + s²/2).
        return factors * torch.exp(spread * normal - spread**2 / 2)


# --- where all wait


class _Meeting(NamedTuple):
    """Who waits for whom in a round, and for how long a message crosses.

    Attributes:
        others: Numbers of those that each meets and its own, [S, d]; none: of all.
        seconds: Of the crossing, [S].
    """

    others: Tensor | None
    seconds: Tensor

    def latest(self, begins: Tensor) -> Tensor:
        """Of each one's meeting, [S] of [S]."""
        if self.others is None:
            return begins.amax().expand(len(begins))
        return begins[self.others].amax(1)


def _in_step(
    workload: Workload, scenario: Scenario, costs: Costs, mode: Mode
) -> Prediction:
    steps = _Steps(workload, scenario, costs)
    if mode == "allreduce":
        step, work = _allreduce_step(workload, scenario, costs, steps)
    else:
        step, work = _round_step(workload, scenario, costs, mode, steps)
    rate = 1 / step
    learners = scenario.num_super_learners * scenario.super_learner_size
    return Prediction(
        samples_per_second=rate * learners * workload.local_batch_size,
        steps_per_second=rate,
        exposed=max(0.0, 1 - (steps.work + work) * rate),
        exchanges_per_step=1.0 if mode == "allreduce" else 1 / scenario.gossip_every,
        staleness={int(mode == "delay_by_one"): 1.0},
    )


class _Seconds(NamedTuple):
    """Of a step, and what of it is processor work for communication."""

    step: float
    work: float


def _allreduce_step(
    workload: Workload, scenario: Scenario, costs: Costs, steps: _Steps
) -> _Seconds:
    """Of DDP: rings inside and, of shards, across."""
    num_bytes, size = workload.weight_bytes, scenario.super_learner_size
    seconds = scenario.inner_link.allreduce_seconds(num_bytes, size)
    seconds += scenario.link.allreduce_seconds(
        num_bytes / size, scenario.num_super_learners
    )
    draws = range(_MEASURED if steps.vary else 1)
    slowest = torch.stack([steps.computed().amax() for _ in draws])
    allreduce = torch.full_like(slowest, seconds)
    waited = overlapped(allreduce, slowest * workload.backward, num_bytes)
    alone = scenario.num_super_learners * size == 1
    work = 0.0 if alone else costs.gradient * num_bytes + costs.step
    return _Seconds(float((slowest + waited).mean()) + work, work)


def _round_step(
    workload: Workload, scenario: Scenario, costs: Costs, mode: Mode, steps: _Steps
) -> _Seconds:
    if scenario.num_super_learners == 1:
        computed = steps.means()
        return _Seconds(float(computed + steps.inside(computed)), 0.0)
    work = costs.round * workload.weight_bytes / scenario.gossip_every + costs.step
    hidden = mode == "delay_by_one"
    if steps.vary:
        ends = _ends(workload, scenario, hidden, steps, work)
        return _Seconds(_slope(ends, _warmup(scenario, steps)), work)
    # Nobody gets ahead of the slowest by more than the rounds between them.
    return _Seconds(_constant_step(workload, scenario, hidden, steps) + work, work)


def _constant_step(
    workload: Workload, scenario: Scenario, hidden: bool, steps: _Steps
) -> float:
    """Mean seconds where no step differs from the next: the slowest holds up all."""
    gradient = float(steps.gradient().amax())
    update = workload.update * scenario.compute.seconds
    rounds = list(itertools.islice(_rounds(workload, scenario), _num_rounds(scenario)))
    crossings = [float(meeting.seconds.amax()) for meeting in rounds]
    if hidden:
        with_round = [max(gradient, update + crossing) for crossing in crossings]
    else:
        with_round = [gradient + crossing for crossing in crossings]
    mean = sum(with_round) / len(with_round)
    return (mean + (scenario.gossip_every - 1) * gradient) / scenario.gossip_every


def _ends(
    workload: Workload, scenario: Scenario, hidden: bool, steps: _Steps, work: float
) -> Iterator[Tensor]:
    """When each super-learner has made its k-th step, [S], for k = 1, 2, ..."""
    update = workload.update * scenario.compute.seconds
    ends = torch.zeros(scenario.num_super_learners, dtype=torch.float64)
    rounds = _rounds(workload, scenario)
    for step in itertools.count(0 if hidden else 1):
        ready = ends + steps.gradient() + work
        if step > 0 and due_round(step, scenario.gossip_every) is not None:
            meeting = next(rounds)
            begins = ends + update + work if hidden else ready
            landed = meeting.latest(begins) + meeting.seconds
            ready = torch.maximum(ready, landed)
        ends = ready
        yield ends


def _rounds(workload: Workload, scenario: Scenario) -> Iterator[_Meeting]:
    num = _num_rounds(scenario)
    return itertools.cycle([_meeting(workload, scenario, r) for r in range(num)])


def _num_rounds(scenario: Scenario) -> int:
    period = scenario.topology.period(scenario.num_super_learners)
    return period or _SAMPLED_ROUNDS


def _meeting(workload: Workload, scenario: Scenario, round: int) -> _Meeting:
    num, size = scenario.num_super_learners, scenario.super_learner_size
    schedule, shard = scenario.schedule(num), workload.weight_bytes / size
    gather = scenario.inner_link.allgather_seconds(workload.weight_bytes, size)
    if schedule.is_mean(round):
        seconds = scenario.link.allreduce_seconds(shard, num) + gather
        return _Meeting(None, torch.full((num,), seconds, dtype=torch.float64))
    parts = parts_of(schedule, round)
    met = [sorted({*part.takes, *part.gives} | {i}) for i, part in enumerate(parts)]
    messages = [
        max(len({*part.takes} - {i}), len({*part.gives} - {i}))
        for i, part in enumerate(parts)
    ]
    seconds = [
        (scenario.link.seconds(count * shard) if count else 0.0) + gather
        for count in messages
    ]
    crossing = torch.tensor(seconds, dtype=torch.float64)
    return _Meeting(_padded(met), crossing)


def _padded(rows: list[list[int]]) -> Tensor:
    """Rows of numbers as a matrix; short ones repeat their last."""
    longest = max(map(len, rows))
    return torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])


def _warmup(scenario: Scenario, steps: _Steps) -> int:
    """Steps until everybody has felt the slowest."""
    if not scenario.compute.slow:
        return _SETTLED
    felt = torch.zeros(scenario.num_super_learners)
    felt[int(steps.means().argmax())] = 1.0
    rounds = itertools.islice(_rounds(Workload(1), scenario), _FURTHEST)
    for count, meeting in enumerate(rounds):
        if felt.all():
            return count * scenario.gossip_every
        felt = meeting.latest(felt)
    return _FURTHEST


def _slope(ends: Iterator[Tensor], warmup: int) -> float:
    """Mean seconds of a step after the warm-up."""
    first, last = itertools.islice(ends, warmup, warmup + _MEASURED + 1, _MEASURED)
    return float((last - first).mean()) / _MEASURED


# --- where nobody waits


class _Seen(NamedTuple):
    """What an asynchronous timeline has shown.

    Attributes:
        exchanges: Per step of a super-learner.
        merging: Share of the steps that had something to merge.
        staleness: Share of exchanges by their age.
    """

    exchanges: float
    merging: float
    staleness: dict[int, float]


def _without_waiting(
    workload: Workload, scenario: Scenario, costs: Costs, cpu_share: float
) -> Prediction:
    steps = _Steps(workload, scenario, costs)
    slowest = steps.means()
    gradient = slowest + steps.inside(slowest)
    mean = float(gradient.mean())
    seen = _observe(workload, scenario, costs, mean)
    cores = _Cores(workload, scenario, costs, mean)
    merge = seen.merging * costs.merge * workload.weight_bytes
    kept = cores.kept(seen.exchanges, merge, cpu_share)
    merge *= kept
    step = gradient + merge + cores.taken_from_training(kept * seen.exchanges)
    rate = float((1 / step).mean())
    learners = scenario.num_super_learners * scenario.super_learner_size
    return Prediction(
        samples_per_second=rate * learners * workload.local_batch_size,
        steps_per_second=rate,
        exposed=float(((gradient - slowest) / step).mean()),
        exchanges_per_step=kept * seen.exchanges,
        staleness=seen.staleness,
    )


class _Cores:
    """What exchanges find of a learner's cores during a step, in seconds of processor.

    As `CoreShare` bounds it: merges, and the work of exchanges as far as it finds every
    core busy, take at most `cpu_share` of the training's time.
    """

    def __init__(
        self, workload: Workload, scenario: Scenario, costs: Costs, step: float
    ) -> None:
        # Each learner carries its part of the weights.
        self._work = costs.work * workload.weight_bytes / scenario.super_learner_size
        self._step, self._busy = step, costs.busy * step
        self._all = costs.cores * step
        self._machine = max(costs.cores, costs.machine_cores)

    def kept(self, exchanges: float, merge: float, cpu_share: float) -> float:
        """The share of so many exchanges per step, and seconds of merging, that go."""
        if cpu_share == 1 or not exchanges:
            return 1.0

        def too_many(kept: float) -> bool:
            taken = kept * merge + self.taken_from_training(kept * exchanges)
            return taken > cpu_share * self._step

        return _last(too_many)

    def taken_from_training(self, exchanges: float) -> float:
        """By how many seconds so many exchanges make a step longer."""
        work = exchanges * self._work
        busy = (self._busy + work) / self._all
        missing = self._busy + work - self._all
        return max(missing, work * crowded(busy, self._machine))


def crowded(busy: float, num_cores: float) -> float:
    """The chance to find every core busy, if each is so by itself for this share."""
    return min(max(busy, 0.0), 1.0) ** max(num_cores, 1.0)


def _last(too_many: Callable[[float], bool]) -> float:
    """The largest share in [0, 1] that is not too many, which larger ones are."""
    low, high = 0.0, 1.0
    if not too_many(high):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if too_many(middle) else (middle, high)
    return low


def _observe(
    workload: Workload, scenario: Scenario, costs: Costs, step: float
) -> _Seen:
    """Exchanges of a neighbourhood, long after its start."""
    if scenario.num_super_learners == 1:
        return _Seen(0.0, 0.0, {})
    local = _neighbourhood(workload, scenario, costs)
    num, size = local.num_super_learners, local.super_learner_size
    crossing = local.link.seconds(workload.message_bytes / size)
    num_peers = len(local.topology.part(0, num, 0).takes) - 1
    anybody = local.topology.period(num) == 0
    if anybody and num_peers * crossing > step * scenario.gossip_every:
        # Each asks another peer at each step, until all pairs are under way at once.
        num_peers = scenario.num_super_learners - 1
        if num_peers >= num:
            return _Seen(step / crossing, 1.0, {round(num_peers * crossing / step): 1})
    begin = 10 * step + 2 * num_peers * crossing
    timeline = Asynchronous(local, workload.weight_bytes, workload.message_bytes)
    seen = itertools.takewhile(lambda event: event.seconds < 3 * begin, timeline)
    late = int(size > 1)  # what a super-learner has gathered is merged a step later
    return _count(seen, begin, late)


def _neighbourhood(workload: Workload, scenario: Scenario, costs: Costs) -> Scenario:
    """As many super-learners as exchanges can know of, in place of thousands."""
    num, size = scenario.num_super_learners, scenario.super_learner_size
    topology = scenario.topology
    if num > _LOCAL and TOPOLOGIES.get(topology.name) is topology:
        if topology is TOPOLOGIES["complete"]:
            raise ValueError(
                '`topology="complete"` with `communication="async"` asks S - 1 peers '
                f"in each round: at most {_LOCAL} super-learners, got {num}"
            )
        num = _LOCAL
    steps = _Steps(workload, scenario, costs)
    inside = float(steps.inside(torch.tensor([steps.work], dtype=torch.float64)))
    fastest = 1 / costs.exchange if costs.exchange else math.inf
    return replace(
        scenario,
        num_super_learners=num,
        link=replace(scenario.link, bandwidth=min(scenario.link.bandwidth, fastest)),
        # What the backward pass hides of an all-reduce does not count: a link that
        # takes the rest, in the turns of a ring.
        inner_link=Link(latency=inside / max(1, 2 * (size - 1))),
    )


def _count(events: Iterable[Event], begin: float, late: int) -> _Seen:
    """What happens from a time on; ages are counted as the engine counts them."""
    steps, ages = Counter[int](), Counter[int]()
    read: dict[Exchange, dict[int, int]] = {}
    waiting: dict[int, list[int]] = {}
    num_steps = num_ends = num_merging = 0
    for event in events:
        counts = event.seconds >= begin
        if isinstance(event, Begun):
            read[event.exchange] = {i: steps[i] for i in event.exchange.ends}
        elif isinstance(event, Ended):
            for i, step in read.pop(event.exchange).items():
                waiting.setdefault(i, []).append(step)
                num_ends += counts
        elif isinstance(event, Stepped):
            i = event.super_learner
            steps[i] += 1
            merged = waiting.pop(i, [])
            if counts:
                num_steps += 1
                num_merging += bool(merged)
                ages.update(steps[i] - step + late for step in merged)
    shares = {age: count / ages.total() for age, count in sorted(ages.items())}
    return _Seen(num_ends / num_steps, num_merging / num_steps, shares)
