"""The pool over a real rendezvous, which may go, hang and come back: nobody waits."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from torch._C._distributed_c10d import HashStore, Store
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_adpsgd.epochs import pool
from lightning_adpsgd.epochs.batches import SharedBatches
from lightning_adpsgd.epochs.claims import ClaimRate, LeaderBroadcast, LearnerIndex
from lightning_adpsgd.epochs.lease import Lead, Lease
from lightning_adpsgd.epochs.ledger import Ledger
from lightning_adpsgd.epochs.pool import IslandPool, PoolTimeouts
from lightning_adpsgd.epochs.work_units import EpochState, Terms
from lightning_adpsgd.islands.member_list import Member, MemberList
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousUnreachable
from lightning_adpsgd.islands.service import MOST_ERRORS
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links.credentials import Credentials
from tests.helpers import PATIENCE_S, engine_threads, together, until
from tests.islands.archipelago import Server, rendezvous, still_clock

T = TypeVar("T")
QUICK = PoolTimeouts(look_s=0.02, wait_s=0.01, answer_s=60.0, end_s=60.0)


CREDENTIALS = Credentials(b"0123456789abcdef")


class Members:
    """A roll that a test writes."""

    def __init__(self, number: int, names: list[str], origin: str = "origin") -> None:
        live = {n: Member(n, name, "", (), origin) for n, name in enumerate(names)}
        self.member, self.members, self.is_in = live[number], MemberList(1, live), True
        self.left, self.steps_of, self.away = frozenset[str](), dict[int, int](), ""

    def take_weights_of(self, origin: str) -> None:
        """All of them, as when an island has found itself behind another training."""
        now = {n: m._replace(origin=origin) for n, m in self.members.by_number.items()}
        self.member = now[self.member.number]
        self.members = MemberList(self.members.epoch + 1, now)

    def strike_off(self, number: int) -> None:
        rest = {n: m for n, m in self.members.by_number.items() if n != number}
        self.members = MemberList(self.members.epoch + 1, rest)


class Island:
    """Trains as a Trainer does: one batch in hand beyond the one that it trains on."""

    def __init__(
        self,
        server: Server,
        number: int,
        num: int,
        times: PoolTimeouts,
        seed: int = 7,
        origin: str = "origin",
        num_rows: int = 60,
    ) -> None:
        names = [f"name {n}" for n in range(num)]
        self.members: Any = Members(number, names, origin)
        self.pool = IslandPool(
            Rendezvous(server.address, credentials=CREDENTIALS),
            self.members,
            lambda: None,
            times,
        )
        self._is_training = False
        self.batches = SharedBatches(
            BatchSampler(SequentialSampler(range(num_rows)), 3, False),
            LearnerIndex(0, 1),
            seed,
            LeaderBroadcast(HashStore(), LearnerIndex(0, 1), lambda: None),
            lambda: self.pool,
            lambda: self._is_training,
            reads_ahead=False,
        )
        self.pool.start()
        self.trained: list[list[int]] = []
        self._in_hand: list[list[int]] = []
        self._iterator: Iterator[list[int]] = iter(())

    def begin(self, epoch: int = 0) -> None:
        self.batches.start_epoch(epoch)
        self._iterator = iter(self.batches)
        self._in_hand = [batch for batch in [next(self._iterator, None)] if batch]

    def step(self) -> bool:
        """Trains on a batch; returns whether there was one."""
        if not self._in_hand:
            return False
        batch = next(self._iterator, None)
        self._in_hand += [] if batch is None else [batch]
        self._is_training = True
        self.batches.begin_batch()
        self.trained.append(self._in_hand.pop(0))
        self._is_training = False
        return True

    def run(self, epoch: int = 0) -> None:
        self.begin(epoch)
        self.go_on()

    def go_on(self) -> None:
        while self.step():
            pass


@contextmanager
def pools(
    server: Server,
    num: int,
    times: PoolTimeouts = QUICK,
    origin: str = "origin",
    num_rows: int = 60,
) -> Iterator[list[Island]]:
    made = [Island(server, n, num, times, n, origin, num_rows) for n in range(num)]
    try:
        yield made
    finally:
        for island in made:
            island.batches.close()
            island.pool.leave(5.0)


def rows(islands: list[Island]) -> Counter[int]:
    batches = chain.from_iterable(island.trained for island in islands)
    return Counter(chain.from_iterable(batches))


def test_islands_draw_from_one_order_and_end_together() -> None:
    with rendezvous() as server, pools(server, 3) as islands:
        for epoch in range(2):
            together([partial(island.run, epoch) for island in islands])
            assert rows(islands) == Counter(list(range(60)) * (epoch + 1))
        assert len({island.batches.seed for island in islands}) == 1
    assert engine_threads() == []


class FarRendezvous(Rendezvous):
    """A client whose every request takes a round trip of a long link."""

    def ask(self, action: Callable[[Store], T]) -> T:
        def slowly(store: Store) -> T:
            far: Any = _Far(store)
            return action(far)

        return super().ask(slowly)


class _Far:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def late(*words: Any) -> Any:
            time.sleep(0.02)
            try:
                return method(*words)
            finally:
                time.sleep(0.02)

        return late


def test_who_is_far_from_the_rendezvous_gets_batches_beside_one_that_is_near() -> None:
    """Steps take 5 ms and round trips 40: a claim for each step would starve it."""

    def train(island: Island) -> None:
        island.begin()
        while island.step():
            time.sleep(0.005)

    times = PoolTimeouts(answer_s=60.0, end_s=60.0)
    with rendezvous() as server, pools(server, 2, times, num_rows=1200) as (near, far):
        pool: Any = far.pool
        pool._rendezvous.__class__ = FarRendezvous
        together([partial(train, near), partial(train, far)])
        assert rows([near, far]) == Counter(range(1200))
        assert len(far.trained) > 100, "of 400"


def test_what_a_dead_one_holds_is_waited_for_and_trained_on() -> None:
    with rendezvous() as server, pools(server, 2) as (one, dead):
        together([one.begin, dead.begin])
        for _ in range(3):
            assert one.step()
            assert dead.step()
        runs = threading.Thread(target=one.go_on, daemon=True)
        runs.start()
        pool: Any = one.pool
        until(lambda: pool._lease.ledger.resting != (), "the end of what is left")
        assert runs.is_alive()
        assert len(rows([one, dead])) < 60
        dead.members.is_in = False
        one.members.strike_off(1)
        runs.join(30)
        assert not runs.is_alive()
        assert set(rows([one, dead])) == set(range(60))


def test_a_rendezvous_that_hangs_is_not_waited_for() -> None:
    hangs, times = threading.Event(), PoolTimeouts(0.02, 0.01, 0.05, 0.05)
    with rendezvous() as server, pools(server, 1, times) as (one,):
        one.begin()
        ask = one.pool._rendezvous.ask

        def hang(action: Any) -> Any:
            hangs.wait(60)
            return ask(action)

        one.pool._rendezvous.ask = hang  # pyright: ignore
        one.go_on()
        assert rows([one]) == Counter(range(60))
        hangs.set()


def test_an_island_that_never_finds_the_rendezvous_trains_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rendezvous() as server:
        address = server.address
    server.address = address
    with pools(server, 1, PoolTimeouts(0.02, 0.01, 0.05, 0.05, start_s=0.05)) as (one,):
        one.run()
        assert rows([one]) == Counter(range(60))
        one.run(1)
        assert rows([one]) == Counter(list(range(60)) * 2)
    (told,) = caplog.messages
    assert "the pool of batches cannot be reached" in told
    assert "continues with its share of the remaining batches" in told


def test_old_epochs_are_deleted_at_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_KEPT_EPOCHS", 2)
    with rendezvous() as server, pools(server, 1) as (one,):
        for epoch in range(4):
            one.run(epoch)
        one.pool.leave(5.0)  # reports the last epoch
        client = Rendezvous(server.address, answer_s=60.0)
        keys = [f"pool/origin/{epoch}" for epoch in range(4)]
        kept = client.ask(lambda store: [store.check([key]) for key in keys])
        client.close()
    assert kept == [False, False, True, True]


def test_a_checkpoint_of_one_is_what_all_go_on_with() -> None:
    with rendezvous() as server, pools(server, 1) as (before,):
        before.begin()
        for _ in range(5):
            before.step()
        state = before.batches.state()
    assert state is not None
    trained = list(chain.from_iterable(before.trained))
    with rendezvous() as server, pools(server, 2) as islands:
        islands[0].batches.load(EpochState(*state))
        islands[0].begin()
        together([islands[0].go_on, islands[1].run])
        assert sorted([*trained, *rows(islands).elements()]) == list(range(60))


def test_a_resume_trains_again_on_what_came_after_its_checkpoint() -> None:
    with rendezvous() as server:
        with pools(server, 1) as (before,):
            before.begin()
            for _ in range(5):
                before.step()
            state, trained = before.batches.state(), rows([before])
            before.go_on()
        with pools(server, 2, origin="another") as islands:
            assert state is not None
            islands[0].batches.load(EpochState(*state))
            islands[0].begin()
            together([islands[0].go_on, islands[1].run])
            assert rows(islands) + trained == Counter(range(60))


@pytest.mark.parametrize("num_steps", [5, 100])
def test_a_later_training_finds_no_epoch_of_an_earlier_one_done(num_steps: int) -> None:
    """The rendezvous goes on, and whoever trained before has ended or was killed."""
    with rendezvous() as server:
        with pools(server, 1) as (before,):
            before.begin()
            for _ in range(num_steps):
                before.step()
        with pools(server, 2, origin="another") as islands:
            together([island.run for island in islands])
            assert rows(islands) == Counter(range(60))


def test_who_joins_late_gets_the_rest_of_the_epoch_though_its_first_island_left() -> (
    None
):
    with rendezvous() as server, pools(server, 2) as (first, second):
        together([first.begin, second.begin])
        for _ in range(3):
            first.step()
            second.step()
        first.batches.close()
        first.pool.leave(5.0)
        second.members.strike_off(0)
        late = Island(server, 2, 3, QUICK)
        late.members.strike_off(0)
        together([second.go_on, late.run])
        late.batches.close()
        late.pool.leave(5.0)
        assert rows([first, second, late]) == Counter(range(60))


def test_who_comes_several_epochs_late_finds_that_they_are_done() -> None:
    """As after a long validation, which the others have left out."""
    with rendezvous() as server, pools(server, 2, num_rows=9) as (one, late):
        together([one.run, late.run])
        for epoch in range(1, 6):
            one.run(epoch)
        for epoch in range(1, 6):
            late.run(epoch)
        assert rows([one, late]) == Counter(list(range(9)) * 6)


def test_who_began_without_the_others_shares_their_next_epoch() -> None:
    """Its seed is another, so it has no part in theirs until an epoch begins."""
    with rendezvous() as server, pools(server, 2) as (one, apart):
        pool: Any = apart.pool
        ask, pool._times = pool._rendezvous.ask, replace(QUICK, start_s=0.1)

        def is_away(action: object) -> None:
            raise RendezvousUnreachable("it is away")

        pool._rendezvous.ask = is_away
        # A turn that had begun before would still find the ledger of the other.
        until(lambda: bool(pool.away), "a turn without the rendezvous")
        one.begin()
        apart.begin()
        pool._rendezvous.ask, pool._times = ask, QUICK
        until(lambda: pool._is_apart, "the ledger of the other")
        together([one.go_on, apart.go_on])
        before = rows([one, apart])
        together([partial(one.run, 1), partial(apart.run, 1)])
        assert rows([one, apart]) - before == Counter(range(60))
        assert one.batches.seed == apart.batches.seed
        # Else it would wait for the others in later epochs without the rendezvous.
        assert not pool._is_apart


def test_one_that_takes_weights_of_another_training_ends_its_own_epoch_first() -> None:
    """What it has trained on is done for the weights that it had, and for no others."""
    with rendezvous() as server, pools(server, 2) as (one, ahead):
        ahead.members.take_weights_of("another")
        together([one.begin, ahead.begin])
        for _ in range(3):
            one.step()
        one.members.take_weights_of("another")
        together([one.go_on, ahead.go_on])
        assert rows([one]) == rows([ahead]) == Counter(range(60))
        together([partial(one.run, 1), partial(ahead.run, 1)])
        assert rows([one, ahead]) == Counter(list(range(60)) * 3)


def test_an_epoch_whose_loader_was_replaced_gives_back_nothing_that_is_done() -> None:
    with rendezvous() as server, pools(server, 1) as (island,):
        island.run()
        island.batches.retire()
        assert island.batches._num_finished(0) == len(island.trained) == 20
        assert island.batches._num_finished(1) == 0


def test_islands_with_other_samples_are_told() -> None:
    with rendezvous() as server, pools(server, 2) as (one, other):
        one.begin()
        other.batches._batches = BatchSampler(SequentialSampler(range(61)), 3, False)
        with pytest.raises(ValueError, match=r"61 samples.*60 samples.* in others"):
            other.begin()


ALL_TO_ME = json.dumps(
    ["x", [7, [[0, 20]], "x"], [], {"stranger": [[0, 20]]}, {}, [], 0]
)


@pytest.mark.parametrize("text", ["nonsense", "[]", "\U0001f30a", ALL_TO_ME])
def test_nonsense_in_the_place_of_the_ledger_loses_nothing(text: str) -> None:
    """It is not signed with the token of these islands, whoever wrote it."""
    with rendezvous() as server, pools(server, 2) as islands:
        for island in islands:
            island.begin()
        for _ in range(3):
            for island in islands:
                island.step()
        client = Rendezvous(server.address, answer_s=60.0)
        client.ask(lambda store: store.set("pool/origin/0", text))
        client.close()
        together([island.go_on for island in islands])
        assert rows(islands) == Counter(range(60))
        assert [o.pool.num_errors for o in islands] == [0, 0]


def test_islands_that_do_not_come_to_the_end_of_an_epoch_are_named_with_their_hosts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    members: Any = Members(0, ["name 0"])
    late = Member(1, "start 1", "node17", ())
    members.members = MemberList(2, {**members.members.by_number, 1: late})
    never: Any = SimpleNamespace()
    pool = IslandPool(never, members, lambda: None, QUICK)
    held = dict.fromkeys(("name 0", "start 1", "stranger"), ((0, 1),))
    lease: Any = SimpleNamespace(
        number=4, ledger=SimpleNamespace(held=held, resting=("name 0",))
    )
    pool._say_who_did_not_come(lease)
    expected = "epoch 4 ends here without island 1 on host node17, stranger: "
    assert expected in caplog.text


def test_an_old_ledger_that_is_written_again_hands_nothing_out_twice() -> None:
    with rendezvous() as server, pools(server, 2) as islands:
        for island in islands:
            island.begin()
        client = Rendezvous(server.address, answer_s=60.0)
        old = client.ask(lambda store: store.get("pool/origin/0")).decode()
        for _ in range(5):
            for island in islands:
                island.step()
        client.ask(lambda store: store.set("pool/origin/0", old))
        client.close()
        together([island.go_on for island in islands])
        assert rows(islands) == Counter(range(60))


def test_a_pool_that_fails_on_and_on_ends_its_learner_loudly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unforeseen")

    with rendezvous() as server, pools(server, 1) as (island,):
        monkeypatch.setattr(IslandPool, "_meet", fail)
        with pytest.raises(RuntimeError, match=f"failed {MOST_ERRORS} times in a row"):
            island.run()


def test_a_ledger_of_more_units_than_ones_own_is_not_taken_for_damage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread may read it again before the training thread has counted its units."""
    read_again = threading.Event()

    def parsed(text: str | None, lease: Any) -> Any:
        found = parse(text, lease)
        if found is not None and lease is rest.pool._lease and not lease.is_fresh:
            read_again.set()
        return found

    with rendezvous() as server, pools(server, 1) as (whole,):
        whole.begin()
        rest = Island(server, 1, 2, QUICK)
        rest.batches.load(EpochState(0, 7, 60, ((54, 60),)))
        cut, parse = rest.batches._cut, pool._parsed

        def cut_late(*arguments: Any) -> Any:
            units = cut(*arguments)
            assert len(units) == 2 or read_again.wait(PATIENCE_S)
            return units

        monkeypatch.setattr(rest.batches, "_cut", cut_late)
        monkeypatch.setattr(pool, "_parsed", parsed)
        rest.begin()
        rest.batches.close()
        rest.pool.leave(5.0)
    assert "starts over" not in caplog.text


