"""The asynchronous engine over threads: conservation, no waiting, no deadlock."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd import reference
from lightning_adpsgd.gossip import exchange, peers
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pacing import CoreShare
from lightning_adpsgd.gossip.protocol import Outcome, Pulled, exchange_weight
from lightning_adpsgd.gossip.quarantine import Quarantine
from lightning_adpsgd.mixing.consensus import Consensus, ConsensusModel
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.weights.look_ahead import LookAhead
from tests.helpers import (
    PATIENCE,
    PATIENCE_S,
    HeldTransport,
    engine_threads,
    engines,
    engines_of_super_learners,
    engines_over,
    random_rows,
    running,
    settle,
    together,
    topologies_of,
    until,
)
from tests.threads import ThreadTransport

pytestmark = pytest.mark.usefixtures("engine_device")

ORDERS: tuple[Order, ...] = ("step_then_average", "average_then_step")


def step(vector: Tensor, gossip: Gossip, update: Tensor | float = 0.0) -> None:
    """An optimizer step with that update."""
    gossip.before_update()
    vector.add_(update)
    gossip.after_update()


def assert_same_sum(vectors: list[Tensor], expected: Tensor) -> None:
    total = torch.stack(vectors).sum(0)
    torch.testing.assert_close(total, expected, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gossip_preserves_the_sum_but_for_the_local_updates(
    data: st.DataObject,
) -> None:
    """Whatever the interleaving of exchanges, merges and local steps."""
    size = data.draw(st.integers(1, 5))
    name, _ = data.draw(st.sampled_from(topologies_of(size)))
    rows = random_rows(size)
    vectors, gossips = engines(
        rows,
        name,
        gain=data.draw(st.sampled_from([0.3, 1.0])),
        order=data.draw(st.sampled_from(ORDERS)),
        wire_dtype=data.draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
        # 7 elements: one message, or messages with merges between them.
        chunk_elements=data.draw(st.sampled_from([2, 100])),
        every=data.draw(st.integers(1, 2)),
        look_ahead=data.draw(st.booleans()),
    )
    total = rows.sum(0)
    program = data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.booleans()), max_size=40)
    )
    with running(gossips):
        for number, (index, yields) in enumerate(program):
            update = torch.full_like(total, 1 + number % 3)
            step(vectors[index], gossips[index], update)
            total = total + update
            if yields:
                time.sleep(0)
    assert_same_sum(vectors, total)


@pytest.mark.parametrize(("name", "size"), topologies_of(2, 3, 4, 5, 8))
def test_concurrent_training_preserves_the_sum(name: str, size: int) -> None:
    rows = random_rows(size)
    vectors, gossips = engines(rows, name, chunk_elements=3, look_ahead=True)

    def train(index: int) -> None:
        for _ in range(30):
            step(vectors[index], gossips[index], 1.0)

    with running(gossips):
        together([lambda i=i: train(i) for i in range(size)])
    assert_same_sum(vectors, rows.sum(0) + 30 * size)
    assert engine_threads() == []


def test_one_learner_of_all_reports_how_rare_exchanges_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors, gossips = engines(random_rows(3), "ring")
    told = [0, 0, 0]
    for index, gossip in enumerate(gossips):

        def count(index: int = index) -> None:
            told[index] += 1

        monkeypatch.setattr(gossip._traffic, "report_rate", count)
    with running(gossips):
        for _ in range(4):
            for vector, gossip in zip(vectors, gossips, strict=True):
                step(vector, gossip)
    assert told == [4, 0, 0]


def test_among_islands_the_one_of_the_lowest_number_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors, gossips = engines(random_rows(3), "ring")
    told = list[int]()
    for index, gossip in enumerate(gossips):
        report = partial(told.append, index)
        monkeypatch.setattr(gossip._traffic, "report_rate", report)
    with running(gossips):
        for index in (1, 2):
            members = gossips[index].members
            present = LiveSchedule.of(members.live_schedule.schedule, (1, 2), index)
            members.live_schedule = present  # 0 has left
        for _ in range(2):
            for index in (1, 2):
                step(vectors[index], gossips[index])
    assert told == [1, 1]


@pytest.mark.parametrize("in_pairs", [False, True])
def test_training_goes_on_and_tells_of_a_peer_that_is_silent(
    in_pairs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vectors, gossips = engines(
        random_rows(2), "ring", in_pairs=in_pairs, max_wait=0.001
    )

    def told_in_a_step() -> bool:
        step(vectors[0], gossips[0])
        return bool(caplog.messages)

    with running(gossips):
        assert not told_in_a_step()
        monkeypatch.setattr(peers, "_LONGEST_SILENCE_S", 0.0)
        (lane,) = gossips[0].peers_by_section[0]._answering.values()
        until(lambda: lane.channel.waits_since < time.monotonic(), "a lane that waits")
        until(told_in_a_step, "the warning")
    assert caplog.messages[0].startswith("nothing has come from super-learner 1")


def test_who_is_exchanging_admits_a_third_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that no two exchanges of one learner overlap, here in a triangle."""
    numbers = list[tuple[int, int]]()

    def noted(gain: float, num_mine: int, num_theirs: int) -> float:
        numbers.append((num_mine, num_theirs))
        return exchange_weight(gain, num_mine, num_theirs)

    monkeypatch.setattr(exchange, "exchange_weight", noted)
    vectors = [*random_rows(3)]
    held = [HeldTransport(t) for t in ThreadTransport.connect(3)]
    gossips = engines_over(held, vectors, "ring")
    lines = [gossip._traffic._under_way[0] for gossip in gossips]
    with running(gossips):
        step(vectors[2], gossips[2])
        until(lambda: sum(t.arrived.is_set() for t in held) == 2, "two that exchange")
        (third,) = (n for n, t in enumerate(held) if not t.arrived.is_set())
        for _ in range(3):  # in some rounds it is the others' turn to ask
            step(vectors[third], gossips[third])
        until(lambda: any(line.requests == [third] for line in lines), "the request")
        assert [line.total() for line in lines] == [int(n != third) for n in range(3)]
        for transport in held:
            transport.gate.set()
        until(lambda: gossips[third].statistics().exchanges > 0, "its own exchange")
    # Both ends of both; a later one waits no longer than these have taken.
    assert set(numbers[:4]) == {(1, 1)}


