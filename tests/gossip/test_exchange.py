"""One lane, both ends in threads: what an exchange does to two replicas."""

import math
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.gossip import exchange as exchange_module
from lightning_adpsgd.gossip import pairing
from lightning_adpsgd.gossip.codecs import INT4, Lattice, WireChoice
from lightning_adpsgd.gossip.exchange import (
    ADMIT,
    ALIVE,
    ASKS,
    PULL,
    REQUEST,
    Lane,
    Lanes,
)
from lightning_adpsgd.gossip.protocol import Outcome, Position, Pulled
from lightning_adpsgd.gossip.quarantine import NUM_FIRST
from lightning_adpsgd.gossip.wire import Buffers, Loan
from lightning_adpsgd.transport.base import PeerLost, Pending, Transport
from lightning_adpsgd.transport.links.peer_info import PROTOCOL
from lightning_adpsgd.weights.replica import (
    CHUNK_ELEMENTS,
    JOINED_ELEMENTS,
    PART_ELEMENTS,
    Replica,
)
from tests.helpers import PATIENCE, together, until
from tests.threads import ThreadTransport

pytestmark = pytest.mark.usefixtures("engine_device")


class End(NamedTuple):
    """One end of a lane and the weights behind it."""

    weights: Tensor
    replica: Replica
    lane: Lane


def two_ends(
    first: Tensor,
    second: Tensor,
    chunk_elements: int = 3,
    wire_dtype: WireChoice = None,
    gain: float = 1.0,
    transports: Sequence[Transport] | None = None,
    timeout: timedelta = PATIENCE,
    part_elements: int = PART_ELEMENTS,
) -> list[End]:
    """Learner 0 asks learner 1."""
    ends = []
    for transport, weights in zip(
        transports or ThreadTransport.connect(2), (first, second), strict=True
    ):
        state = threading.Condition()
        replica = Replica(
            [[weights]], chunk_elements, state, part_elements=part_elements
        )
        buffers = Buffers(replica, wire_dtype)
        averages = replica, replica.chunks, buffers, wire_dtype, gain
        lanes = Lanes(transport, *averages, timeout)
        lane = lanes.answering(0) if transport.index else lanes.asking(1)
        ends.append(End(weights, replica, lane))
    return ends


def exchange(
    ends: list[End],
    under_way: tuple[int, int] = (1, 1),
    step_seconds: float = math.inf,
) -> list[Outcome]:
    """One exchange, and its merge at both ends."""

    def answer() -> Outcome:
        assert ends[1].lane.hear() in ASKS
        return ends[1].lane.answer(under_way[1])

    def ask() -> Outcome:
        return ends[0].lane.ask(under_way[0], step_seconds)

    outcomes = together([ask, answer])
    for end in ends:
        end.replica.merge_all()
    return outcomes


@pytest.mark.parametrize("length", [1, 2, 3, 7, 9])
def test_two_that_meet_alone_take_their_mean_however_many_chunks(length: int) -> None:
    first, second = torch.randn(2, length, dtype=torch.float64)
    mean = (first + second) / 2
    ends = two_ends(first, second)
    for outcome in exchange(ends):
        assert outcome == Outcome(finite=True, bytes_sent=8 * length, first_step=0)
    for end in ends:
        torch.testing.assert_close(end.weights, mean, atol=1e-15, rtol=0)


@pytest.mark.parametrize(
    ("under_way", "share"), [((1, 1), 1 / 2), ((2, 1), 1 / 3), ((1, 3), 1 / 4)]
)
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_overlapping_exchanges_weigh_less_at_both_ends(
    under_way: tuple[int, int], share: float, gain: float
) -> None:
    ends = two_ends(torch.zeros(4), torch.ones(4), gain=gain)
    exchange(ends, under_way)
    moved = gain * share
    torch.testing.assert_close(ends[0].weights, torch.full((4,), moved))
    torch.testing.assert_close(ends[1].weights, torch.full((4,), 1 - moved))


