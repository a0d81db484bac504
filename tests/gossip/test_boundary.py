"""Pairs that meet at step boundaries, over threads."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd import reference
from lightning_adpsgd.coordination.store import LearnerFailed
from lightning_adpsgd.gossip import peers, waiting
from lightning_adpsgd.gossip.codecs import INT4
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pairing import NO, READY, Pairing
from lightning_adpsgd.gossip.peers import Peers
from lightning_adpsgd.gossip.protocol import Patience
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.matrices import complete
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import PeerLost, Pending
from tests.helpers import (
    PATIENCE,
    PATIENCE_S,
    engine_threads,
    engines,
    engines_of_super_learners,
    random_rows,
    running,
    take_first,
    together,
    until,
)
from tests.threads import ThreadTransport

pytestmark = pytest.mark.usefixtures("engine_device")
LR = 0.3
A_MOMENT = 0.002  # seconds; learners skip and meet in the same run


class Boundary(NamedTuple):
    """A step of a learner, and with whom it exchanged after it."""

    learner: int
    step: int
    partner: int | None


def pairs_of(
    rows: Tensor, topology: str, max_wait: float, **options: Any
) -> tuple[list[Tensor], list[Gossip]]:
    """Engines in which pairs meet."""
    return engines(rows, topology, in_pairs=True, max_wait=max_wait, **options)


def gradient(weights: Tensor, learner: int, number: int) -> Tensor:
    """Of a bowl, with noise of the learner's and the step's own."""
    noise = random_rows(1, len(weights), seed=1000 * learner + number)[0]
    return weights.sin() + noise.to(weights.device)


def train(
    vector: Tensor,
    gossip: Gossip,
    num_steps: int,
    pause: Callable[[int], float] = lambda number: 0.0,
) -> list[Boundary]:
    """Steps down the bowl; returns what came of each boundary."""
    own, found = gossip.members.live_schedule.own, list[Boundary]()
    for number in range(num_steps):
        time.sleep(pause(number))
        gossip.before_update()
        vector.sub_(LR * gradient(vector, own, number))
        gossip.after_update()
        ages = gossip.statistics().peer_ages
        met = [peer for peer, age in ages.items() if age == 0]
        found.append(Boundary(own, number, met[0] if met else None))
    return found


def in_order(logs: Sequence[list[Boundary]]) -> list[reference.Event]:
    """The events of all learners in an order in which they may have happened."""
    left, events = [list(log) for log in logs], list[reference.Event]()
    while any(left):
        heads = {log[0].learner: log[0] for log in left if log}
        ready = [
            b
            for b in heads.values()
            if b.partner is None
            or (b.partner in heads and heads[b.partner].partner == b.learner)
        ]
        assert ready, f"no two of these have met each other: {heads}"
        first = ready[0]
        ends = [first] if first.partner is None else [first, heads[first.partner]]
        events += [reference.Step(b.learner, b.step) for b in ends]
        if first.partner is not None:
            events.append(reference.Exchange(first.learner, first.partner))
        for one in ends:
            left[one.learner].pop(0)
    return events


def replayed(rows: Tensor, events: list[reference.Event]) -> Tensor:
    """What the matrix of weights becomes by these events."""

    def gradients(weights: Tensor, number: int) -> Tensor:
        return torch.stack([gradient(w, i, number) for i, w in enumerate(weights)])

    *_, (found, pending) = reference.asynchronous(
        rows, gradients, reference.ready_pairs(events), LR
    )
    assert not pending.any()
    return found


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(2, 5),
    topology=st.sampled_from(["complete", "ring"]),
    seed=st.integers(0, 10_000),
)
def test_threads_do_what_the_matrix_does(size: int, topology: str, seed: int) -> None:
    """Whoever comes when: the same weights, with each average before the next step."""
    rows = random_rows(size)
    vectors, gossips = pairs_of(rows, topology, A_MOMENT)
    draws = [random.Random(f"{seed} {i}") for i in range(size)]

    def learner(i: int) -> list[Boundary]:
        return train(
            vectors[i], gossips[i], 12, lambda n: draws[i].choice([0, 0, A_MOMENT])
        )

    with running(gossips):
        logs = together([lambda i=i: learner(i) for i in range(size)])
        statistics = [gossip.statistics() for gossip in gossips]
    expected = replayed(rows, in_order(logs))
    torch.testing.assert_close(torch.stack(vectors), expected, atol=1e-12, rtol=0)
    for one, log in zip(statistics, logs, strict=True):
        assert one.exchanges + one.skipped == len(log)
        assert set(one.staleness) <= {0}
    assert engine_threads() == []


def test_two_with_patience_are_synchronous() -> None:
    rows = random_rows(2)
    vectors, gossips = pairs_of(rows, "complete", PATIENCE_S / 2)
    with running(gossips):
        together([lambda i=i: train(vectors[i], gossips[i], 6) for i in range(2)])
        counted = [gossip.statistics() for gossip in gossips]

    def gradients(weights: Tensor, number: int) -> Tensor:
        return torch.stack([gradient(w, i, number) for i, w in enumerate(weights)])

    steps = reference.synchronous(
        rows, gradients, lambda k: complete(2).to(rows.device), LR
    )
    expected = take_first(steps, 6)[-1]
    torch.testing.assert_close(torch.stack(vectors), expected, atol=1e-12, rtol=0)
    assert [(one.exchanges, one.skipped) for one in counted] == [(6, 0)] * 2
    assert all(0 < one.partner_seconds <= one.exposed_seconds for one in counted)


def test_one_whose_peers_are_away_skips_and_goes_on() -> None:
    rows = random_rows(3)
    vectors, gossips = pairs_of(rows, "complete", A_MOMENT)
    with running(gossips):
        assert [b.partner for b in train(vectors[0], gossips[0], 5)] == [None] * 5
        found = gossips[0].statistics()
    assert (found.exchanges, found.skipped) == (0, 5)
    assert found.bytes_sent == 0


def test_one_that_is_slow_costs_the_others_no_more_than_the_patience() -> None:
    """A wait of a step of the slow one would be ten times as long."""
    patience, num_steps = 0.1, 8
    vectors, gossips = pairs_of(random_rows(3), "complete", patience)

    def learner(i: int) -> list[Boundary]:
        slow = not i
        steps, pause = (1, 10 * patience) if slow else (num_steps, 0.0)
        return train(vectors[i], gossips[i], steps, lambda number: pause)

    with running(gossips):
        logs = together([lambda i=i: learner(i) for i in range(3)])
        found = [gossip.statistics() for gossip in gossips]
    for one, log in zip(found[1:], logs[1:], strict=True):
        assert one.exchanges + one.skipped == len(log) == num_steps
        # Twice, for a machine that has other work.
        assert one.partner_seconds < 2 * patience * num_steps


def test_a_super_learner_that_is_alone_waits_for_nobody() -> None:
    vectors, gossips = pairs_of(random_rows(1), "complete", PATIENCE_S)
    with running(gossips):
        train(vectors[0], gossips[0], 3)
        assert gossips[0].statistics().skipped == 0


def test_boundaries_between_rounds_are_passed() -> None:
    vectors, gossips = pairs_of(random_rows(2), "complete", A_MOMENT, every=3)
    with running(gossips):
        train(vectors[0], gossips[0], 7)
        assert gossips[0].statistics().skipped == 2


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.int8, INT4])
def test_what_travels_in_fewer_bits_conserves_the_sum(wire_dtype: torch.dtype) -> None:
    rows = random_rows(4, length=50)
    vectors, gossips = pairs_of(
        rows, "complete", A_MOMENT, wire_dtype=wire_dtype, chunk_elements=20
    )

    def learner(i: int) -> None:
        for _ in range(10):
            gossips[i].before_update()
            vectors[i].add_(1.0)
            gossips[i].after_update()

    with running(gossips):
        together([lambda i=i: learner(i) for i in range(4)])
        assert sum(gossip.statistics().exchanges for gossip in gossips) > 0
    total = torch.stack(vectors).sum(0)
    torch.testing.assert_close(total, rows.sum(0) + 40, atol=1e-10, rtol=0)


def test_all_learners_of_a_super_learner_meet_or_skip_together() -> None:
    """Three super-learners of two, of which one is always left over."""
    rows = random_rows(3, length=8)
    vectors, gossips = engines_of_super_learners(
        rows, 2, "complete", in_pairs=True, max_wait=A_MOMENT
    )
    everyone = [gossip for of_group in gossips for gossip in of_group]
    with running(everyone):
        logs = together(
            [
                lambda s=s, n=n: train(vectors[s][n], gossips[s][n], 15)
                for s in range(3)
                for n in range(2)
            ]
        )
        counted = [gossip.statistics() for gossip in everyone]
    for s in range(3):
        assert logs[2 * s] == logs[2 * s + 1]
        assert torch.equal(*vectors[s])
    expected = replayed(rows, in_order(logs[::2]))
    found = torch.stack([first for first, _ in vectors])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert all(set(one.staleness) <= {0} for one in counted)


def test_a_diverged_learner_is_refused_and_goes_on_from_its_partner() -> None:
    rows = random_rows(2)
    vectors, gossips = pairs_of(rows, "complete", PATIENCE_S / 2)

    def learner(i: int) -> None:
        for number in range(2):
            gossips[i].before_update()
            if (i, number) == (1, 0):
                vectors[1][3] = float("nan")
            gossips[i].after_update()

    with running(gossips):
        together([lambda i=i: learner(i) for i in range(2)])
        counted = [gossip.statistics() for gossip in gossips]
    assert [one.refused for one in counted] == [1, 1]
    assert [one.reloads for one in counted] == [0, 1]
    assert torch.equal(vectors[0], rows[0])
    assert torch.equal(vectors[1], rows[0])


class CutTransport(ThreadTransport):
    """A connection that breaks at a moment of the test's choice."""

    cut = threading.Event()

    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return _Cut(super().post_receive(peer, lane, into), peer, self.cut)