def test_four_local_steps_during_an_exchange_are_all_kept() -> None:
    rows = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    vectors = [row.clone() for row in rows]
    held = [HeldTransport(t) for t in ThreadTransport.connect(2)]
    gossips = engines_over(held, vectors, "ring")
    with running(gossips):
        step(vectors[0], gossips[0])
        step(vectors[1], gossips[1])
        for transport in held:
            assert transport.arrived.wait(PATIENCE_S)
        for _ in range(4):
            step(vectors[0], gossips[0], 10.0)
        assert vectors[0].item() == 1 + 4 * 10
        for transport in held:
            transport.gate.set()
        until(lambda: gossips[0].statistics().exchanges >= 1, "the exchange")
        until(lambda: gossips[1].statistics().exchanges >= 1, "the exchange")
    # The exchange saw 1 and 5, so it moved 2 from one to the other; later ones, which
    # see the four steps, keep the sum as well.
    assert_same_sum(vectors, torch.tensor([46.0], dtype=torch.float64))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["alternating_pairs", "random_pairs"])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_threads_that_step_in_turn_follow_the_oracle(
    looks_ahead: bool, name: str, order: Order
) -> None:
    """Whichever learner steps next; each exchange has ended before the next step."""
    rows, draw, topology = random_rows(4), random.Random(1), find_topology(name)
    vectors, gossips = engines(
        rows, name, gain=0.6, order=order, look_ahead=looks_ahead
    )
    events, num_steps, num_exchanges = list[Any](), [0] * 4, [0] * 4

    def turn(i: int) -> None:
        step(vectors[i], gossips[i], -0.3 * vectors[i].sin())
        events.extend([reference.Step(i, num_steps[i]), reference.Merge(i)])
        num_steps[i] += 1
        for j in topology.asks(i, 4, num_steps[i]):
            events.append(
                reference.Exchange(
                    i, j, 0.6 / 2, (ahead(gossips[i]), ahead(gossips[j]))
                )
            )
            for end in (i, j):
                num_exchanges[end] += 1
                gossip, num = gossips[end], num_exchanges[end]
                until(lambda g=gossip, n=num: has_made(g, n), "the exchange")

    with running(gossips):
        for _ in range(60):
            turn(draw.randrange(4))
        *_, (w, d) = reference.asynchronous(rows, lambda w, k: w.sin(), events, 0.3)
        assert (max(map(ahead, gossips)) > 0.3) == looks_ahead
        torch.testing.assert_close(torch.stack(vectors), w, atol=1e-12, rtol=0)
        settle(gossips)
        torch.testing.assert_close(torch.stack(vectors), w + d, atol=1e-12, rtol=0)


