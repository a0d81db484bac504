"""The exchanges of super-learners that do not wait, in the steady state.

They are those of a neighbourhood of a few super-learners, simulated on the event clock
of the virtual cluster. It stands for any number: an exchange reaches neighbours alone.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

import torch

from lightning_adpsgd.gossip.forms import LONG
from lightning_adpsgd.topology.named import TOPOLOGIES
from lightning_adpsgd.virtual.clock import Link
from lightning_adpsgd.virtual.timeline import (
    Asynchronous,
    Begun,
    Ended,
    Event,
    Scenario,
    SimulatedExchange,
    Stepped,
)

_LOCAL = 32  # super-learners of a neighbourhood
_CROSSINGS = 12  # exchanges one after another, until the steady state
_LONGEST = 64  # steps that a simulated exchange may take
_MOST_EVENTS = 1 << 19  # reached if a few super-learners are very fast


class Form(NamedTuple):
    """An exchange with one wire dtype, for all learners of a super-learner together."""

    dtype: torch.dtype
    message_bytes: float
    arithmetic: float  # seconds, which bound the speed of a fast link
    work: float  # processor seconds at one end


class Seen(NamedTuple):
    """The exchanges in the steady state."""

    exchanges: float  # per step of a super-learner
    merging: float  # share of the steps that had something to merge
    staleness: dict[int, float]  # share of the exchanges by their age
    seconds: float  # of an exchange

    def slower(self, times: int) -> "Seen":
        """The same on a slower link, if an exchange takes many steps on both."""
        return Seen(
            self.exchanges / times,
            self.merging / times,
            {times * age: share for age, share in self.staleness.items()},
            self.seconds * times,
        )


def observe(
    forms: Sequence[Form],
    scenario: Scenario,
    weight_bytes: float,
    steps: Sequence[float],
) -> tuple[Form, Seen]:
    """The form that the engine settles on, and the exchanges in this form.

    Args:
        forms: forms that the engine chooses from, the widest first.
        steps: mean seconds of a step of each super-learner.
    """
    if scenario.num_super_learners == 1:
        return forms[0], Seen(0.0, 0.0, {}, 0.0)
    long = LONG * median(steps)  # each end judges by its own steps
    for form in forms[:-1]:
        if _crossing_seconds(form, scenario) >= long:
            continue
        seen = _watch(form, scenario, weight_bytes, steps)
        if seen.seconds < long:
            return form, seen
    return forms[-1], _watch(forms[-1], scenario, weight_bytes, steps)


def _crossing_seconds(form: Form, scenario: Scenario) -> float:
    """The time of an exchange whose links are otherwise idle."""
    size = scenario.super_learner_size
    return _link(form, scenario).seconds(form.message_bytes / size)


def _link(form: Form, scenario: Scenario) -> Link:
    """The link of an exchange, as fast as its arithmetic allows."""
    arithmetic = form.arithmetic
    fastest = form.message_bytes / arithmetic if arithmetic else math.inf
    return replace(scenario.link, bandwidth=min(scenario.link.bandwidth, fastest))


def _watch(
    form: Form, scenario: Scenario, weight_bytes: float, steps: Sequence[float]
) -> Seen:
    """Simulates a neighbourhood, and counts its exchanges in the steady state.

    If an exchange takes very many steps, a faster link is simulated and the figures are
    scaled, so that the work has a bound.
    """
    near = _neighbourhood(scenario, form)
    num, size = near.num_super_learners, near.super_learner_size
    step = median(steps[:num])  # half of them are at least as fast
    times = math.ceil(_crossing_seconds(form, scenario) / (_LONGEST * step)) or 1
    local = _faster(near, times)
    crossing = local.link.seconds(form.message_bytes / size)
    num_peers = len(local.topology.part(0, num, 0).takes) - 1
    # At the start many ask at the same time; in the steady state they take turns.
    begin = 10 * local.gossip_every * step
    begin += max(2 * num_peers, _CROSSINGS) * crossing
    timeline = Asynchronous(local, weight_bytes, form.message_bytes)
    until = itertools.takewhile(lambda event: event.seconds < 3 * begin, timeline)
    seen = list(itertools.islice(until, _MOST_EVENTS))
    if len(seen) == _MOST_EVENTS:
        begin = seen[-1].seconds / 3
    late = int(size > 1)  # several learners merge a step later, when they have gathered
    return _count(seen, begin, late).slower(times)


def _faster(scenario: Scenario, times: int) -> Scenario:
    """The same with links so many times as fast, and rounds so many times as often."""
    link = scenario.link
    return replace(
        scenario,
        link=Link(link.bandwidth * times, link.latency / times),
        gossip_every=max(1, round(scenario.gossip_every / times)),
    )


def _neighbourhood(scenario: Scenario, form: Form) -> Scenario:
    """The same with a few super-learners for thousands; exchanges see no difference."""
    num, topology = scenario.num_super_learners, scenario.topology
    if num > _LOCAL and TOPOLOGIES.get(topology.name) is topology:
        if topology is TOPOLOGIES["complete"]:
            raise ValueError(
                '`topology="complete"` with `communication="async"` asks S - 1 peers '
                f"in each round: at most {_LOCAL} super-learners, got {num}"
            )
        num = _LOCAL
    compute, learners = scenario.compute, range(num * scenario.super_learner_size)
    slow = {i: factor for i, factor in compute.slow.items() if i in learners}
    return replace(
        scenario,
        num_super_learners=num,
        compute=replace(compute, slow=slow),
        link=_link(form, scenario),
    )


def _count(events: Iterable[Event], begin: float, late: int) -> Seen:
    """Counts the events from `begin` on; a merge is `late` steps late."""
    steps, ages = Counter[int](), Counter[int]()
    read: dict[SimulatedExchange, tuple[float, dict[int, int]]] = {}
    took, waiting = list[float](), dict[int, list[int]]()
    num_steps = num_ends = num_merging = 0
    for event in events:
        counts = event.seconds >= begin
        if isinstance(event, Begun):
            steps_read = {i: steps[i] for i in event.exchange.ends}
            read[event.exchange] = event.seconds, steps_read
        elif isinstance(event, Ended):
            begun, steps_read = read.pop(event.exchange)
            took += [event.seconds - begun] * counts
            for i, step in steps_read.items():
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
    mean = fmean(took) if took else math.inf
    return Seen(num_ends / num_steps, num_merging / num_steps, shares, mean)