# --- turns of the thread, taken by hand


class ByHand:
    """A pool without its thread, over a store, and the time that it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num: int = 1) -> None:
        self.clock = still_clock(monkeypatch, pool)
        self.store, self.closed = HashStore(), list[int]()
        rendezvous: Any = SimpleNamespace(
            ask=lambda action: action(self.store),
            signatures=Signatures(Credentials(), "job"),
            close=lambda: self.closed.append(1),
        )
        self.members: Any = Members(0, [f"name {n}" for n in range(num)])
        self.pool: Any = IslandPool(rendezvous, self.members, lambda: None, TIMES)
        ledger = Ledger("life", TERMS, ((0, 40),))
        rate, lead = ClaimRate(), Lead()
        self.lease = Lease(0, ledger, "name 0", rate, lead, lambda: 0)
        self.pool._lease = self.lease

    def written(self) -> Ledger:
        return Ledger.from_json(self.store.get("pool/origin/0").decode())


TIMES, TERMS = PoolTimeouts(), Terms(7, ((0, 40),), "40 samples")


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> ByHand:
    return ByHand(monkeypatch)


def test_who_is_off_the_list_claims_nothing_and_gives_all_back_at_its_end(
    by_hand: ByHand,
) -> None:
    by_hand.pool._take_turn()
    assert by_hand.written().held == {"name 0": ((0, 2),)}
    by_hand.members.is_in = False
    assert [by_hand.lease.hand_out() for _ in range(2)] == [0, 1]
    by_hand.pool._take_turn()
    assert by_hand.written().held == {"name 0": ((0, 2),)}
    by_hand.pool._close(leaves=True)
    by_hand.pool._ending = True
    by_hand.pool._work()
    assert by_hand.written() == by_hand.written()._replace(left=((0, 40),), held={})
    assert by_hand.closed == [1]


def test_a_store_that_has_lost_the_ledger_since_it_was_read_is_away(
    by_hand: ByHand,
) -> None:
    by_hand.pool._take_turn()
    by_hand.lease.close(leaves=True)
    swap = by_hand.store.compare_set

    class Emptied:
        def __getattr__(self, name: str) -> Any:
            return getattr(by_hand.store, name)

        def compare_set(self, key: str, old: str, new: str) -> bytes:
            return swap(key, old, new) if old == new else old.encode()

    emptied: Any = Emptied()
    by_hand.pool._rendezvous.ask = lambda action: action(emptied)
    by_hand.pool._ending = True  # it rests after the absence
    by_hand.pool._take_turn()
    assert by_hand.pool.away == "it has lost its data"


class Contended:
    """A store in which another island claims before the first claim and in a rest."""

    def __init__(self, by_hand: ByHand) -> None:
        self._by_hand, self.num_claims, self.rests = by_hand, 0, list[float]()
        by_hand.clock.sleep = self._rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._by_hand.store, name)

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        self.num_claims += bool(new)  # else it is a read
        if new and self.num_claims == 1:
            self._claim("name 1")
        return self._by_hand.store.compare_set(key, old, new)

    def _rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self._claim("name 2")

    def _claim(self, name: str) -> None:
        ledger = self._by_hand.written()
        ((first, last),) = ledger.left
        held = {**ledger.held, name: ((first, first + 1),)}
        changed = ledger._replace(held=held, left=((first + 1, last),))
        self._by_hand.store.set("pool/origin/0", changed.to_json())


def test_who_is_beaten_to_a_claim_rests_and_reads_what_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 64 islands, one that retried at once was beaten again and again."""
    by_hand = ByHand(monkeypatch, 3)
    by_hand.pool._take_turn()
    by_hand.lease.hand_out()
    contended: Any = Contended(by_hand)
    by_hand.pool._rendezvous.ask = lambda action: action(contended)
    by_hand.pool._take_turn()
    assert contended.num_claims == 2
    [rest] = contended.rests
    assert 0.0 <= rest <= 0.003 * 2
    assert by_hand.written().held.keys() == {"name 0", "name 1", "name 2"}