def ahead(gossip: Gossip) -> float:
    """How far ahead it reads, in updates."""
    found = gossip._look_ahead
    return 0.0 if found is None else found.factors()[0]


def has_made(gossip: Gossip, num_exchanges: int) -> bool:
    return gossip.statistics().exchanges == num_exchanges


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_an_exchange_takes_both_ends_to_their_mean_by_the_gain(gain: float) -> None:
    rows = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    vectors, gossips = engines(rows, "complete", gain=gain)
    with running(gossips):
        one_round(vectors, gossips, 0.0)
        settle(gossips)
        assert [v.item() for v in vectors] == [1 + 2 * gain, 5 - 2 * gain]


def one_round(
    vectors: list[Tensor], gossips: list[Gossip], update: Tensor | float
) -> None:
    """A step of two super-learners, and their exchange once both have merged.

    The one whose turn it is to ask steps last, so that the exchange sees both.
    """
    rounds = gossips[0].statistics().exchanges + 1
    first = 0 if rounds.bit_count() % 2 else 1
    for index in (first, 1 - first):
        step(vectors[index], gossips[index], update)
    for gossip in gossips:
        until(lambda g=gossip: g.statistics().exchanges == rounds, "the exchange")


def disagreement_after(
    num_steps: int, order: Order, gain: float, lr: float, num_learners: int, **more: Any
) -> float:
    """Largest weight after lockstep steps on w²/2 from ±1; the mean stays zero."""
    rows = torch.tensor([[1.0] * 2, [-1.0] * 2], dtype=torch.float64)
    vectors, gossips = engines_of_super_learners(
        rows, num_learners, "complete", gain, order=order, **more
    )
    with running([gossip for of_group in gossips for gossip in of_group]):
        for number in range(num_steps):
            lockstep_of_super_learners(vectors, gossips, lr, number + 1)
        return max(float(v.abs().max()) for both in vectors for v in both)


def lockstep_of_super_learners(
    vectors: list[list[Tensor]], gossips: list[list[Gossip]], lr: float, round: int
) -> None:
    def train(vector: Tensor, gossip: Gossip) -> None:
        step(vector, gossip, -lr * vector)

    first = 0 if round.bit_count() % 2 else 1
    for index in (first, 1 - first):
        pairs = zip(vectors[index], gossips[index], strict=True)
        together([lambda v=v, g=g: train(v, g) for v, g in pairs])
    for gossip in (g for of_group in gossips for g in of_group):
        until(lambda g=gossip: g.statistics().exchanges == round, "the exchange")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("gain", "bound"), [(1.0, 1.0), (0.5, 1.5)])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_an_exchange_behind_one_gradient_bounds_the_learning_rate(
    looks_ahead: bool, order: Order, gain: float, bound: float
) -> None:
    """The mode's factor is lambda_gamma - lr h: lr h < 2 - gamma (1 - lambda).

    Here it is -0.9 and -1.1, whose powers after 60 steps are 0.002 and 304. The look
    ahead ends where updates change their sign.
    """
    after = partial(disagreement_after, 60, order, gain, look_ahead=looks_ahead)
    assert after(bound - 0.1, 1) < 0.1
    assert after(bound + 0.1, 1) > 10