@pytest.mark.parametrize(("num_single", "num_double"), [(15, 3), (11, 1), (4, 6)])
def test_single_and_double_precision_average_whatever_their_numbers(
    num_single: int, num_double: int
) -> None:
    """The changes of both use the same memory, in turn."""
    lanes = list[Lane]()
    replicas = list[Replica]()
    for transport in ThreadTransport.connect(2):
        value, state = float(transport.index), threading.Condition()
        weights = [torch.full((num_single,), value)]
        weights.append(torch.full((num_double,), value, dtype=torch.float64))
        replica = Replica([weights], 1 << 20, state)
        averages = replica, replica.chunks, Buffers(replica, None), None, 1.0
        shared = Lanes(transport, *averages, PATIENCE)
        lanes.append(shared.answering(0) if transport.index else shared.asking(1))
        replicas.append(replica)
    together([lambda: lanes[0].ask(1), lambda: (lanes[1].hear(), lanes[1].answer(1))])
    for replica in replicas:
        for values in replica.snapshot():
            assert torch.equal(values, torch.full_like(values, 0.5))


def test_ends_that_are_suddenly_apart_average_if_both_are_large() -> None:
    """As after a long separation: unusual, but near beside the weights themselves."""
    ends = two_ends(torch.full((4,), 100.0), torch.full((4,), 101.0))
    for _ in range(NUM_FIRST):
        assert all(outcome.near for outcome in exchange(ends))
        ends[1].weights.add_(1.0)
    apart = ends[1].weights + 50.0
    ends[1].weights.copy_(apart)
    mean = (ends[0].weights + apart) / 2
    assert all(outcome.near for outcome in exchange(ends))
    for end in ends:
        torch.testing.assert_close(end.weights, mean)


