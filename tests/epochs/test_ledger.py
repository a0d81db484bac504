"""Every unit is trained on, once, whatever islands and their rendezvous do."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.epochs.claims import ClaimRate
from lightning_adpsgd.epochs.lease import Lead, Lease
from lightning_adpsgd.epochs.ledger import Ledger, OtherTerms
from lightning_adpsgd.epochs.ranges import Ranges, as_ranges, numbers, union
from lightning_adpsgd.epochs.work_units import Terms

TERMS = Terms(3, ((0, 100),), "100 samples")
SETS = st.sets(st.integers(0, 20))


HOLDINGS = st.dictionaries(st.text(max_size=4), SETS.map(as_ranges), max_size=3)


@given(
    left=SETS,
    held=HOLDINGS,
    awaited=HOLDINGS,
    resting=st.lists(st.text()),
    revision=st.integers(0, 1 << 40),
)
def test_a_ledger_comes_back_from_its_text(
    left: set[int], held: Any, awaited: Any, resting: list[str], revision: int
) -> None:
    books = as_ranges(left), held, awaited, tuple(resting)
    ledger = Ledger("a", TERMS, *books, revision)
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "7", "[]", "[1,2,3,4,5,6,7]"),
        '["a", [1, [], "x"], [[3, 1]], {}, {}, [], 0]',
        '["a", [1, [], "x"], [], {}, {}, [], -1]',
        '["a", [1, [], "x"], [], {}, {}, [], true]',
        f'["a", [{1 << 62}, [], "x"], [], {{}}, {{}}, [], 0]',
    ],
)
def test_what_is_no_ledger_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a ledger of this"):
        Ledger.from_json(text)


def test_a_ledger_of_other_samples_is_refused() -> None:
    mine = Ledger("a", TERMS, ((0, 9),))
    other = Ledger("b", TERMS._replace(seed=4), ((0, 9),))
    with pytest.raises(OtherTerms, match="pool of other samples"):
        other.joined(mine, "me", ())


def test_a_ledger_that_was_replaced_is_known_to_be_old() -> None:
    sea = Sea(1, 9)
    lease = next(iter(sea.live.values())).lease
    first = Ledger.from_json(sea.text)
    assert not lease.is_old(first)
    for _ in range(3):
        sea.one(0).ask()
    second = Ledger.from_json(sea.text)
    assert second.revision > first.revision
    assert lease.is_old(first)
    assert not lease.is_old(second)
    sea.lose_its_memory()
    sea.one(0).look()
    third = Ledger.from_json(sea.text)
    assert third.life != second.life
    assert lease.is_old(second)
    assert not lease.is_old(third)


def test_whether_another_waits_says_nothing_of_oneself() -> None:
    held: dict[str, Ranges] = {"a": (), "b": (), "c": ()}
    ledger = Ledger("life", TERMS, ((0, 9),), held)
    assert ledger._replace(resting=("c",)).another_waits("b")
    assert not ledger._replace(resting=("b",)).another_waits("b")


BOOKS = Ledger(
    "life",
    TERMS,
    ((4, 9),),
    {"a": ((0, 2),), "b": ()},
    {"c": ((2, 3),), "d": ((12, 14),)},
    ("b",),
    5,
)


def test_a_change_raises_the_revision_by_one_and_no_change_does_not() -> None:
    found = Ledger.from_json(BOOKS.to_json())
    assert BOOKS.after(found) is found
    changed = found._replace(left=((4, 8),), revision=1)
    assert changed.after(found) == changed._replace(revision=6)


def test_the_end_of_a_ledger_is_that_of_its_last_unit() -> None:
    assert BOOKS.end == 14
    assert BOOKS._replace(awaited={}).end == 9
    assert BOOKS._replace(awaited={}, left=()).end == 2
    assert Ledger("life", TERMS, ()).end == 0


def test_a_ledger_knows_who_has_a_part_in_it() -> None:
    assert BOOKS.names == {"a", "b", "c", "d"}
    assert BOOKS.of_others("a") == {"b": (), "c": ((2, 3),), "d": ((12, 14),)}
    assert BOOKS.of_others("c") == {"a": ((0, 2),), "b": (), "d": ((12, 14),)}
    # What it holds is newer than what is remembered of it.
    both = BOOKS._replace(awaited={"a": ((7, 8),)})
    assert both.of_others("x") == {"a": ((0, 2),), "b": ()}


@pytest.mark.parametrize(
    ("change", "is_over"),
    [
        ({}, True),
        ({"left": ((8, 9),)}, False),
        ({"awaited": {"c": ()}}, False),
        ({"resting": ("a",)}, False),
        ({"held": {}, "resting": ()}, True),
    ],
)
def test_an_epoch_is_over_when_nobody_will_ask_for_more(
    change: dict[str, Any], is_over: bool
) -> None:
    books = BOOKS._replace(left=(), awaited={}, resting=("a", "b"))
    assert books._replace(**change).is_over is is_over


def test_what_the_gone_had_is_left_for_others() -> None:
    after = BOOKS.without_names({"a", "b", "c", "never there"})
    assert after == BOOKS._replace(
        left=((0, 3), (4, 9)), held={}, awaited={"d": ((12, 14),)}, resting=()
    )


def test_a_claim_takes_the_first_units_and_adds_them_to_what_is_held() -> None:
    after, taken = BOOKS.claim("a", 2)
    assert taken == ((4, 6),)
    assert after == BOOKS._replace(
        left=((6, 9),), held={"a": ((0, 2), (4, 6)), "b": ()}
    )
    for num, expected in ((0, ()), (-1, ()), (99, ((4, 9),))):
        after, taken = BOOKS.claim("new", num)
        assert after.held["new"] == taken == expected


def test_who_rests_is_written_down_once_and_taken_off() -> None:
    rests = BOOKS.rest("a", True).rest("a", True)
    assert rests.resting == ("a", "b")
    assert rests.rest("b", False).resting == ("a",)
    assert BOOKS.rest("a", False) == BOOKS


def test_a_report_says_what_is_held_what_is_finished_and_what_was_never_heard() -> None:
    # Unit 0 is finished, 1 is held, 5 was taken alone, and of 2 it never heard.
    books = BOOKS._replace(held={"a": ((0, 3),), "b": ((10, 11),)}, awaited={})
    after, twice = books.report("a", ((1, 2), (5, 6)), ((0, 1),))
    assert twice == ()
    assert after == books._replace(
        left=((2, 3), (4, 5), (6, 9)),
        held={"a": ((1, 2), (5, 6)), "b": ((10, 11),)},
    )
    # Unit 10 is another's, and unit 3 nobody's: it is finished.
    after, twice = books.report("a", ((0, 4), (10, 11)), ())
    assert twice == ((3, 4), (10, 11))
    assert after == books._replace(held={"a": ((0, 3),), "b": ((10, 11),)})


def test_books_are_begun_anew_from_what_one_island_knows() -> None:
    assert BOOKS.begun_anew("a", "life 2") == Ledger(
        "life 2",
        TERMS,
        ((4, 9),),
        {"a": ((0, 2),)},
        {"b": (), "c": ((2, 3),), "d": ((12, 14),)},
    )
    assert BOOKS.begun_anew("new", "x").held == {"new": ()}


def test_an_epoch_of_a_lease_is_one_of_its_rate() -> None:
    """Or the numbers of two epochs would make a step."""
    rate = ClaimRate()
    for steps, number in enumerate((0, 10, 20, 1000)):
        rate.note(number, steps)
    Lease(1, Ledger("life", TERMS, ((0, 40),)), "me", rate, Lead(), lambda: 0)
    rate.note(3, 1)
    assert max(rate._counts) == 980
    assert min(rate._counts) == 10


def test_a_lease_counts_claims_during_a_step_while_units_are_left() -> None:
    """A loader asks for each of its workers before the first step."""
    rate, finished = ClaimRate(), [0]
    ledger = Ledger("life", TERMS, ((0, 40),))
    lease = Lease(0, ledger, "me", rate, Lead(), lambda: finished[0])
    for num_steps, first_left, counts in (
        (0, 2, []),
        (0, 4, []),
        (1, 15, [11]),
        (1, 20, [11]),
        (3, 30, [11, 5]),
        (4, 40, [11, 5]),
    ):
        finished[0] = num_steps
        left = ((first_left, 40),) if first_left < 40 else ()
        lease.ledger = ledger._replace(left=left)
        lease.note_rate()
        assert [*rate._counts] == counts


def test_a_lease_counts_what_is_claimed_and_what_it_has_finished() -> None:
    lease, found = lease_on(9, num_finished=1)
    assert (lease.num_units, lease.num_claimed) == (9, 2)
    assert [lease.hand_out(), lease.hand_out()] == [0, 1]
    plan = lease.plan(found, set())
    assert (plan.num_finished, plan.claimed, plan.twice) == (1, [2, 3], ())
    assert plan.ledger.held == {"me": ((1, 4),)}
    assert lease.apply(plan) == 0
    assert (list(lease.out), list(lease.ahead)) == ([1], [2, 3])
    assert lease.plan(plan.ledger, set()).num_finished == 0


def test_a_lead_is_the_units_of_a_second_or_of_three_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lead = Lead()
    assert lead.units() == 2
    for _ in range(20):
        lead.note(4)
        now[0] += 0.1
    lead.took(0.01)
    assert lead.units() == 40
    lead.took(2.0)
    assert lead.units() == 240
    lead.took(0.01)
    assert lead.units() == 192  # a slow turn is not forgotten at once


def test_a_slow_learner_claims_two_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lead = Lead()
    for _ in range(5):
        lead.note(1)
        now[0] += 5.0
    assert lead.units() == 2


def test_who_waits_claims_twice_as_many_and_little_at_the_end() -> None:
    lease, found = lease_on(200)
    for wanted in (4, 8, 16):
        lease.ahead.clear()
        lease.is_awaited = True
        plan = lease.plan(found, set())
        assert len(plan.claimed) == wanted
    few = found._replace(left=((0, 10),), held={"me": (), "you": ()})
    assert len(lease.plan(few, set()).claimed) == 2


@pytest.mark.parametrize(
    ("names", "claimed"), [("", 8), ("me", 8), ("me you", 4), ("me you them", 2)]
)
def test_at_the_end_an_island_claims_half_of_its_share(
    names: str, claimed: int
) -> None:
    lease, found = lease_on(200)
    for _ in range(3):
        lease.ahead.clear()
        lease.is_awaited = True
        lease.plan(found, set())
    held = dict.fromkeys(names.split(), ())
    few = found._replace(left=((0, 16),), held=held)
    assert len(lease.plan(few, set()).claimed) == claimed


def test_units_that_others_have_claimed_as_well_are_lost_or_counted_once() -> None:
    lease, found = lease_on(9)
    assert lease.hand_out() == 0
    taken = found._replace(held={"me": (), "you": ((0, 2),)})
    plan = lease.plan(taken, set())
    assert (plan.lost, plan.twice) == (((1, 2),), ((0, 1),))
    assert plan.claimed == [2, 3]
    assert lease.apply(plan) == 1
    assert list(lease.ahead) == [2, 3]
    again = lease.plan(plan.ledger._replace(held=taken.held), set())
    assert lease.apply(again) == 0


def test_a_lease_that_leaves_takes_its_name_off_the_ledger() -> None:
    lease, found = lease_on(9)
    lease.close(leaves=True)
    plan = lease.plan(found, set())
    assert (plan.ledger.left, plan.ledger.held) == (((0, 9),), {})
    assert (plan.ledger.resting, plan.claimed) == ((), [])
    lease, found = lease_on(9)
    lease.close(leaves=False)
    plan = lease.plan(found, set())
    assert (plan.ledger.left, plan.ledger.held) == (((0, 9),), {"me": ()})
    assert (plan.ledger.resting, plan.claimed) == (("me",), [])


def test_nothing_is_claimed_before_all_have_told_what_they_know() -> None:
    lease, found = lease_on(9)
    lease.hand_out()
    awaits = found._replace(awaited={"you": ((8, 9),)})
    assert lease.plan(awaits, set()).claimed == []
    assert lease.plan(found, set()).claimed == [2]


def test_who_waits_while_another_does_claims_one_and_rests_if_there_is_none() -> None:
    lease, found = lease_on(2)
    lease.hand_out()
    lease.hand_out()
    lease.is_awaited = True
    waits = found._replace(held={**found.held, "you": ()}, resting=("you",))
    assert lease.plan(waits, set()).ledger.resting == ("me", "you")
    more = waits._replace(left=((5, 9),))
    plan = lease.plan(more, set())
    assert (plan.claimed, plan.ledger.resting) == ([5], ("you",))
    lease.is_awaited = False
    assert lease.plan(waits, set()).ledger.resting == ("you",)


def test_an_answer_of_other_samples_is_refused_once_the_epoch_has_begun() -> None:
    other = TERMS._replace(seed=4)
    lease, found = lease_on(9)
    plan = lease.plan(found, set())._replace(ledger=found._replace(terms=other))
    with pytest.raises(OtherTerms, match="begun without it"):
        lease.apply(plan)
    fresh = Lease(0, found, "you", ClaimRate(), Lead(), lambda: 0)
    fresh.apply(plan)
    assert fresh.ledger.terms == other


def test_alone_an_island_takes_the_last_of_its_own_stretches() -> None:
    """Of 64 units two islands have 16 stretches of two units each, in turns."""
    shares = list[list[int]]()
    for place in range(2):
        lease = Lease(
            0,
            Ledger("life", TERMS, ((0, 64),)),
            f"{place}",
            ClaimRate(),
            Lead(),
            lambda: 0,
        )
        taken = iter(lambda one=lease, p=place: one.take_alone(p, 2), None)
        shares.append([number for number in taken if number is not None])
        assert list(lease.out) == shares[place]
        assert not lease.is_fresh
        assert lease.num_claimed == 32
    assert shares[0] == [n for n in range(63, -1, -1) if n // 2 % 2 == 0]
    assert shares[1] == [n for n in range(63, -1, -1) if n // 2 % 2 == 1]


def lease_on(num_units: int, num_finished: int = 0) -> tuple[Lease, Ledger]:
    """With the units that it claims at its first look at the ledger."""
    ledger = Ledger("life", TERMS, ((0, num_units),))
    lease = Lease(0, ledger, "me", ClaimRate(), Lead(), lambda: num_finished)
    plan = lease.plan(ledger, set())
    lease.apply(plan)
    return lease, plan.ledger


def test_what_is_claimed_ahead_is_kept_while_nobody_waits() -> None:
    lease, found = lease_on(9)
    assert list(lease.ahead) == [0, 1]
    plan = lease.plan(found, set())
    assert (list(lease.ahead), plan.claimed, plan.ledger) == ([0, 1], [], found)


def test_what_is_claimed_ahead_is_given_to_one_that_waits() -> None:
    lease, found = lease_on(9)
    waits = found._replace(held={**found.held, "you": ()}, resting=("you",))
    plan = lease.plan(waits, set())
    assert (list(lease.ahead), plan.claimed) == ([], [])
    assert plan.ledger.left == ((0, 9),)


@pytest.mark.parametrize("leaves", [True, False])
def test_at_its_end_a_lease_gives_back_all_that_is_not_finished(leaves: bool) -> None:
    lease, _ = lease_on(9, num_finished=1)
    handed_out = [lease.hand_out(), lease.hand_out()]
    assert handed_out == [0, 1]
    lease.close(leaves)
    assert (list(lease.out), list(lease.ahead)) == ([], [])
    assert lease.ledger.left == ((1, 9),)
    assert (lease.has_ended, lease.is_leaving) == (True, leaves)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_claim_that_is_answered_after_the_end_is_given_back(is_closed: bool) -> None:
    """Training has gone on alone meanwhile, as with a rendezvous that is slow."""
    lease, found = lease_on(9, num_finished=2)
    lease.hand_out()
    lease.hand_out()
    plan = lease.plan(found, set())
    assert plan.claimed == [2, 3]
    if is_closed:
        lease.close(leaves=False)
    else:
        lease.has_ended = True
    lease.apply(plan)
    assert list(lease.ahead) == []
    after = lease.plan(plan.ledger, set()).ledger
    assert (after.left, after.held) == (((2, 9),), {"me": ()})


@pytest.mark.parametrize(("num_islands", "num_left"), [(0, 8), (1, 8), (3, 24)])
def test_the_end_is_near_where_each_island_has_eight_units_left(
    num_islands: int, num_left: int
) -> None:
    for more, is_near in ((0, True), (1, False)):
        held: dict[str, Ranges] = {str(number): () for number in range(num_islands)}
        ledger = Ledger("life", TERMS, ((0, num_left + more),), held)
        lease = Lease(0, ledger, "me", ClaimRate(), Lead(), lambda: 0)
        assert lease.is_near_its_end == is_near


def test_a_claim_whose_answer_was_lost_with_the_books_is_not_lost() -> None:
    known = Ledger("life 1", TERMS, (), {"me": ((0, 1),), "other": ((1, 3),)})
    # The other has begun the books anew and gives unit 2 back; I take it, and never
    # hear of that.
    anew = Ledger("life 2", TERMS, ((2, 3),), {"other": ((1, 2),), "me": ((0, 1),)})
    written, claimed = anew.claim("me", 1)
    assert claimed == ((2, 3),)
    found = written.joined(known, "me", ((0, 1),))
    assert found.left == ((2, 3),)


@pytest.mark.parametrize("gives_back", [False, True])
def test_who_was_evicted_and_is_back_tells_those_that_remember_it_what_it_has(
    gives_back: bool,
) -> None:
    """Nothing is claimed while they wait, also in a life that it has seen."""
    lease, found = lease_on(9)
    if gives_back:
        lease._give_back(lease.ahead)
    # It was evicted, and one that had not seen this life has joined it since.
    late = found._replace(held={"you": ()}, awaited={"me": ((0, 2),)})
    after = lease.plan(late, set()).ledger
    assert after.is_settled
    assert union(after.left, after.held["me"]) == ((0, 9),)


def test_who_is_back_in_the_same_life_remembers_nobody_who_has_ended_since() -> None:
    """What such an island had held was finished, and would be trained on again."""
    ledger = Ledger("life", TERMS, ((6, 12),), {"gone": ((0, 4),), "me": ((4, 6),)})
    lease = Lease(0, ledger, "me", ClaimRate(), Lead(), lambda: 0)
    lease.ahead.extend((4, 5))
    lease.is_fresh = False
    found = ledger._replace(held={"late": ()}, awaited={"me": ((4, 6),)}, revision=7)
    after = lease.plan(found, set()).ledger
    assert after.names == {"late", "me"}
    assert union(after.left, after.held["me"]) == ((4, 12),)


class Sailor:
    """An island without threads: it claims, trains, and dies when it is told to."""

    def __init__(self, name: str, sea: "Sea") -> None:
        self.name, self._sea = name, sea
        self.trained: list[int] = []
        self.has_ended, self._in_hand = False, list[int]()
        ledger = Ledger(f"alone {name}", TERMS, ((0, sea.num_units),))
        self.lease = Lease(
            0, ledger, name, ClaimRate(), Lead(), lambda: len(self.trained)
        )

    def look(self) -> None:
        """One turn of the thread of its pool."""
        key_is_gone = self._sea.text == ""
        if key_is_gone:
            begun = self.lease.ledger.begun_anew(self.name, self._sea.new_life())
            self._sea.text = begun.to_json()
        found = Ledger.from_json(self._sea.text)
        plan = self.lease.plan(found, found.names - set(self._sea.live))
        self._sea.text = plan.ledger.to_json()
        self._sea.num_twice += self.lease.apply(plan)

    def ask(self) -> None:
        """What the training thread does at a batch; one more is in hand already."""
        if self.has_ended:
            return self._train()
        self.lease.is_awaited = True
        if not self.lease.ahead:
            self.look()
        if self.lease.ahead:
            self._in_hand.append(self.lease.hand_out())
        elif self.lease.ledger.is_over:
            self.has_ended = self.lease.has_ended = True
        self.lease.is_awaited = bool(not self.lease.ahead and not self.has_ended)
        if len(self._in_hand) > 1 or self.has_ended:
            self._train()
        return None

    def ask_alone(self) -> None:
        """The same where the rendezvous cannot be reached."""
        if not self.has_ended and not self.lease.ahead:
            live = sorted(self._sea.live)
            number = self.lease.take_alone(live.index(self.name), len(live))
            self._in_hand += [] if number is None else [number]
        elif not self.has_ended:
            self._in_hand.append(self.lease.hand_out())
        if len(self._in_hand) > 1:
            self._train()

    def _train(self) -> None:
        if self._in_hand:
            self.trained.append(self._in_hand.pop(0))


class Sea:
    """Islands around a rendezvous that is a text."""

    def __init__(self, num_islands: int, num_units: int) -> None:
        self.num_units, self.text, self.num_twice = num_units, "", 0
        self._num_lives = 0
        self.dead: list[Sailor] = []
        self.live: dict[str, Sailor] = {}
        for _ in range(num_islands):
            self.join()

    def new_life(self) -> str:
        self._num_lives += 1
        return f"life {self._num_lives}"

    def join(self) -> None:
        name = f"island {len(self.live) + len(self.dead)}"
        self.live[name] = Sailor(name, self)
        self.live[name].look()

    def one(self, pick: int) -> Sailor:
        return list(self.live.values())[pick % len(self.live)]

    def kill(self, pick: int) -> Sailor:
        dead = self.one(pick)
        del self.live[dead.name]
        self.dead.append(dead)
        return dead

    def lose_its_memory(self) -> None:
        self.text = ""

    def run_to_the_end(self) -> None:
        for _ in range(20 * self.num_units + 100):
            for sailor in self.live.values():
                sailor.look()
                sailor.ask()
            if all(s.has_ended and not s._in_hand for s in self.live.values()):
                return
        raise AssertionError(f"no end: {self.text}")

    def trained(self) -> "Counter[int]":
        everybody = [*self.live.values(), *self.dead]
        return Counter(number for sailor in everybody for number in sailor.trained)


picks = st.lists(st.integers(0, 5), max_size=60)


@settings(deadline=None)
@given(num=st.integers(1, 5), units=st.integers(0, 40), picks=picks)
def test_every_unit_is_trained_on_once(num: int, units: int, picks: list[int]) -> None:
    sea = Sea(num, units)
    for pick in picks:
        sea.one(pick).ask()
    sea.run_to_the_end()
    assert sea.trained() == Counter(range(units))
    assert sea.num_twice == 0


@settings(deadline=None)
@given(
    units=st.integers(1, 40),
    before=picks,
    between=picks,
    deaths=st.lists(st.integers(0, 5), max_size=3),
)
def test_what_the_dead_held_is_trained_on_by_others(
    units: int, before: list[int], between: list[int], deaths: list[int]
) -> None:
    sea = Sea(4, units)
    for pick in before:
        sea.one(pick).ask()
    unreported, last_steps = set[int](), set[int]()
    for death in deaths:
        dead = sea.kill(death)
        if all(sailor.has_ended for sailor in sea.live.values()):
            # Nobody is left who asks for more of this epoch.
            last_steps |= set(dead._in_hand)
        unreported |= set(dead.trained) & set(numbers(holding(sea, dead.name)))
        for pick in between:
            sea.one(pick).ask()
    sea.run_to_the_end()
    trained = sea.trained()
    assert set(range(units)) - set(trained) <= last_steps
    # All that the ledger knew to be finished is not done again.
    assert {n for n, times in trained.items() if times > 1} <= unreported


def holding(sea: Sea, name: str) -> Ranges:
    return Ledger.from_json(sea.text).held.get(name, ())


@settings(deadline=None)
@given(
    num=st.integers(1, 4),
    units=st.integers(1, 60),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "lose", "join", "alone"]), st.integers(0, 5)
        ),
        max_size=60,
    ),
)
def test_a_rendezvous_that_forgets_loses_no_unit(
    num: int, units: int, steps: list[tuple[str, int]]
) -> None:
    sea = Sea(num, units)
    for step, pick in steps:
        if step == "lose":
            sea.lose_its_memory()
        elif step == "join" and len(sea.live) < 6 and sea.text:
            sea.join()
        elif step == "alone":
            sea.one(pick).ask_alone()
        else:
            sea.one(pick).ask()
    sea.run_to_the_end()
    assert set(sea.trained()) == set(range(units))


@settings(deadline=None)
@given(num=st.integers(1, 4), picks=st.lists(st.integers(0, 9), max_size=40))
def test_without_a_rendezvous_all_shares_are_each_ones_own(
    num: int, picks: list[int]
) -> None:
    sea = Sea(num, 40)
    for sailor in sea.live.values():
        sailor.look()
    for pick in picks:
        sea.one(pick).ask_alone()
    trained = sea.trained()
    assert all(times == 1 for times in trained.values())
    sea.run_to_the_end()
    assert set(sea.trained()) == set(range(40))


def test_a_slow_island_ends_with_less_and_gives_back_what_it_holds() -> None:
    sea = Sea(2, 60)
    fast, slow = sea.live.values()
    for step in range(200):
        fast.ask()
        if step % 5 == 0:
            slow.ask()
    sea.run_to_the_end()
    assert sea.trained() == Counter(range(60))
    assert len(fast.trained) > 3 * len(slow.trained) > 0