@pytest.mark.parametrize("order", ORDERS)
def test_a_fixed_look_ahead_by_a_whole_update_halves_the_bound(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z² - (1 - g - lr h) z - g c lr h = 0 with g = c = 1: stable for lr h < 1 / 2."""
    monkeypatch.setattr(LookAhead, "factors", lambda self: [1.0])
    after = partial(disagreement_after, 60, order, 1.0, look_ahead=True)
    assert after(0.4, 1) < 0.1
    assert after(0.6, 1) > 10


def test_how_far_ahead_is_asked_for_each_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An accident, which ends the look ahead, may come within an exchange."""
    asked = Counter[LookAhead]()

    def factors(ahead: LookAhead) -> list[float]:
        asked[ahead] += 1
        return [1.0 if asked[ahead] == 1 else 0.0]

    monkeypatch.setattr(LookAhead, "factors", factors)
    rows = torch.zeros(2, 4, dtype=torch.float64)
    vectors, gossips = engines(rows, "complete", chunk_elements=2, look_ahead=True)
    with running(gossips):
        step(vectors[0], gossips[0], 4.0)
        step(vectors[1], gossips[1], 0.0)
        for gossip in gossips:
            until(lambda g=gossip: has_made(g, 1), "the exchange")
        settle(gossips)
        found = [vector.tolist() for vector in vectors]
    assert found == [[0.0, 0.0, 2.0, 2.0], [4.0, 4.0, 2.0, 2.0]]


@pytest.mark.parametrize(("gain", "bound"), [(1.0, 1.0), (0.5, 2.0)])
def test_a_gather_in_a_super_learner_merges_one_step_later(
    gain: float, bound: float
) -> None:
    """What is read has what is still gathered, and the gradient does not.

    With g = gamma (1 - lambda) this is z² - (1 - lr h - g) z + lr h g = 0: stable for
    lr h < 1 / g where that is below (2 - g) / (1 - g).
    """
    order: Order = "step_then_average"
    assert disagreement_after(150, order, gain, bound - 0.1, 2) < 0.1
    assert disagreement_after(150, order, gain, bound + 0.1, 2) > 10


def test_the_learners_of_a_super_learner_stay_equal_and_keep_the_sum() -> None:
    rows = random_rows(3, length=8)
    vectors, gossips = engines_of_super_learners(rows, 2, "ring", look_ahead=True)

    def train(vector: Tensor, gossip: Gossip) -> None:
        for _ in range(20):
            step(vector, gossip, 1.0)

    with running([gossip for of_group in gossips for gossip in of_group]):
        together(
            [
                lambda v=vectors[s][n], g=gossips[s][n]: train(v, g)
                for s in range(3)
                for n in range(2)
            ]
        )
    for first, second in vectors:
        assert torch.equal(first, second)
    assert_same_sum([first for first, _ in vectors], rows.sum(0) + 20 * 3)
    assert all(ahead(gossip) > 0.9 for of_group in gossips for gossip in of_group)


@pytest.mark.parametrize("order", ORDERS)
def test_settled_engines_give_the_exact_mean_and_go_on(order: Order) -> None:
    rows = random_rows(4)
    vectors, gossips = engines(rows, "ring", order=order)
    total = rows.sum(0)
    with running(gossips):
        for _ in range(3):
            for vector, gossip in zip(vectors, gossips, strict=True):
                step(vector, gossip, 1.0)
            settle(gossips)
            total = total + 4
            assert_same_sum(vectors, total)
            together([gossip.resume for gossip in gossips])


def test_weights_put_in_place_while_paused_are_what_gossip_goes_on_from() -> None:
    rows = random_rows(2)
    vectors, gossips = engines(rows, "complete")
    with running(gossips):
        settle(gossips)
        for vector in vectors:
            vector.fill_(4.0)
        together([gossip.resume for gossip in gossips])
        one_round(vectors, gossips, 0.0)
    assert torch.equal(torch.stack(vectors), torch.full((2, 7), 4.0).double())


def test_peers_see_the_local_weights_while_others_stand_in_their_place() -> None:
    """One learner still evaluates the mean when another has gone on."""
    rows = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    vectors, gossips = engines(rows, "complete", max_staleness=1)
    with running(gossips):
        settle(gossips)
        local = vectors[0].clone()
        gossips[0].set_aside([local])
        vectors[0].fill_(1000.0)
        gossips[1].resume()
        step(vectors[1], gossips[1])
        step(vectors[1], gossips[1])  # waits for an exchange
        step(vectors[1], gossips[1])
        vectors[0].copy_(local)
        gossips[0].resume()
        local.fill_(1000.0)  # from now on nobody reads it
        step(vectors[1], gossips[1])
        step(vectors[1], gossips[1])
    assert_same_sum(vectors, torch.tensor([6.0], dtype=torch.float64))
    torch.testing.assert_close(vectors[1], torch.tensor([3.0]).double())


class WeightsOnly:
    """One vector without buffers."""

    def __init__(self, vector: Tensor) -> None:
        self.vectors = [vector]

    def check_views(self) -> None:
        pass

    def buffers_in(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return []


def test_peers_see_the_mean_where_it_is_adopted() -> None:
    """One learner still evaluates it when another has gone on."""
    rows = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    vectors, gossips = engines(rows, "complete", max_staleness=1)
    all_here = threading.Barrier(2)

    def average(vectors: list[Tensor], _: list[Tensor]) -> Consensus:
        vectors[0].fill_(3.0)
        all_here.wait(PATIENCE_S)
        return Consensus(2.0, 1.0)

    def model_of(vector: Tensor, gossip: Gossip) -> ConsensusModel:
        flat: Any = WeightsOnly(vector)
        meet = lambda _: all_here.wait(PATIENCE_S)  # noqa: E731
        return ConsensusModel(flat, gossip, meet, average)

    with running(gossips):
        models = list(map(model_of, vectors, gossips))
        together([lambda m=m: m.enter("validation", adopts=True) for m in models])
        models[1].leave(adopt=True)
        for _ in range(3):  # waits for an exchange
            step(vectors[1], gossips[1])
        assert gossips[1].statistics().exchanges
        models[0].leave(adopt=True)
        step(vectors[0], gossips[0])
    assert [vector.item() for vector in vectors] == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_save_keeps_exchanges_from_who_puts_weights_back(dtype: torch.dtype) -> None:
    """A callback saves an average of its own, and puts back what it had kept."""
    rows = torch.tensor([[1.0], [5.0]], dtype=dtype)
    vectors, gossips = engines(rows, "complete")

    def save(vector: Tensor, gossip: Gossip) -> None:
        flat: Any = WeightsOnly(vector)
        average = lambda vectors, _: Consensus(2.0, 1.0)  # noqa: E731
        model = ConsensusModel(flat, gossip, lambda _: None, average)
        kept = vector.clone()
        vector.fill_(1000.0)
        model.enter("checkpoint", unmerged=True)
        model.leave(adopt=False)
        assert vector.item() == 1000.0
        vector.copy_(kept)

    with running(gossips):
        one_round(vectors, gossips, 0.0)
        assert [vector.item() for vector in vectors] == [1.0, 5.0]
        saves = zip(vectors, gossips, strict=True)
        together([lambda one=one: save(*one) for one in saves])
        settle(gossips)
    assert [vector.item() for vector in vectors] == [3.0, 3.0]


def test_all_weights_that_are_to_be_adopted_are_and_the_last_ones_stay() -> None:
    """Or a thread would wait for ever for an adoption that another one replaced."""
    vectors, gossips = engines(random_rows(1), "ring")
    with running(gossips):
        both = [gossips[0].adopt([torch.full_like(vectors[0], v)]) for v in (1.0, 2.0)]
        step(vectors[0], gossips[0])
        assert [adopted.is_set() for adopted in both] == [True, True]
        assert gossips[0].num_reloads == 0
    assert vectors[0].tolist() == [2.0] * 7


def test_what_was_found_of_weights_does_not_count_for_those_that_are_adopted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or other weights would be loaded once more in the same step."""
    vectors, (gossip,) = engines(random_rows(1), "ring")
    gossip._quarantine.note(Outcome(False, 0, first_step=0, is_to_blame=True))
    gossip.adopt([torch.ones_like(vectors[0])])
    step(vectors[0], gossip)
    assert not gossip._quarantine.wants_reload
    assert not [one for one in caplog.records if one.module == "quarantine"]
    assert gossip.num_reloads == 1  # the optimizer state is that of the old ones
    gossip.abort()


def test_a_learner_that_never_merges_slows_no_exchange_of_the_others() -> None:
    vectors, gossips = engines(random_rows(4), "ring")

    def train_and_look(index: int, seen: int) -> bool:
        # A round asks no peer that is ending an exchange: it takes another step.
        for each in (1, 2, 3):
            step(vectors[each], gossips[each], 1.0)
        return gossips[index].statistics().exchanges > seen

    with running(gossips):
        for _ in range(20):
            # 0 and 2 are neighbours of 1 and 3; 0 takes no step at all.
            for index in (1, 3):
                seen = gossips[index].statistics().exchanges
                until(lambda i=index, n=seen: train_and_look(i, n), "an exchange")
        assert gossips[0].statistics().exchanges > 0
        assert gossips[0].statistics().merges == 0


def test_the_training_thread_goes_on_while_all_its_exchanges_hang() -> None:
    vectors = list(random_rows(2))
    held = [HeldTransport(t) for t in ThreadTransport.connect(2)]
    gossips = engines_over(held, vectors, "ring")
    with running(gossips):
        for _ in range(100):
            step(vectors[0], gossips[0])
        assert gossips[0].statistics().exchanges == 0
        for transport in held:
            transport.gate.set()


def test_one_whose_threads_do_not_end_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (gossip,) = engines(random_rows(1), "ring")
    monkeypatch.setattr(gossip, "say_goodbye", lambda seconds: ["adpsgd-answer-3"])
    told = r"not end cleanly: its threads \['adpsgd-answer-3'\] still wait"
    with pytest.raises(RuntimeError, match=told):
        gossip.stop()
    monkeypatch.undo()
    gossip.stop()


def test_who_waits_for_the_last_exchange_admits_no_two_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that take turns might leave no moment without one."""
    _, (gossip,) = engines(random_rows(1), "ring")
    gossip._traffic._under_way[0].enter(2, now=time.monotonic())
    hurries, waits = list[bool](), list[float]()
    hurry_on = gossip._traffic.hurry_on
    monkeypatch.setattr(gossip._traffic, "hurry_on", lambda: hurries.append(True))
    gossip.drain(0.0)
    assert hurries == []  # not for a moment, either
    monkeypatch.setattr(gossip._traffic, "hurry_on", hurry_on)
    monkeypatch.setattr(gossip._state, "wait", waits.append)
    gossip._traffic.admit(1, seconds=0.01)
    assert waits
    gossip.abort()


def test_what_is_lost_of_an_exchange_at_the_end_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, (gossip,) = engines(random_rows(1), "ring")
    gossip.drain(0.0)
    assert caplog.messages == []
    monkeypatch.setattr(gossip._traffic, "is_idle", lambda: False)
    gossip.drain(0.0)
    assert caplog.messages == ["the rest of an exchange that took over 0 s is lost"]
    gossip.abort()


def test_what_was_found_of_weights_does_not_count_for_those_of_a_checkpoint() -> None:
    _, (gossip,) = engines(random_rows(1), "ring")
    gossip._quarantine.note(Outcome(False, 0, first_step=0, is_to_blame=True))
    assert gossip._quarantine.wants_reload
    gossip.go_on_from(7, 7)
    assert not gossip._quarantine.wants_reload
    gossip.abort()


def test_steps_before_a_checkpoint_do_not_count_between_exchanges() -> None:
    _, gossips = engines(random_rows(2), "ring")
    (peers,) = gossips[0].peers_by_section
    with running(gossips):
        gossips[0].go_on_from(700, 700)
        assert peers._lanes.last_steps == {1: 700}


def test_one_learner_alone_in_the_world_is_idle() -> None:
    vectors, gossips = engines(random_rows(1), "ring")
    with running(gossips):
        assert engine_threads() == []
        step(vectors[0], gossips[0], 1.0)
        assert gossips[0].statistics().exchanges == 0


def test_a_diverged_learner_is_refused_counted_and_not_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Quarantine, "wants_reload", False)
    rows = random_rows(3)
    rows[0, 3] = float("inf")
    vectors, gossips = engines(rows, "ring")
    with running(gossips):
        for _ in range(4):
            for vector, gossip in zip(vectors, gossips, strict=True):
                step(vector, gossip)
        until(lambda: gossips[0].statistics().refused > 0, "a refusal")
    assert torch.stack(vectors[1:]).isfinite().all()
    assert_same_sum(vectors[1:], rows[1:].sum(0))
    assert sum(gossip.statistics().refused for gossip in gossips) >= 2
    assert gossips[0].statistics().exchanges == 0


def test_a_wire_in_half_precision_halves_the_bytes() -> None:
    sent = {}
    for dtype in (torch.float32, torch.bfloat16):
        vectors = list(random_rows(2, length=10).float())
        across = ThreadTransport.connect(2)
        gossips = engines_over(across, vectors, "complete", wire_dtype=dtype)
        with running(gossips):
            one_round(vectors, gossips, 0.0)
        sent[dtype] = gossips[0].statistics().bytes_sent
    assert sent == {torch.float32: 40, torch.bfloat16: 20}


def test_staleness_is_the_number_of_steps_between_snapshot_and_merge() -> None:
    vectors = list(random_rows(2))
    held = [HeldTransport(t) for t in ThreadTransport.connect(2)]
    gossips = engines_over(held, vectors, "ring")
    with running(gossips):
        step(vectors[0], gossips[0])
        step(vectors[1], gossips[1])  # round 1 is learner 1's to ask
        for transport in held:
            assert transport.arrived.wait(PATIENCE_S)
        for _ in range(3):
            step(vectors[0], gossips[0])
        for transport in held:
            transport.gate.set()
        until(lambda: gossips[0].statistics().exchanges >= 1, "the exchange")
        step(vectors[0], gossips[0])
    # The snapshot is that of learner 0's first step, the merge its fifth.
    assert 4 in gossips[0].statistics().staleness


def test_the_age_of_a_peer_is_the_steps_since_an_exchange_with_it() -> None:
    vectors, gossips = engines(torch.ones(3, 1), "ring", every=4)
    with running(gossips):
        for _ in range(3):
            step(vectors[0], gossips[0])
        assert gossips[0].statistics().peer_ages == {1: 3, 2: 3}
        # In round 1 the higher index asks: here learner 1 asks learner 0.
        for _ in range(4):
            step(vectors[1], gossips[1])
        until(lambda: gossips[0].statistics().peer_ages[1] == 0, "the exchange")
        for _ in range(2):
            step(vectors[0], gossips[0])
        assert gossips[0].statistics().peer_ages == {1: 2, 2: 5}


def test_a_learner_that_is_too_stale_does_not_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoreShare, "pause_s", lambda self: 1000.0)
    vectors, gossips = engines(random_rows(2), "complete", max_staleness=1)

    def train(index: int) -> None:
        for _ in range(5):
            step(vectors[index], gossips[index], 1.0)

    with running(gossips):
        together([lambda i=i: train(i) for i in range(2)])
        assert all(gossip.statistics().exchanges >= 2 for gossip in gossips)
        # From here on, exchanges rest again.
        assert not any(gossip._traffic.hurry.is_set() for gossip in gossips)