@pytest.mark.parametrize(
    ("wire_dtype", "dtype", "num_rounds"),
    [
        (torch.bfloat16, torch.float32, 1000),
        (torch.float16, torch.float32, 1000),
        (torch.int8, torch.float32, 1000),
        (INT4, torch.float32, 1000),
        (None, torch.bfloat16, 500),
        (torch.int8, torch.bfloat16, 500),
        (torch.bfloat16, torch.float64, 500),
    ],
)
def test_hundreds_of_rounds_on_any_wire_do_not_move_the_mean(
    wire_dtype: torch.dtype | None, dtype: torch.dtype, num_rounds: int
) -> None:
    """The two are pushed apart again in every round, by what sums to zero.

    A hundredth of the last bit, lost in each round, would be told.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    first = torch.randn(5, generator=generator).to(dtype)
    second = first.clone()
    total = (first + second).double()
    ends = two_ends(first, second, chunk_elements=5, wire_dtype=wire_dtype)
    push = torch.full((5,), 2.0**-5)
    for number in range(num_rounds):
        sign = 1 if number % 2 else -1
        ends[0].replica.chunks[0].parts[0].add(push, float(sign))
        ends[1].replica.chunks[0].parts[0].add(push, float(-sign))
        exchange_in_one_thread(ends)
    drift = (ends[0].weights.double() + ends[1].weights.double() - total).abs().max()
    assert drift < 4 * torch.finfo(dtype).eps * total.abs().max()


def exchange_in_one_thread(ends: list[End]) -> None:
    """What `exchange` does, without the threads, which would take most of the time."""
    part, other = (end.replica.chunks[0].parts[0] for end in ends)
    messages = []
    for end in ends:
        (codec,) = end.lane._forms[0].codecs.values()
        weights = torch.empty(5, dtype=end.replica.chunks[0].dtype)
        end.replica.chunks[0].parts[0].read(weights)
        message = torch.empty(codec.length(5), dtype=codec.dtype)
        codec.encode(weights, message, 0)
        messages.append(message)
    for end, each, mine, theirs in zip(
        ends, (part, other), messages, messages[::-1], strict=True
    ):
        (codec,) = end.lane._forms[0].codecs.values()
        change = torch.empty(5, dtype=each.dtype)
        assert math.isfinite(codec.change(mine.clone(), theirs.clone(), change, 0))
        each.add(change, 0.5)
        end.replica.merge_all()


def test_a_part_that_is_not_finite_is_left_out_and_the_rest_is_averaged(
    engine_device: torch.device,
) -> None:
    first, second = torch.zeros(PART_ELEMENTS + 1), torch.ones(PART_ELEMENTS + 1)
    second[0] = float("nan")
    # On an accelerator a chunk is one part.
    parts_of_a_chunk = 2 if engine_device.type == "cpu" else 1
    ends = two_ends(first, second, chunk_elements=parts_of_a_chunk * PART_ELEMENTS)
    assert [outcome.finite for outcome in exchange(ends)] == [False, False]
    num_refused = len(ends[0].replica.chunks[0].parts[0])
    assert not first[:num_refused].any()
    assert (first[num_refused:] == 0.5).all()
    assert (second[num_refused:] == 0.5).all()


class Flipping(Transport):
    """Flips one bit of one of the messages that are sent."""

    def __init__(self, inner: Transport, number: int, place: float, bit: int) -> None:
        self.index, self.size = inner.index, inner.size
        self._inner, self._number = inner, number
        self._place, self._bit = place, bit

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return self._inner.post_receive(peer, lane, into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        sent = tensor.clone()
        if self._number == 0:
            sent.view(torch.uint8)[int(self._place * sent.nbytes)] ^= 1 << self._bit
        self._number -= 1
        return self._inner.post_send(peer, lane, sent)

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        return self._inner.post_mean(vector)


SHORT_PART = 1024


def part_length(end: End) -> int:
    """On an accelerator a chunk is one part."""
    return len(end.replica.chunks[0].parts[0])


LONG = 5 * SHORT_PART + 512  # three chunks of two parts each, the last one shorter


def flipped_ends(
    number: int,
    place: float,
    bit: int,
    wire_dtype: torch.dtype | None = None,
    timeout: timedelta = PATIENCE,
) -> list[End]:
    """Message 0 of an end is a word; 1, 2, 3 are chunks and 4 the last verdicts."""
    first, second = torch.ones(LONG), torch.full((LONG,), 1.0625)
    plain, other = ThreadTransport.connect(2)
    transports = [plain, Flipping(other, number, place, bit)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_adpsgd.weights.replica.PART_ELEMENTS", SHORT_PART)
        return two_ends(
            first, second, 2 * SHORT_PART, wire_dtype, 1.0, transports, timeout
        )


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8, INT4])
@settings(max_examples=30, deadline=None)
@given(
    number=st.integers(1, 3),
    place=st.floats(0, 0.95, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_part_that_arrives_damaged_is_left_out_at_both_ends(
    wire_dtype: torch.dtype | None, number: int, place: float, bit: int
) -> None:
    """Wherever it is hit, and though the other end had received its own well."""
    ends = flipped_ends(number, place, bit, wire_dtype)
    before = [end.weights.clone() for end in ends]
    outcomes = exchange(ends)
    assert [(o.damaged, o.finite) for o in outcomes] == [(1, True)] * 2
    total = ends[0].weights.double() + ends[1].weights.double()
    assert torch.equal(total, before[0].double() + before[1].double())
    for end, old in zip(ends, before, strict=True):
        moved = (end.weights != old).split(2 * SHORT_PART)
        parts = [part for chunk in moved for part in chunk.split(part_length(end))]
        assert sorted({bool(p.all()) for p in parts}) == [False, True]
        assert [p.any().item() for p in parts].count(False) == 1


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_word_or_a_seal_that_arrives_damaged_is_a_loss(number: int) -> None:
    """It cannot be said what it was about."""
    # The other end waits in vain.
    ends = flipped_ends(number, 0.9999999, 3, timeout=timedelta(seconds=0.2))
    with pytest.raises(PeerLost, match=r"while exchanging: a message arrived damaged"):
        exchange(ends)


def test_what_one_end_alone_finds_not_finite_is_left_out_at_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums that overflow in the order of one machine need not in that of another."""
    ends = two_ends(torch.zeros(4), torch.ones(4), chunk_elements=2)
    codecs = ends[1].lane._forms[0].codecs
    (codec,) = codecs.values()
    plain = codec.change
    monkeypatch.setattr(
        codec, "change", lambda *args: plain(*args) if args[-1] != 1 else math.nan
    )
    outcomes = exchange(ends)
    assert [outcome.finite for outcome in outcomes] == [False, False]
    assert ends[0].weights.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert ends[1].weights.tolist() == [0.5, 0.5, 1.0, 1.0]