def test_an_island_that_was_never_seen_is_gone_after_a_while_and_others_at_once(
    by_hand: ByHand,
) -> None:
    ledger = Ledger("life", TERMS, (), {"name 0": (), "seen": (), "new": ()})
    by_hand.pool._seen.add("seen")
    for seconds, gone in ((0.0, {"seen"}), (3.0, {"seen"}), (0.25, {"seen", "new"})):
        by_hand.clock.now += seconds
        assert by_hand.pool._gone(ledger) == gone
    # It was on the list meanwhile: the time of its absence begins anew.
    assert by_hand.pool._gone(ledger._replace(held={})) == set()
    assert by_hand.pool._gone(ledger) == {"seen"}


@pytest.mark.parametrize(
    ("num_left", "turn_s", "patience_s"),
    [(40, 0.01, 0.25), (8, 0.01, 3.0), (8, 2.0, 6)],
)
def test_an_answer_is_waited_for_longer_near_the_end_and_over_a_long_link(
    by_hand: ByHand, num_left: int, turn_s: float, patience_s: float
) -> None:
    by_hand.lease.ledger = by_hand.lease.ledger._replace(left=((0, num_left),))
    by_hand.pool._lead.took(turn_s)
    begin = by_hand.clock.now
    for seconds, is_over in ((patience_s, False), (patience_s + 0.125, True)):
        by_hand.clock.now = begin + seconds
        assert by_hand.pool._hears_nothing(by_hand.lease, begin) == is_over
    by_hand.pool._heard_at = by_hand.clock.now
    assert not by_hand.pool._hears_nothing(by_hand.lease, begin)


