"""The record of batches and exchanges among learners that fail, and its audit.

Each life of a learner writes a line for whatever changes its weights, in the order in
which it takes effect:

    step       a batch: what the optimizer added to x, the sum of all weights, and x
    average    what one part of an exchange added to x at this end
    put        what the weights of others, taken up, added to x

`check` proves four things over the lines of all lives. Each x is the previous one plus
all that was added in between. An average subtracts at one end exactly what it adds at
the other, so the mean stays. A learner that starts takes weights of the same training
before it averages. Each batch of an epoch was done once. A fault may explain lost
averages and batches, but no more than the documents allow. `recorder` writes the lines.
Here they are read and checked.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 1e-3  # of a balance: x is the sum of 68,000 weights in single precision
AFTERMATH_S = 6.0  # from a fault until its last broken connection is noticed
PER_LANE, PER_LEARNER = 2, 2  # one-sided averages, and batches, that a fault may cost


class Step(NamedTuple):
    """A step on one batch.

    Attributes:
        time: on the machine's monotonic clock.
        epoch: epoch of the batch.
        unit: number of it in the epoch's data.
        member: number of the learner on the member list.
        origin: origin of its weights.
        position: number of steps of its training, by all learners.
        update: what the optimizer added to the sum of all weights.
        total: that sum, with what was exchanged and not merged yet.
        lost: number of peers that it has lost so far.
    """

    time: float
    epoch: int
    unit: int
    member: int
    origin: str
    position: int
    update: float
    total: float
    lost: int = 0


class Average(NamedTuple):
    """One part of an exchange, at one end.

    Attributes:
        member: number of the peer on the member list.
        asked: whether this end asked.
        part: number of the part.
        value: what it added to the sum of all weights here.
    """

    time: float
    member: int
    asked: bool
    part: int
    value: float


class Put(NamedTuple):
    """The adoption of other weights."""

    time: float
    value: float


Record = Step | Average | Put
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Step, Average, Put)}


class Name(NamedTuple):
    """The name of a life of a learner."""

    learner: int
    life: int


History = Mapping[Name, Sequence[Record]]


class Fault(NamedTuple):
    """A fault, which may explain why something does not add up.

    Attributes:
        learners: learners that it hit.
        is_of_rendezvous: whether it hit the rendezvous, and so all that share batches.
    """

    kind: str
    learners: tuple[int, ...]
    begin: float
    end: float
    is_of_rendezvous: bool = False

    def is_near(self, time: float) -> bool:
        """Whether an event at this time may be its effect."""
        return self.begin - AFTERMATH_S <= time <= self.end + AFTERMATH_S


# --- reading


def read(folder: Path) -> dict[Name, list[Record]]:
    """The histories of all lives; a line that a kill has torn is left out."""
    return {
        Name(*map(int, path.name.split(".")[:2])): list(_lines(path))
        for path in sorted(folder.glob("*.history"))
    }


def tail(folder: Path, learner: int, num_bytes: int = 1 << 16) -> list[Record]:
    """The last lines of the present life of a learner."""
    paths = folder.glob(f"{learner}.*.history")
    path = max(paths, key=lambda p: int(p.name.split(".")[1]), default=None)
    if path is None:
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        text = file.read().decode()
    # The first one may have begun before.
    return list(_records(text.splitlines(keepends=True)[1:]))


def _lines(path: Path) -> Iterator[Record]:
    return _records(path.read_text().splitlines(keepends=True))


def _records(lines: Sequence[str]) -> Iterator[Record]:
    for line in lines:
        if line.endswith("\n"):
            kind, *fields = json.loads(line)
            yield _KINDS[kind](*fields)


# --- checking


class Verdict(NamedTuple):
    """The result of the audit.

    Attributes:
        worst_balance: largest difference between an x and what it should be.
        one_sided: averages at one end alone, each with a fault that explains it, or a
            connection that was lost at about that time.
        of_lost: those that only such a connection explains, and no fault.
        moved: sum that those added to all weights.
        of_two_origins: averages between weights of two trainings.
        untrained: averages of lives that had not taken weights, except the first life.
        lost: batches that no learner did.
        twice: batches that were done again.
        unexplained: sentences about what no fault explains.
    """

    lives: int
    steps: int
    averages: int
    puts: int
    worst_balance: float
    one_sided: int
    of_lost: int
    moved: float
    of_two_origins: int
    untrained: int
    epochs: int
    lost: int
    twice: int
    unexplained: list[str]


def check(history: History, faults: Sequence[Fault], num_units: int) -> Verdict:
    """Audits a run.

    Args:
        faults: All faults of the learners and the rendezvous.
        num_units: Number of batches of an epoch.
    """
    balances = {name: balance(records) for name, records in history.items()}
    wrong = [
        f"{name}: the weights do not add up by {off:.3g}, at a step after {at:.2f}"
        for name, (off, at) in balances.items()
        if off > TOLERANCE
    ]
    by_fault, by_loss, untold = one_sided(history, faults)
    alone = [*by_fault, *by_loss]
    foreign, untrained = of_two_origins(history), untrained_of(history)
    accounts = [*accounts_of(history, faults, num_units)]
    of_kind = Counter(type(r).__name__ for own in history.values() for r in own)
    return Verdict(
        len(history),
        of_kind["Step"],
        of_kind["Average"],
        of_kind["Put"],
        max((off for off, _ in balances.values()), default=0.0),
        len(alone),
        len(by_loss),
        sum(one.value for one in alone),
        len(foreign),
        len(untrained),
        len(accounts),
        sum(account.lost for account in accounts),
        sum(account.twice for account in accounts),
        [
            *(*wrong, *untold, *foreign, *untrained),
            *(sentence for one in accounts for sentence in one.unexplained),
        ],
    )


def balance(records: Sequence[Record]) -> tuple[float, float]:
    """The largest imbalance of an x, and its time.

    If weights are NaN, only lines after the next adoption of weights count.
    """
    expected, worst = math.nan, (0.0, 0.0)
    for record in records:
        if not isinstance(record, Step):
            expected += record.value
            continue
        off = abs(record.total - expected - record.update)
        worst = max(worst, (off, record.time)) if math.isfinite(off) else worst
        expected = record.total
    return worst


class _End(NamedTuple):
    name: Name
    average: Average


def one_sided(
    history: History, faults: Sequence[Fault]
) -> tuple[list[Average], list[Average], list[str]]:
    """Averages at one end alone.

    Returns:
        Those that a fault explains, those that the loss of a connection does, and
        sentences about the others.
    """
    numbers = _Numbers(history)
    ends: dict[Any, list[list[_End]]] = defaultdict(lambda: [[], []])
    for name, records in history.items():
        for one in (r for r in records if isinstance(r, Average)):
            # Both ends round alike, so the values differ only in their signs.
            value = one.value if one.asked else -one.value
            ends[one.part, value][one.asked].append(_End(name, one))
    alone = [end for asked, asks in ends.values() for end in _unpaired(asked, asks)]
    by_fault, by_loss, untold = list[Average](), list[Average](), list[str]()
    costs, losses = Counter[Any](), _losses(history)
    for name, one in sorted(alone, key=lambda end: end.average.time):
        peer = numbers.learner(one.member, one.time)
        lane = frozenset((name.learner, peer)), one.asked
        near = [
            n
            for n, fault in enumerate(faults)
            if fault.is_near(one.time) and lane[0] & set(fault.learners)
        ]
        free = [n for n in near if costs[n, lane] < PER_LANE]
        if free:
            costs[free[0], lane] += 1
            by_fault.append(one)
        elif any(abs(one.time - t) < AFTERMATH_S for n in lane[0] for t in losses[n]):
            by_loss.append(one)
        else:
            untold.append(f"{name}: {one} has no other end (learner {peer})")
    return by_fault, by_loss, untold


def _losses(history: History) -> dict[int | None, list[float]]:
    """The times at which each learner has lost a peer, by its own records."""
    found = defaultdict[int | None, list[float]](list)
    for name, records in history.items():
        steps = (r for r in records if isinstance(r, Step))
        for before, after in itertools.pairwise(steps):
            found[name.learner] += [after.time] * (after.lost > before.lost)
    return found


def _unpaired(asked: list[_End], asks: list[_End]) -> list[_End]:
    num = min(len(asked), len(asks))
    return [*asked[num:], *asks[num:]]


class _Numbers:
    """The learner and the weights behind a number of the member list, by time."""

    def __init__(self, history: History) -> None:
        self._steps: dict[int, list[tuple[float, int, str]]] = defaultdict(list)
        for name, records in history.items():
            for one in (r for r in records if isinstance(r, Step)):
                row = one.time, name.learner, one.origin
                self._steps[one.member].append(row)

    def learner(self, member: int, time: float) -> int | None:
        """The learner of the step nearest to this time."""
        return self._nearest(member, time)[1]

    def origin(self, member: int, time: float) -> str:
        """The origin at that step; empty if there is none."""
        return self._nearest(member, time)[2]

    def _nearest(self, member: int, time: float) -> tuple[float, int | None, str]:
        steps = self._steps.get(member, [])
        none = (math.inf, None, "")
        return min(steps, key=lambda one: abs(one[0] - time), default=none)


def of_two_origins(history: History) -> list[str]:
    """The averages between weights of two trainings."""
    origins = _Origins(history)
    return [
        f"{name}: {one} is with a learner of another training"
        for name, records in history.items()
        for one in _with_foreigners(records, origins)
    ]


class _Origins:
    """The periods in which the weights of a member were those of one training."""

    def __init__(self, history: History) -> None:
        self._known: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        for records in history.values():
            for one in (r for r in records if isinstance(r, Step)):
                first, _ = self._known[one.member].get(one.origin, (one.time, 0))
                self._known[one.member][one.origin] = first, one.time

    def surely(self, member: int, time: float) -> str:
        """The origin of a member, if equal at the steps around; empty: unknown."""
        found = [
            origin
            for origin, (first, last) in self._known[member].items()
            if first <= time <= last
        ]
        return found[0] if len(found) == 1 else ""


def _with_foreigners(records: Sequence[Record], origins: _Origins) -> Iterator[Average]:
    own = ""
    for record in records:
        if isinstance(record, Step):
            own = record.origin
        elif isinstance(record, Average):
            theirs = origins.surely(record.member, record.time)
            if own and theirs and own != theirs:
                yield record


def untrained_of(history: History) -> list[str]:
    """The averages of lives that had not taken weights, except the first life."""

    def first_step(name: Name) -> float:
        times = (r.time for r in history[name] if isinstance(r, Step))
        return next(times, math.inf)

    later = sorted(history, key=first_step)[1:]
    return [
        f"{name}: {one}, when it had taken no weights"
        for name in later
        for one in itertools.takewhile(lambda r: not isinstance(r, Put), history[name])
        if isinstance(one, Average)
    ]


class Account(NamedTuple):
    """The batches of an epoch; see `Verdict`."""

    lost: int
    twice: int
    unexplained: list[str]


def accounts_of(
    history: History, faults: Sequence[Fault], num_units: int
) -> Iterator[Account]:
    """The accounts of all epochs but the last, which the end of the run cuts short."""
    steps = defaultdict[int, list[Step]](list)
    for records in history.values():
        for one in (r for r in records if isinstance(r, Step)):
            steps[one.epoch].append(one)
    everybody = len({name.learner for name in history})
    for epoch in sorted(steps)[:-1]:
        yield _account(epoch, steps[epoch], faults, num_units, everybody)


def _account(
    epoch: int,
    steps: Sequence[Step],
    faults: Sequence[Fault],
    num_units: int,
    everybody: int,
) -> Account:
    done = Counter(step.unit for step in steps)
    lost, twice = num_units - len(done), sum(done.values()) - len(done)
    begin, end = min(s.time for s in steps), max(s.time for s in steps)
    near = [f for f in faults if f.begin <= end and begin <= f.end + AFTERMATH_S]
    hit = {learner for fault in near for learner in fault.learners}
    away = [fault for fault in near if fault.is_of_rendezvous]
    most = PER_LEARNER * (everybody if away else len(hit))
    # If a learner dies while the rendezvous is away, the rest of its share is lost too.
    most += max((len(hit) * _share(steps, f, num_units) for f in away), default=0)
    wrong = list[str]()
    if lost > most:
        wrong.append(f"epoch {epoch}: {lost} batches lost, where faults excuse {most}")
    if twice and not near:
        wrong.append(f"epoch {epoch}: {twice} batches done twice without a fault")
    return Account(lost, twice, wrong)


def _share(steps: Sequence[Step], fault: Fault, num_units: int) -> int:
    """The batches left for each learner when the rendezvous was lost."""
    done = {step.unit for step in steps if step.time < fault.begin}
    recent = fault.begin - AFTERMATH_S
    members = {s.member for s in steps if recent < s.time < fault.begin}
    return math.ceil((num_units - len(done)) / max(1, len(members)))