def test_a_lane_knows_since_when_it_waits_for_a_message() -> None:
    ends, begin = two_ends(torch.zeros(2), torch.ones(2)), time.monotonic()
    hearing = ends[1].lane

    def waits() -> bool:
        return begin <= hearing.channel.waits_since <= time.monotonic()

    def say() -> None:
        until(waits, "a lane that waits")
        ends[0].lane.say(ALIVE)

    assert hearing.channel.waits_since == math.inf
    together([say, hearing.hear])
    assert hearing.channel.waits_since == math.inf


def test_a_lane_knows_when_it_has_said_something_last() -> None:
    """Or it would say that it is alive in each turn, or never."""
    ends = two_ends(torch.zeros(2), torch.ones(2))
    lane, begin = ends[0].lane, time.monotonic()
    lane.said_at = 0.0
    together([lambda: lane.say(ALIVE), ends[1].lane.hear])
    assert begin <= lane.said_at <= time.monotonic()


@pytest.mark.parametrize("number", range(1, 5))
def test_weights_that_arrive_damaged_are_not_taken(number: int) -> None:
    """A position, two chunks, and the sums of all three, after a word."""
    plain, other = ThreadTransport.connect(2)
    transports = [plain, Flipping(other, number, 0.0, 1)]
    ends = two_ends(torch.zeros(6), torch.ones(6), transports=transports)

    def give() -> None:
        ends[1].lane.hear()
        ends[1].lane.give(Position())

    with pytest.raises(PeerLost, match="arrived damaged"):
        together([ends[0].lane.pull, give])


def test_an_admission_that_arrives_damaged_is_a_loss() -> None:
    plain, other = ThreadTransport.connect(2)
    transports = [plain, Flipping(other, 0, 0.0, 1)]
    ends = two_ends(torch.zeros(2), torch.ones(2), transports=transports)

    def admit() -> None:
        ends[1].lane.hear()
        ends[1].lane.say(ADMIT)

    with pytest.raises(PeerLost, match="arrived damaged"):
        together([ends[0].lane.request, admit])


def test_words_carry_no_exchange() -> None:
    ends = two_ends(torch.zeros(2), torch.ones(2))
    _, word = together([lambda: ends[0].lane.say(ALIVE), lambda: ends[1].lane.hear()])
    assert word == ALIVE
    exchange(ends)
    assert ends[0].weights.tolist() == [0.5, 0.5]


BIG = 1 << 17


def bytes_of(ends: list[End], step_seconds: float) -> list[int]:
    outcomes = exchange(ends, step_seconds=step_seconds)
    return [outcome.bytes_sent for outcome in outcomes]


# What both ends must mean alike. To change any of it, raise `PROTOCOL`, by which two
# versions refuse each other: otherwise they connect, and one waits for the other.
ON_THE_WIRE = {
    "protocol": 5,
    "words": {
        "ASK": 1,
        "ALIVE": 2,
        "LEAVE": 3,
        "GRANT": 4,
        "PULL": 5,
        "READY": 6,
        "GONE": 7,
        "OFFER": 8,
        "YES": 9,
        "NO": 10,
        "REQUEST": 12,
        "ADMIT": 13,
        "DECLINE": 14,
        "REST": 17,
        "FINE": 0,
        "DAMAGED": 1,
        "NOT_FINITE": 2,
        "FAR": 3,
    },
    "forms": (1, 11, 15, 16),
    "piece": 131_072,
    "joined": 1 << 19,
    "position": ("steps", "samples", "epochs"),
    "bytes": [
        [32, 80_016, 16],
        [32, 20_656, 16],
        [32, 10_760, 16],
        [32, 1112, 1112, *[1128] * 8, 40],
    ],
}


def bytes_sent(ends: list[End], form: int) -> list[int]:
    """The length of each message that the asking end sends in a form."""
    sent, (asks, _) = list[int](), ends
    asks.lane._choice.choose = lambda *_: form  # pyright: ignore
    transport: Any = asks.lane.channel.transport
    with pytest.MonkeyPatch.context() as patch:
        post = transport.post_send

        def noted(peer: int, lane: int, tensor: Tensor) -> Pending:
            sent.append(tensor.nbytes)
            return post(peer, lane, tensor)

        patch.setattr(transport, "post_send", noted)
        exchange(ends)
    return sent


