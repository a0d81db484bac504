"""What shows that the weights and the batches of a long run add up, or do not."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import history
from benchmarks.history import Average, Fault, Name, Put, Record, Step, Verdict, check
from benchmarks.recorder import Recorder
from lightning_adpsgd.gossip.exchange import Lane
from lightning_adpsgd.weights.replica import Part
from tests.helpers import engines, random_rows, running, until

LEARNERS, UNITS, EPOCHS = 4, 30, 3
STEP_S = 0.1

Records = dict[Name, list[Record]]
Spoil = Callable[[Records, random.Random], None]
seeds = st.integers(0, 1 << 30)


class Voyage:
    """Learners whose weights and batches add up."""

    def __init__(self, seed: int) -> None:
        self.dice, self.now = random.Random(seed), 0.0
        self.records: Records = {Name(n, 0): [] for n in range(LEARNERS)}
        self.totals = dict.fromkeys(self.records, 1.0)
        for name in self.records:
            self.add(name, Put(self.now, 0.5))
        for epoch in range(EPOCHS):
            units = self.dice.sample(range(UNITS), UNITS)
            for unit in units:
                self.exchange()
                self.step(epoch, unit)

    def step(self, epoch: int, unit: int) -> None:
        name, update = self.dice.choice([*self.records]), self.dice.gauss(0, 1)
        self.now += STEP_S
        self.totals[name] += update
        step = Step(
            *(self.now, epoch, unit, 10 + name.learner, "origin", 1),
            *(update, self.totals[name]),
        )
        self.records[name].append(step)

    def exchange(self) -> None:
        asker, asked = self.dice.sample([*self.records], 2)
        value = self.dice.gauss(0, 1)
        self.add(asker, Average(self.now, 10 + asked.learner, True, 0, value))
        self.add(asked, Average(self.now, 10 + asker.learner, False, 0, -value))
        if self.dice.random() < 0.1:
            self.add(asker, Put(self.now, self.dice.gauss(0, 1)))

    def add(self, name: Name, record: Average | Put) -> None:
        self.totals[name] += record.value
        self.records[name].append(record)


def judge(records: Records, *faults: Fault) -> Verdict:
    return check(records, faults, UNITS)


def place_of(
    records: Records, dice: random.Random, kind: type[Record]
) -> tuple[list[Record], int]:
    """A record of a kind, not among the first ones of a life nor in the last epoch."""
    places = [
        (own, n)
        for own in records.values()
        for n, one in enumerate(own)
        if isinstance(one, kind) and 1 < one.time < STEP_S * UNITS * (EPOCHS - 1)
    ]
    return dice.choice(places)


def forget_an_average(records: Records, dice: random.Random) -> None:
    own, place = place_of(records, dice, Average)
    del own[place]


def average_twice(records: Records, dice: random.Random) -> None:
    own, place = place_of(records, dice, Average)
    own.insert(place, own[place])


def weigh_one_end_more(records: Records, dice: random.Random) -> None:
    own, place = place_of(records, dice, Average)
    average = own[place]
    assert isinstance(average, Average)
    own[place] = average._replace(value=average.value * (1 + 1e-12))


def lose_some_weight(records: Records, dice: random.Random) -> None:
    own, place = place_of(records, dice, Step)
    step = own[place]
    assert isinstance(step, Step)
    own[place] = step._replace(total=step.total + 0.01)


def do_a_batch_of_another(records: Records, dice: random.Random) -> None:
    own, place = place_of(records, dice, Step)
    step = own[place]
    assert isinstance(step, Step)
    own[place] = step._replace(unit=(step.unit + 1) % UNITS)


def meet_a_stranger(records: Records, dice: random.Random) -> None:
    stranger = dice.choice([*records])
    records[stranger] = [
        one._replace(origin="another") if isinstance(one, Step) else one
        for one in records[stranger]
    ]


def begin_untrained(records: Records, dice: random.Random) -> None:
    late = Name(dice.randrange(LEARNERS), 1)
    begin = Average(4.0, 99, True, 0, 0.0)
    records[late] = [begin, Step(4.1, 0, 0, 20, "origin", 1, 0.0, 1.0)]


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_what_adds_up_is_not_complained_of(seed: int) -> None:
    verdict = judge(Voyage(seed).records)
    assert verdict.unexplained == []
    assert verdict.worst_balance < 1e-9
    assert verdict.steps == UNITS * EPOCHS
    assert verdict.averages == 2 * UNITS * EPOCHS
    assert (verdict.one_sided, verdict.lost, verdict.twice) == (0, 0, 0)
    assert verdict.epochs == EPOCHS - 1


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (forget_an_average, "has no other end"),
        (average_twice, "has no other end"),
        (weigh_one_end_more, "has no other end"),
        (lose_some_weight, "do not add up by 0.01"),
        (do_a_batch_of_another, "done twice without a fault"),
        (do_a_batch_of_another, "batches lost"),
        (meet_a_stranger, "of another training"),
        (begin_untrained, "had taken no weights"),
    ],
)
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_whatever_does_not_add_up_is_found(
    spoil: Spoil, complaint: str, seed: int
) -> None:
    voyage = Voyage(seed)
    spoil(voyage.records, voyage.dice)
    found = " ".join(judge(voyage.records).unexplained)
    assert complaint in found


def test_a_fault_explains_what_it_may_cost_and_no_more() -> None:
    voyage = Voyage(seed=5)
    records = voyage.records
    own = records[Name(1, 0)]
    first = [r for r in own if isinstance(r, Average)][4]
    own.remove(first)
    near = Fault("kill", (1,), first.time - 0.5, first.time + 0.5)
    elsewhere = [n for n in range(LEARNERS) if n not in (1, first.member - 10)]
    assert judge(records).unexplained
    assert not [w for w in judge(records, near).unexplained if "no other end" in w]
    assert judge(records, near._replace(learners=(elsewhere[0],))).unexplained
    assert judge(records, near._replace(begin=90.0, end=91.0)).unexplained


def test_a_fault_loses_two_exchanges_of_a_lane_and_not_three() -> None:
    records = Voyage(seed=6).records
    own, peer = records[Name(1, 0)], 12
    for number in range(history.PER_LANE + 1):
        own.append(Average(3.0, peer, True, 0, 0.5 + number))
    found = judge(records, Fault("kill", (2,), 2.9, 3.1))
    assert found.one_sided == history.PER_LANE
    assert len(found.unexplained) == 1


def test_an_average_that_ends_with_its_connection_is_counted_apart() -> None:
    records = Voyage(seed=6).records
    own = records[Name(1, 0)]
    place = next(n for n, one in enumerate(own) if isinstance(one, Average))
    alone = own.pop(place)
    for name, step in list(records.items()):
        records[name] = [
            one._replace(lost=int(one.time > alone.time + 1 and name.learner == 1))
            if isinstance(one, Step)
            else one
            for one in step
        ]
    found = judge(records)
    assert (found.one_sided, found.of_lost) == (1, 1)
    assert not [one for one in found.unexplained if "no other end" in one]


@pytest.mark.parametrize("num_lost", [2, 3])
def test_a_learner_that_is_killed_loses_two_batches_and_not_three(
    num_lost: int,
) -> None:
    records = Voyage(seed=7).records
    steps = [r for own in records.values() for r in own if isinstance(r, Step)]
    of_epoch = sorted(s for s in steps if s.epoch == 1)
    for own in records.values():
        for place, one in enumerate(own):
            if isinstance(one, Step) and one in of_epoch[-num_lost:]:
                own[place] = one._replace(epoch=2)
    kill = Fault("kill", (3,), of_epoch[-4].time, of_epoch[-1].time)
    found = judge(records, kill)
    assert found.lost == num_lost
    assert len(found.unexplained) == int(num_lost > 2)
    restart = kill._replace(learners=(), is_of_rendezvous=True)
    assert not judge(records, restart).unexplained


def test_weights_that_are_no_numbers_are_an_illness_and_not_a_loss() -> None:
    ill = float("nan")
    records: list[Record] = [
        Step(0.0, 0, 0, 1, "o", 1, 0.5, 7.0),
        Step(0.1, 0, 1, 1, "o", 2, ill, ill),
        Put(0.2, ill),
        Step(0.3, 0, 2, 1, "o", 3, 0.5, 9.0),
        Average(0.35, 2, True, 0, 1.0),
        Step(0.4, 0, 3, 1, "o", 4, 0.5, 10.5),
    ]
    assert history.balance(records)[0] == 0.0
    records[-1] = Step(0.4, 0, 3, 1, "o", 4, 0.5, 12.5)
    assert history.balance(records) == (2.0, 0.4)


def test_what_is_written_is_read_back_without_what_a_kill_has_torn(
    tmp_path: Path,
) -> None:
    name = Name(3, 12)
    recorder = Recorder(tmp_path, name)
    written = [Average(1.5, 2, False, 0, -1 / 3), Put(2.5, 0.1)]
    for record in written:
        recorder.write(record)
    path = tmp_path / "3.12.history"
    path.write_text(path.read_text() + '["Put", 3.')
    assert history.read(tmp_path) == {name: written}


def test_real_exchanges_take_at_one_end_what_they_add_at_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((Lane, "ask"), (Lane, "answer"), (Part, "add"), (Part, "put")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    recorder = Recorder(tmp_path, Name(0, 0))
    recorder.follow_exchanges()
    vectors, gossips = engines(random_rows(3), "ring", chunk_elements=3)

    def all_have_met() -> bool:
        for vector, gossip in zip(vectors, gossips, strict=True):
            gossip.before_update()
            vector.add_(1.0)
            gossip.after_update()
        return all(gossip.statistics().exchanges >= 3 for gossip in gossips)

    with running(gossips):
        until(all_have_met, "three exchanges of each")
    (records,) = history.read(tmp_path).values()
    averages = [one for one in records if isinstance(one, Average)]
    asking = sorted((a.part, a.value) for a in averages if a.asked)
    answering = sorted((a.part, -a.value) for a in averages if not a.asked)
    assert asking == answering
    assert any(value for _, value in asking)
    assert {one.member for one in averages} == {0, 1, 2}