@pytest.mark.parametrize(("name", "size"), [*topologies_of(3), ("hypercube", 4)])
def test_a_too_stale_learner_asks_peers_that_do_not_train(name: str, size: int) -> None:
    """And does not wait for the other end's turn."""
    for index in range(size):
        rows = random_rows(size)
        vectors, gossips = engines(rows, name, max_staleness=1, every=1000)
        with running(gossips):
            for _ in range(6):
                step(vectors[index], gossips[index], 1.0)
            assert gossips[index].statistics().exchanges >= 3


def test_one_that_has_no_peer_is_never_too_stale() -> None:
    vectors, gossips = engines(
        random_rows(1), "ring", max_staleness=1, timeout=timedelta(seconds=0.1)
    )
    with running(gossips):
        for _ in range(4):
            step(vectors[0], gossips[0], 1.0)
    assert_same_sum(vectors, random_rows(1)[0] + 4)


def test_both_ends_know_when_a_message_landed() -> None:
    vectors, gossips = engines(random_rows(2), "complete")
    before = time.monotonic()
    with running(gossips):
        for vector, gossip in zip(vectors, gossips, strict=True):
            step(vector, gossip)
        until(lambda: all(one.statistics().exchanges for one in gossips), "exchanges")
    for gossip in gossips:
        assert before <= gossip.replica.landed_at <= time.monotonic()