def test_what_crosses_a_lane_is_that_of_its_protocol() -> None:
    names = {**vars(pairing), **vars(exchange_module)}
    words = {n: v for n, v in names.items() if n.isupper() and type(v) is int}
    ends = two_ends(
        *torch.ones(2, 20_000),
        chunk_elements=CHUNK_ELEMENTS,
        wire_dtype="auto",
        part_elements=1000,
    )
    found = {
        "protocol": PROTOCOL,
        "words": {name: words[name] for name in words if name[0] != "_"},
        "forms": ASKS,
        "piece": exchange_module._PIECE_ELEMENTS,
        "joined": JOINED_ELEMENTS,
        "position": Position._fields,
        "bytes": [bytes_sent(ends, form) for form in range(len(ASKS))],
    }
    assert found == ON_THE_WIRE


def test_both_ends_know_how_many_steps_the_asker_has_made_since_either_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = list[int]()
    monkeypatch.setattr(Lattice, "begin", lambda self, steps: begun.append(steps))
    lanes, replicas, shared_by = list[Lane](), list[Replica](), list[Lanes]()
    for transport in ThreadTransport.connect(2):
        replica = Replica([[torch.ones(1024)]], 1024, threading.Condition())
        buffers = Buffers(replica, torch.int8)
        averages = replica, replica.chunks, buffers, torch.int8, 1.0
        shared, peer = Lanes(transport, *averages, PATIENCE), 1 - transport.index
        lanes += [shared.asking(peer), shared.answering(peer)]
        replicas.append(replica)
        shared_by.append(shared)
    asks_1, answers_1, asks_2, answers_2 = lanes

    def exchange_after(steps: tuple[int, int], asks: Lane, answers: Lane) -> None:
        for replica, number in zip(replicas, steps, strict=True):
            replica.step += number
        together([lambda: asks.ask(1), lambda: (answers.hear(), answers.answer(1))])

    exchange_after((3, 1), asks_1, answers_2)
    exchange_after((5, 2), asks_2, answers_1)
    exchange_after((7, 4), asks_1, answers_2)
    assert begun == [3, 3, 2, 2, 7, 7]
    # As after a checkpoint has been loaded.
    for replica, lanes_of in zip(replicas, shared_by, strict=True):
        replica.step = 1000
        lanes_of.go_on_from(1000)
    exchange_after((4, 1), asks_1, answers_2)
    # And a new connection begins anew.
    replicas[0].step += 50
    begin_anew = shared_by[0].asking(1)
    exchange_after((2, 0), begin_anew, answers_2)
    assert begun[6:] == [4, 4, 2, 2]


def test_who_pulls_weights_sees_how_much_of_them_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_module, "_PIECE_ELEMENTS", 2)
    ends = two_ends(torch.zeros(6), torch.arange(6.0), chunk_elements=4)
    shares = list[float]()

    def give() -> None:
        assert ends[1].lane.hear() == PULL
        ends[1].lane.give(Position(steps=5))

    found = list[Pulled]()
    together([lambda: found.append(ends[0].lane.pull(shares.append)), give])
    (pulled,) = found
    assert pulled.position.steps == 5
    assert torch.cat(pulled.values).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert shares == [1 / 3, 2 / 3, 1.0]


def test_where_an_exchange_takes_long_half_a_byte_per_weight_is_sent() -> None:
    ends = two_ends(*torch.randn(2, BIG), chunk_elements=BIG, wire_dtype="auto")
    # The second tries whether a wider one is short enough.
    sent = [bytes_of(ends, step_seconds=1e-9)[0] for _ in range(4)]
    assert max(sent) < 0.6 * BIG
    assert bytes_of(ends, step_seconds=1e9) == [4 * BIG] * 2


class Clock:
    """The clock of exchanges, which a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.late_s, self.thread_time = 0.0, time.thread_time
        monkeypatch.setattr(exchange_module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.late_s


def test_a_wait_for_a_busy_peer_is_not_taken_for_a_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a round trip of that length, the widest form would be short enough."""
    ends = two_ends(*torch.randn(2, BIG), chunk_elements=BIG, wire_dtype="auto")
    clock = Clock(monkeypatch)

    def admit_late() -> None:
        assert ends[1].lane.hear() == REQUEST
        clock.late_s += 1000.0
        ends[1].lane.say(ADMIT)

    together([ends[0].lane.request, admit_late])
    sent = [bytes_of(ends, step_seconds=1e-9)[0] for _ in range(4)]
    assert max(sent) < 0.6 * BIG