def test_a_ledger_that_others_have_yet_to_complete_is_no_answer(
    by_hand: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    pool, ledger = by_hand.pool, by_hand.lease.ledger
    pool.away = "it is away"
    for _ in range(2):
        pool._say_it_is_alone()
    by_hand.lease.ledger = ledger._replace(awaited={"name 1": ((0, 1),)})
    pool._note_presence(by_hand.lease)
    assert (pool.away, pool._heard_at) == ("it is away", 0.0)
    by_hand.lease.ledger = ledger
    for _ in range(2):
        pool._note_presence(by_hand.lease)
    assert (pool.away, pool._heard_at) == ("", 100.0)
    away, back = caplog.messages
    assert "continues with its share of the remaining batches" in away
    assert back == "the pool of batches is back"


@pytest.mark.parametrize(
    ("is_awaited", "fails", "pause_s"), [(0, 0, 0.5), (1, 0, 0.05), (1, 1, 0.5)]
)
def test_a_pool_that_is_waited_for_looks_more_often_unless_it_fails(
    by_hand: ByHand, is_awaited: bool, fails: int, pause_s: float
) -> None:
    pauses = list[float]()
    by_hand.pool._state.wait_for = lambda _, seconds: pauses.append(seconds)
    by_hand.lease.is_awaited, by_hand.pool._in_a_row = bool(is_awaited), fails
    by_hand.pool._asked = True
    by_hand.pool._rest()
    assert (pauses, by_hand.pool._asked) == ([pause_s], False)


def test_training_waits_for_the_pool_only_while_it_asks_for_a_unit(
    by_hand: ByHand,
) -> None:
    """An island that waits lets the others give back what they have claimed ahead."""
    waited = list[bool]()

    def fail() -> None:
        waited.append(by_hand.lease.is_awaited)
        raise RuntimeError("a learner has failed")

    by_hand.pool._raise_if_failed = fail
    by_hand.pool._state.wait = lambda seconds: None
    with pytest.raises(RuntimeError, match="a learner has failed"):
        by_hand.pool.next(0, waits=True)
    assert (waited, by_hand.lease.is_awaited) == ([True], False)