def test_a_too_stale_learner_waits_until_an_exchange_is_done() -> None:
    vectors = list(random_rows(2))
    held = [HeldTransport(t) for t in ThreadTransport.connect(2)]
    gossips = engines_over(held, vectors, "complete", max_staleness=2)
    reached = [threading.Event() for _ in range(4)]

    def train() -> None:
        for event in reached:
            step(vectors[0], gossips[0])
            event.set()

    thread = threading.Thread(target=train)
    with running(gossips):
        thread.start()
        assert reached[1].wait(PATIENCE_S)
        assert not reached[2].wait(0.2)
        for transport in held:
            transport.gate.set()
        assert reached[3].wait(PATIENCE_S)
        thread.join(PATIENCE_S)


def test_a_silent_peer_is_lost_by_name_after_the_timeout() -> None:
    errors: list[str] = []
    schedule = Schedule(find_topology("complete"), 2)
    options = GossipOptions(timeout=timedelta(seconds=0.3))
    vector = torch.zeros(3)
    gossip = Gossip(
        [vector],
        ThreadTransport.connect(2)[0],
        SuperLearnerGroup(),
        Members.fixed(schedule, 0),
        options,
        errors.append,
    )
    gossip.start()
    until(lambda: bool(errors), "the loss of the peer")
    with pytest.raises(PeerLost, match="super-learner 1") as caught:
        step(vector, gossip)
    assert caught.value.peer == 1
    gossip.abort()
    assert len(errors) == 1
    assert engine_threads() == []