def test_encoding_is_not_taken_for_a_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the thread waits meanwhile, behind the kernels of training."""
    ends = two_ends(*torch.randn(2, BIG), chunk_elements=BIG, wire_dtype="auto")
    clock, encode = Clock(monkeypatch), exchange_module._Exchange._encode

    def encode_late(one: Any, *args: Any) -> list[int]:
        clock.late_s += 1000.0 * (one._channel is ends[0].lane.channel)
        return encode(one, *args)

    monkeypatch.setattr(exchange_module._Exchange, "_encode", encode_late)
    sent = [bytes_of(ends, step_seconds=1e-9)[0] for _ in range(8)]
    # The first try of a wider form is the second exchange.
    assert max(sent) < 1.1 * BIG


@pytest.mark.parametrize("first_late", [0, 1])
def test_a_round_trip_is_the_quickest_answer(
    first_late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = two_ends(*torch.randn(2, BIG), chunk_elements=BIG, wire_dtype="auto")
    clock, sent = Clock(monkeypatch), list[int]()
    asking, answering = (end.lane for end in ends)

    def answer_late(number: int) -> Outcome:
        assert answering.hear() in ASKS
        until(lambda: asking.channel.waits_since < math.inf, "an end that waits")
        clock.late_s += 1000.0 * (number >= first_late)
        return answering.answer(1)

    for number in range(7):
        asked, _ = together([lambda: asking.ask(1, 1e-9), partial(answer_late, number)])
        sent.append(asked.bytes_sent)
    assert max(sent[:4]) < 1.1 * BIG
    assert (sent[-1] == 4 * BIG) == (first_late == 0)


def test_a_short_message_is_not_worth_fewer_bits() -> None:
    ends = two_ends(*torch.randn(2, 1000), chunk_elements=BIG, wire_dtype="auto")
    assert {bytes_of(ends, step_seconds=1e-9)[0] for _ in range(3)} == {4000}


@pytest.mark.parametrize("part_elements", [BIG // 8, BIG // 7, PART_ELEMENTS])
def test_exchanges_of_any_form_conserve_the_sum_and_come_together(
    part_elements: int,
) -> None:
    first, second = torch.randn(2, BIG, dtype=torch.float64)
    mean = (first + second) / 2
    ends = two_ends(
        first,
        second,
        chunk_elements=BIG,
        wire_dtype="auto",
        part_elements=part_elements,
    )
    in_short, wide, steps = 1e-9, 1e9, 0.1
    for step_seconds in (in_short, in_short, steps, wide, in_short, steps, steps):
        exchange(ends, step_seconds=step_seconds)
        torch.testing.assert_close((first + second) / 2, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(first, mean, rtol=0, atol=1e-6)


def test_without_weights_an_exchange_is_a_greeting() -> None:
    ends = two_ends(torch.zeros(0), torch.zeros(0))
    for _ in range(2):
        assert [o.bytes_sent for o in exchange(ends)] == [0, 0]


def test_buffers_are_lent_again_and_only_as_many_as_are_in_use() -> None:
    replica = Replica([[torch.zeros(8)]], 8, threading.Condition())
    buffers = Buffers(replica, None)
    with buffers.lent() as first:
        with buffers.lent() as second:
            assert first.room.data_ptr() != second.room.data_ptr()
        with buffers.lent() as third:
            assert third.room.data_ptr() == second.room.data_ptr()


def test_memory_of_an_exchange_that_failed_is_not_lent_again() -> None:
    """A message may still be written into it."""
    replica = Replica([[torch.zeros(8)]], 8, threading.Condition())
    buffers, lent = Buffers(replica, None), list[Loan]()

    def fail() -> None:
        with buffers.lent() as loan:
            lent.append(loan)
            raise PeerLost(1, "a test", "it is gone")

    with pytest.raises(PeerLost):
        fail()
    with buffers.lent() as loan:
        assert loan is not lent[0]