class _Cut:
    def __init__(self, inner: Any, peer: int, cut: threading.Event) -> None:
        self._inner, self._peer, self._cut = inner, peer, cut

    def wait(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while time.monotonic() < deadline:
            if self._cut.is_set():
                raise PeerLost(self._peer, "receiving from it", "it was killed")
            try:
                return self._inner.wait(timedelta(milliseconds=5))
            except PeerLost:
                continue


def test_the_loss_of_a_peer_ends_the_wait_for_a_partner_with_its_name() -> None:
    schedule = Schedule(find_topology("complete"), 2)
    transport = CutTransport.connect(2)[0]
    CutTransport.cut.clear()
    options = GossipOptions(timeout=PATIENCE, in_pairs=True, max_wait=PATIENCE_S / 2)
    vector = random_rows(1)[0]
    members = Members.fixed(schedule, 0)
    gossip = Gossip([vector], transport, SuperLearnerGroup(), members, options)
    gossip.start()
    threading.Timer(0.05, CutTransport.cut.set).start()
    try:
        with pytest.raises(PeerLost, match="super-learner 1 while receiving from it"):
            train(vector, gossip, 1)
    finally:
        gossip.abort()


def test_an_offer_that_is_not_answered_ends_in_an_error_that_names_the_peer() -> None:
    vectors, gossips = pairs_of(
        random_rows(2), "complete", A_MOMENT, timeout=timedelta(seconds=0.2)
    )
    gossips[0].start()
    try:
        pairing = gossips[0].peers_by_section[0].pairing
        assert pairing is not None
        pairing.hear(1, READY)  # it was ready, and is stuck
        with pytest.raises((RuntimeError, PeerLost), match="super-learner 1"):
            train(vectors[0], gossips[0], 1)
    finally:
        gossips[0].abort()


def test_a_peer_whose_answer_does_not_come_is_called_silent_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vectors, gossips = pairs_of(random_rows(2), "complete", A_MOMENT)
    mine, its = (gossip.peers_by_section[0] for gossip in gossips)
    monkeypatch.setattr(its, "say", lambda words: None)  # it is stopped
    monkeypatch.setattr(waiting, "_LOOK_S", 0.01)
    state, pairing = gossips[0].threads.state, mine.pairing
    assert pairing is not None
    with running(gossips):
        with state:
            pairing.hear(1, READY)
        monkeypatch.setattr(peers, "_LONGEST_SILENCE_S", 0.0)
        training = threading.Thread(target=train, args=(vectors[0], gossips[0], 1))
        training.start()
        until(lambda: bool(caplog.messages), "the warning")
        with state:
            pairing.hear(1, NO)
            state.notify_all()
        training.join(PATIENCE_S)
    assert caplog.messages[0].startswith("nothing has come from super-learner 1")


def test_an_exchange_that_does_not_end_names_the_peer_in_every_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors, gossips = engines_of_super_learners(
        random_rows(2),
        2,
        "complete",
        in_pairs=True,
        max_wait=PATIENCE_S / 2,
        timeout=timedelta(seconds=0.2),
    )
    monkeypatch.setattr(Peers, "call", lambda peers, numbers: None)
    said: dict[tuple[int, int], str] = {}

    def learner(s: int, n: int) -> None:
        try:
            train(vectors[s][n], gossips[s][n], 1)
        except (RuntimeError, PeerLost) as error:
            said[s, n] = str(error)

    places = [(s, n) for s in range(2) for n in range(2)]
    for gossip in (gossips[s][n] for s, n in places):
        gossip.start()
    together([lambda at=at: learner(*at) for at in places])
    for gossip in (gossips[s][n] for s, n in places):
        gossip.abort()
    assert all(f"super-learner {1 - s}" in said[s, n] for s, n in places)


def test_an_asker_whose_partner_fails_before_the_exchange_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its partner has agreed, but another learner of that super-learner has failed."""
    vectors, gossips = pairs_of(random_rows(2), "complete", PATIENCE_S)
    failed, pairing = threading.Event(), gossips[1].peers_by_section[0].pairing
    assert pairing is not None

    def fail(pair: Any) -> None:
        failed.wait(PATIENCE_S)
        raise LearnerFailed

    # The first to arrive: the other one finds it ready, offers and asks.
    monkeypatch.setattr(gossips[0]._boundary, "_agreed", fail)

    def learner(number: int) -> None:
        with pytest.raises(LearnerFailed):
            train(vectors[number], gossips[number], 1)

    threads = [threading.Thread(target=learner, args=(n,)) for n in range(2)]
    for gossip in gossips:
        gossip.start()
    threads[0].start()
    until(lambda: 0 in pairing._ready, "the first learner at its boundary")
    threads[1].start()
    until(lambda: not gossips[1]._traffic.is_idle(), "the request")
    for gossip in gossips:
        gossip.release()
    failed.set()
    assert [gossip.say_goodbye(PATIENCE_S / 2) for gossip in gossips] == [[], []]
    for thread in threads:
        thread.join(PATIENCE_S)


def test_patience_is_a_share_of_the_usual_step_unless_it_is_given() -> None:
    draw = random.Random(0)
    assert Patience(3.0, draw, 2).waits(100.0) == (0.0, 3.0)
    patience = Patience(None, draw, 2)
    for _ in range(5):
        assert patience.waits(4.0) == (0.0, 1.0)
    assert patience.waits(1000.0) == (0.0, 1.0)  # a validation, say


def test_what_is_no_step_makes_no_wait() -> None:
    patience = Patience(None, random.Random(0), 2)
    assert patience.waits(None) == (0.0, 0.0)
    patience.waits(4.0)
    assert patience.waits(None) == (0.0, 1.0)
    assert Patience(3.0, random.Random(0), 2).waits(None) == (0.0, 3.0)


def test_neither_the_set_up_nor_a_meeting_counts_as_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, waits = list[float | None](), Patience.waits

    def noting(patience: Patience, of_step: float | None) -> Any:
        steps.append(of_step)
        return waits(patience, of_step)

    monkeypatch.setattr(Patience, "waits", noting)
    vectors, gossips = pairs_of(random_rows(2), "complete", A_MOMENT)
    with running(gossips):
        train(vectors[0], gossips[0], 2)
        gossips[0].pause()
        gossips[0].resume()
        train(vectors[0], gossips[0], 2)
    assert [step is None for step in steps] == [True, False] * 2


def test_others_are_waited_for_after_a_meeting_and_by_chance_after_the_same() -> None:
    patience = Patience(2.0, random.Random(0), 3)
    patience.met(1)
    assert {patience.waits(4.0) for _ in range(20)} == {(0.5, 2.0)}
    patience.met(1)
    assert {patience.waits(4.0) for _ in range(20)} == {(0.5, 2.0), (0.0, 2.0)}
    patience.met(2)
    assert patience.waits(4.0) == (0.5, 2.0)
    assert patience.choose([1, 2]) == 1
    assert patience.choose([1, 2, 3]) == 3


def test_a_long_wait_that_is_allowed_makes_nobody_wait_longer_for_others() -> None:
    patience = Patience(60.0, random.Random(0), 3)
    patience.met(1)
    assert patience.waits(4.0) == (0.5, 60.0)


def test_after_some_boundaries_in_vain_chance_decides_whether_to_wait() -> None:
    patience = Patience(2.0, random.Random(0), 3)
    for _ in range(3):
        patience.met(None)
        assert patience.waits(1.0) == (0.0, 2.0)
    patience.met(None)
    assert {patience.waits(1.0) for _ in range(20)} == {(0.0, 0.0), (0.0, 2.0)}


# --- equal speeds


def test_a_learner_avoids_its_last_partner_at_the_next_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    avoided = defaultdict[int, list[frozenset[int]]](list)
    arrive = Pairing.arrive

    def noting(pairing: Pairing, others: frozenset[int]) -> Any:
        avoided[pairing.own].append(others)
        return arrive(pairing, others)

    monkeypatch.setattr(Pairing, "arrive", noting)
    vectors, gossips = pairs_of(random_rows(4), "complete", A_MOMENT)
    with running(gossips):
        logs = together(
            [lambda i=i: train(vectors[i], gossips[i], 20) for i in range(4)]
        )
    for own, log in enumerate(logs):
        last = [boundary.partner for boundary in log]
        assert (
            avoided[own]
            == [
                frozenset() if partner is None else {partner}
                for partner in [None, *last]
            ][:-1]
        )
    assert any(any(of_one) for of_one in avoided.values())


def test_peers_at_a_meeting_cost_no_wait_even_if_it_has_begun() -> None:
    vectors, gossips = pairs_of(random_rows(2), "complete", PATIENCE_S / 2)
    with running(gossips):
        threading.Timer(0.05, gossips[1].pause).start()
        begin = time.monotonic()
        log = train(vectors[0], gossips[0], 3)
        gossips[0].pause()
        assert time.monotonic() - begin < PATIENCE_S / 4
        assert [boundary.partner for boundary in log] == [None] * 3
        for gossip in gossips:
            gossip.resume()
        logs = together([lambda i=i: train(vectors[i], gossips[i], 2) for i in (0, 1)])
    assert [b.partner for log in logs for b in log] == [1, 1, 0, 0]


def test_one_that_never_meets_anybody_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vectors, gossips = pairs_of(random_rows(2), "complete", 1e-4)
    with running(gossips):
        train(vectors[0], gossips[0], 120)
    (record,) = caplog.records
    assert "super-learner 0 has met no partner at its last 5" in record.message


def test_one_that_keeps_to_the_same_few_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vectors, gossips = pairs_of(random_rows(4), "complete", PATIENCE_S / 2)
    with running(gossips):
        together([lambda i=i: train(vectors[i], gossips[i], 60) for i in (0, 1)])
    said = sorted(record.message.partition(" at its")[0] for record in caplog.records)
    assert said == [f"super-learner {i} has met only [{1 - i}]" for i in (0, 1)]


def test_the_last_two_that_train_meet_each_other_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The third has ended its epoch, and waits in a meeting of all."""
    vectors, gossips = pairs_of(random_rows(3), "complete", PATIENCE_S / 2)
    with running(gossips):
        gossips[2].pause()
        for gossip in gossips[:2]:
            boundary: Any = gossip._boundary
            until(lambda b=boundary: 2 not in b._pairing.may_come, "its word")
        logs = together([lambda i=i: train(vectors[i], gossips[i], 60) for i in (0, 1)])
    assert {b.partner for b in logs[0]} == {1}
    assert caplog.messages == []