def test_weights_that_do_not_come_in_time_are_given_up() -> None:
    pull, other = Future[Pulled](), Future[Pulled]()
    sections = [SimpleNamespace(pull=lambda peer, it=it: it) for it in (pull, other)]
    engine: Any = SimpleNamespace(peers_by_section=sections)
    with pytest.raises(TimeoutError):
        Gossip.pull(engine, 1, 0.0)
    assert (pull.cancelled(), other.cancelled()) == (True, True)


def test_an_abort_waits_for_no_peer() -> None:
    vectors, gossips = engines(random_rows(2), "complete")
    gossips[0].start()
    for _ in range(3):
        step(vectors[0], gossips[0])  # asks a peer that does not answer
    begin = time.perf_counter()
    gossips[0].abort()
    assert time.perf_counter() - begin < PATIENCE.total_seconds() / 2
    gossips[1].start()
    gossips[1].abort()
    until(lambda: engine_threads() == [], "the end of the threads")


def test_engines_that_abort_together_end_at_once_and_report_no_loss() -> None:
    errors: list[str] = []
    schedule = Schedule(find_topology("ring"), 3)
    gossips = [
        Gossip(
            [row],
            transport,
            SuperLearnerGroup(),
            Members.fixed(schedule, transport.index),
            GossipOptions(),
            errors.append,
        )
        for row, transport in zip(
            random_rows(3), ThreadTransport.connect(3), strict=True
        )
    ]
    for gossip in gossips:
        gossip.start()
    together([gossip.abort for gossip in gossips])
    assert errors == []
    assert engine_threads() == []


def test_threads_come_with_start_and_go_with_stop() -> None:
    _, gossips = engines(random_rows(4), "ring")
    assert engine_threads() == []
    with running(gossips):
        # An asking and an answering thread for each of two neighbours.
        assert len(engine_threads()) == 4 * 4
    assert engine_threads() == []


@pytest.fixture(scope="module")
def left_over() -> Iterator[None]:
    """A thread that an earlier test has left for a while, as a slow connection may."""
    ends = threading.Event()
    threading.Thread(target=ends.wait, name="adpsgd-failure").start()
    yield
    ends.set()


@pytest.mark.usefixtures("left_over")
def test_a_thread_of_an_earlier_test_is_none_of_this_one() -> None:
    assert engine_threads() == []
