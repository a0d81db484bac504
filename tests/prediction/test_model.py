"""Predicted speed, against arithmetic by hand and the timelines with all events."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_adpsgd.gossip.codecs import INT4
from lightning_adpsgd.gossip.forms import WORTH_BYTES, FormChoice
from lightning_adpsgd.prediction.model import (
    Costs,
    Mode,
    Prediction,
    Workload,
    predict,
)
from lightning_adpsgd.virtual.clock import BUCKET_BYTES, Compute, Link, overlapped

MODES: tuple[Mode, ...] = ("sync", "delay_by_one", "async", "allreduce")
WEIGHTS = 100.0  # bytes: one bucket
MODEL = 4.0 * 2**20  # bytes that are worth a narrower exchange
BATCH = 8


def speed(num: int = 4, size: int = 1, /, **arguments) -> Prediction:
    workload = arguments.pop("workload", Workload(WEIGHTS, BATCH))
    arguments.setdefault("compute", Compute(0.5))
    return predict(workload, num, size, **arguments)


# --- computation alone


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num", "size"), [(1, 1), (3, 1), (4, 2), (1, 4)])
def test_constant_steps_without_links_give_all_learners_samples(
    mode: Mode, num: int, size: int
) -> None:
    found = speed(num, size, communication=mode)
    assert found.samples_per_second == pytest.approx(num * size * BATCH / 0.5)
    assert found.exposed == pytest.approx(0.0)


@pytest.mark.parametrize("mode", ["sync", "delay_by_one", "allreduce"])
def test_one_slow_learner_sets_the_pace_of_all_who_wait(mode: Mode) -> None:
    found = speed(8, communication=mode, compute=Compute(0.5, slow={3: 5.0}))
    assert found.steps_per_second == pytest.approx(1 / 2.5)
    # Seven learners compute for a fifth of the time.
    assert found.exposed == pytest.approx(7 / 8 * 4 / 5)


def test_one_slow_learner_costs_its_own_samples_where_nobody_waits() -> None:
    found = speed(8, compute=Compute(0.5, slow={3: 5.0}))
    assert found.samples_per_second == pytest.approx((7 + 1 / 5) * BATCH / 0.5)


def test_one_slow_learner_holds_up_its_own_super_learner_alone() -> None:
    found = speed(4, 2, compute=Compute(0.5, slow={3: 5.0}))
    assert found.samples_per_second == pytest.approx((3 + 1 / 5) * 2 * BATCH / 0.5)


@pytest.mark.parametrize("mode", ["sync", "delay_by_one"])
@pytest.mark.parametrize("topology", ["ring", "random_pairs", "exponential", "grid"])
def test_a_distant_straggler_is_felt_by_all_though_steps_vary(
    mode: Mode, topology: str
) -> None:
    slow = Compute(0.5, spread=0.01, slow={0: 4.0})
    found = speed(36, topology=topology, communication=mode, compute=slow)
    assert found.steps_per_second == pytest.approx(1 / 2, rel=0.01)


def test_all_wait_for_the_slowest_of_random_steps() -> None:
    found = speed(2, communication="allreduce", compute=Compute(0.5, spread=0.3))
    # The mean of the larger of two lognormals: 2 e^(s²/2) Phi(s / sqrt 2).
    larger = 0.5 * 2 * 0.5 * (1 + math.erf(0.3 / 2))
    assert found.steps_per_second == pytest.approx(1 / larger, rel=0.03)


def test_one_learner_alone_computes() -> None:
    found = [speed(1, communication=m, compute=Compute(0.5, 0.3)) for m in MODES[:3]]
    rates = [f.steps_per_second for f in found]
    assert rates == pytest.approx([2.0] * 3, rel=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_one_super_learner_has_nobody_to_exchange_with(mode: Mode) -> None:
    found = speed(1, 1, communication=mode)
    assert (found.exchanges_per_step, found.staleness) == (0.0, {})
    found = speed(1, 2, communication=mode)
    assert found.exchanges_per_step == (mode == "allreduce")


# --- links


def test_an_all_reduce_of_one_bucket_follows_the_gradient() -> None:
    link = Link(bandwidth=50.0, latency=0.1)
    found = speed(4, communication="allreduce", link=link)
    # 6 turns with a quarter of 100 bytes each.
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 6 * (0.1 + 0.5)))


def test_an_all_reduce_hides_all_but_its_last_bucket_behind_a_long_gradient() -> None:
    assert overlapped(1.0, 10.0, 4 * BUCKET_BYTES) == pytest.approx(1 / 4)
    # Where the links take longer, what comes before the first bucket is not hidden.
    assert overlapped(10.0, 1.0, 4 * BUCKET_BYTES) == pytest.approx(1 / 4 + 10 - 1)
    assert overlapped(10.0, 0.0, 4 * BUCKET_BYTES) == 10.0


def test_a_round_of_the_ring_takes_two_messages() -> None:
    found = speed(5, communication="sync", link=Link(bandwidth=100.0, latency=0.25))
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 0.25 + 2.0))
    assert found.exposed == pytest.approx(2.25 / 2.75)


def test_a_hidden_round_costs_what_is_longer_than_the_gradient() -> None:
    link = Link(bandwidth=100.0)
    short = speed(5, communication="delay_by_one", link=Link(bandwidth=500.0))
    assert short.steps_per_second == pytest.approx(2.0)
    assert short.staleness == {1: 1.0}
    long = speed(5, communication="delay_by_one", link=link)
    assert long.steps_per_second == pytest.approx(1 / 2.0)


def test_rarer_rounds_cost_less() -> None:
    link = Link(bandwidth=100.0)
    found = speed(5, communication="sync", link=link, gossip_every=4)
    assert found.steps_per_second == pytest.approx(4 / (4 * 0.5 + 2.0))
    assert found.exchanges_per_step == 1 / 4


@pytest.mark.parametrize("topology", ["ring", "alternating_pairs", "random_pairs"])
def test_a_saturated_link_exchanges_as_often_as_it_can(topology: str) -> None:
    link = Link(bandwidth=20.0)
    found = speed(16, topology=topology, link=link, compute=Compute(0.5, 0.2))
    assert found.steps_per_second == pytest.approx(2.0)
    # A crossing that meets a busier one does not use all of its own link, and random
    # peers are busy more often.
    most, least = 20.0 / WEIGHTS, 0.65 if topology == "random_pairs" else 0.75
    rate = found.steps_per_second * found.exchanges_per_step
    assert least * most < rate <= 1.05 * most


def test_a_pair_on_a_saturated_link_exchanges_without_a_pause() -> None:
    found = speed(2, link=Link(bandwidth=20.0))
    rate = found.steps_per_second * found.exchanges_per_step
    assert rate == pytest.approx(20.0 / WEIGHTS, rel=0.1)


def test_a_crossing_of_very_many_steps_is_as_with_all_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {"link": Link(bandwidth=1.0), "compute": Compute(0.5, 0.2)}
    found = speed(4, **slow)
    monkeypatch.setattr("lightning_adpsgd.prediction.exchanges._LONGEST", 1000)
    whole = speed(4, **slow)
    assert found != whole
    assert found.exchanges_per_step == pytest.approx(whole.exchanges_per_step, rel=0.03)
    assert found.mean_staleness == pytest.approx(whole.mean_staleness, rel=0.03)


def test_the_slowest_links_take_no_longer_to_predict() -> None:
    slow, slower = (speed(2, link=Link(bandwidth=x)) for x in (1e-3, 1e-6))
    assert slow.exchanges_per_step == pytest.approx(1000 * slower.exchanges_per_step)
    assert slower.mean_staleness == pytest.approx(1e8 / 0.5, rel=0.1)
    rare = speed(2, link=Link(bandwidth=1e-3), gossip_every=1_000_000)
    assert rare.exchanges_per_step == pytest.approx(1e-6, rel=0.2)


def test_smaller_messages_are_exchanged_more_often() -> None:
    link = Link(bandwidth=20.0)
    half = speed(2, link=link, workload=Workload(WEIGHTS, wire_dtype=torch.bfloat16))
    whole = speed(2, link=link)
    assert half.exchanges_per_step == pytest.approx(2 * whole.exchanges_per_step, 0.1)


def sent_as(*seconds: float) -> torch.dtype:
    """What the engine keeps to, of forms that take so many of a step's half."""
    sizes = [4 * WORTH_BYTES, WORTH_BYTES, WORTH_BYTES // 2, WORTH_BYTES // 2]
    choice, form = FormChoice(sizes), 0
    for _ in range(100):
        form = choice.choose(0.5)
        choice.took(form, seconds[min(form, 2)])
    return (torch.float32, torch.int8, INT4, INT4)[form]


@pytest.mark.parametrize("steps", [0.4, 0.6, 1.8, 2.2, 30.0])
def test_an_exchange_is_as_narrow_as_the_engine_makes_it(steps: float) -> None:
    """`steps`: what an exchange at full width takes."""
    link = Link(bandwidth=MODEL / (steps * 0.5))
    found = speed(2, link=link, workload=Workload(MODEL))
    seconds = [steps * 0.5 / times for times in (1, 4, 8)]
    assert found.wire_dtype == sent_as(*seconds)
    fixed = Workload(MODEL, wire_dtype=found.wire_dtype)
    assert found == speed(2, link=link, workload=fixed)


def test_arithmetic_that_takes_longer_than_the_link_keeps_all_bits() -> None:
    slow = Costs(exchange=0.2 / MODEL, lattice=0.6 / MODEL, cores=64.0)
    found = speed(2, link=Link(), workload=Workload(MODEL), costs=slow)
    assert found.wire_dtype == torch.float32
    # Half a byte is bound by its arithmetic, which takes more than a step.
    coarse = speed(2, workload=Workload(MODEL, wire_dtype="int4"), costs=slow)
    assert coarse.exchanges_per_step == pytest.approx(0.5 / 0.6, rel=0.1)


def test_each_learner_sends_its_shard() -> None:
    link, shards = Link(bandwidth=MODEL / 2), Workload(2 * WORTH_BYTES)
    assert speed(2, 1, link=link, workload=Workload(MODEL)).wire_dtype == INT4
    assert speed(2, 4, link=Link(1e5), workload=shards).wire_dtype == torch.float32
    assert speed(2, 1, link=Link(1e5), workload=shards).wire_dtype == INT4


def test_one_slow_learner_does_not_widen_the_exchanges_of_the_others() -> None:
    link = Link(bandwidth=MODEL / 0.3)  # of a usual step half, of the mean one less
    slow = Compute(0.5, slow={3: 20.0})
    found = speed(8, link=link, workload=Workload(MODEL), compute=slow)
    assert found.wire_dtype == torch.int8


def test_a_slow_learner_may_be_beyond_the_neighbourhood_that_is_simulated() -> None:
    found = speed(64, compute=Compute(0.5, slow={63: 5.0}))
    assert found.steps_per_second == pytest.approx((63 + 1 / 5) / 64 / 0.5, rel=0.01)


def test_the_neighbourhood_that_is_simulated_may_be_all_slow() -> None:
    slow = dict.fromkeys(range(32), 100.0)
    found = speed(4000, compute=Compute(0.5, slow=slow), link=Link(1e6))
    mean = (4000 - 32 + 32 / 100) / 4000
    assert found.steps_per_second == pytest.approx(mean / 0.5)
    assert found.exchanges_per_step == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("num_slow", [1, 3])
def test_a_learner_that_has_almost_stopped_takes_no_time_to_predict(
    num_slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four; where most have stopped, one makes all the steps of a long window."""
    most = "lightning_adpsgd.prediction.exchanges._MOST_EVENTS"
    monkeypatch.setattr(most, 20_000)
    slow = dict.fromkeys(range(num_slow), 1e8)
    found = speed(4, compute=Compute(0.5, slow=slow), link=Link(1e6))
    assert found.exchanges_per_step == pytest.approx(2.0, rel=0.1)
    assert found.mean_staleness == pytest.approx(1.0)


def test_rare_rounds_are_predicted_too() -> None:
    found = speed(4, gossip_every=50, workload=Workload(MODEL), link=Link(1e9))
    assert found.exchanges_per_step == pytest.approx(2 / 50, rel=0.2)
    assert found.wire_dtype == torch.float32


def test_few_weights_are_sent_as_they_are() -> None:
    link = Link(bandwidth=20.0)
    small = Workload(WEIGHTS, BATCH, wire_dtype=None)
    assert speed(2, link=link) == speed(2, link=link, workload=small)


def test_each_learner_carries_its_share_of_a_round() -> None:
    link = Link(bandwidth=100.0)
    found = speed(5, 2, communication="sync", link=link)
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 1.0))


# --- the processor


def test_work_for_communication_adds_to_steps_that_all_make_together() -> None:
    costs = Costs(round=0.001, gradient=0.002, step=0.05)
    ring = speed(5, communication="sync", costs=costs)
    assert ring.steps_per_second == pytest.approx(1 / (0.5 + 0.1 + 0.05))
    everybody = speed(5, communication="allreduce", costs=costs)
    assert everybody.steps_per_second == pytest.approx(1 / (0.5 + 0.2 + 0.05))


def test_a_merge_costs_where_there_is_something_to_merge() -> None:
    often = speed(2, costs=Costs(merge=0.001), cpu_share=1.0)
    assert often.steps_per_second == pytest.approx(1 / (0.5 + 0.1))
    rarely = speed(2, costs=Costs(merge=0.001), cpu_share=1.0, link=Link(bandwidth=2.0))
    assert 1 / (0.5 + 0.1) < rarely.steps_per_second < 2.0


def test_exchanges_keep_merges_to_a_twentieth_of_a_step() -> None:
    found = speed(2, costs=Costs(merge=0.001))
    assert found.exchanges_per_step == pytest.approx(0.05 * 0.5 / 0.1)
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 0.05 * 0.5))


# --- the cores of exchanges

WORK = Costs(work=0.01)  # a second for each exchange, at either end


def test_exchanges_on_full_cores_take_the_share_that_they_are_granted() -> None:
    found = speed(2, costs=WORK, cpu_share=0.2)
    assert found.exchanges_per_step == pytest.approx(0.2 * 0.5)
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 0.1))
    rarely = speed(2, costs=replace(WORK, merge=0.001), cpu_share=0.2)
    assert rarely.exchanges_per_step < found.exchanges_per_step
    assert rarely.steps_per_second == pytest.approx(1 / (0.5 + 0.1))


def test_exchanges_that_find_idle_cores_take_nothing() -> None:
    assert speed(2, costs=replace(WORK, cores=64.0), cpu_share=0.2) == speed(2)
    shared = replace(WORK, cores=2.0, machine_cores=64.0)
    many = speed(2, costs=shared, cpu_share=0.2)
    alone = speed(2, costs=replace(shared, machine_cores=2.0), cpu_share=0.2)
    assert many.exchanges_per_step > alone.exchanges_per_step


def test_steps_that_want_more_cores_than_there_are_share_them() -> None:
    # Two learners that each keep a core busy have half of one.
    crowded = Costs(cores=0.5, busy=1.0)
    assert speed(2, costs=crowded).steps_per_second == pytest.approx(1 / 1.0)
    # As long waits as work: both find time on one core.
    waiting = replace(crowded, busy=0.5)
    assert speed(2, costs=waiting).steps_per_second == pytest.approx(1 / 0.5)


def test_exchanges_that_find_no_idle_core_take_a_twentieth() -> None:
    found = speed(2, costs=replace(WORK, cores=2.0))
    exchanges = found.exchanges_per_step
    busy = (0.5 + exchanges) / 1.0
    assert exchanges * busy**2 == pytest.approx(0.05 * 0.5)
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 0.05 * 0.5))


def test_without_a_bound_exchanges_take_the_time_of_training() -> None:
    found = speed(2, costs=WORK, cpu_share=1.0)
    assert found.exchanges_per_step == speed(2).exchanges_per_step == pytest.approx(1.0)
    assert found.steps_per_second == pytest.approx(1 / (0.5 + 1.0))


def test_a_super_learner_shares_the_work_of_its_exchanges() -> None:
    one, two = (speed(2, n, costs=WORK, cpu_share=0.2) for n in (1, 2))
    assert two.exchanges_per_step == pytest.approx(2 * one.exchanges_per_step)


def test_half_a_byte_costs_arithmetic_and_less_of_the_network() -> None:
    costs = Costs(work=8e-8, lattice=1e-7)  # seconds per byte
    coarse = Workload(2**20, wire_dtype="int4")
    found = speed(2, workload=coarse, costs=costs, cpu_share=1.0)
    # An eighth of the bits, and per block of 256 weights a scale, a power and a check.
    taken = 2**20 * (8e-8 * (1 / 8 + 8 / 1024) + 1e-7)
    assert found.exchanges_per_step == pytest.approx(1.0)
    assert found.steps_per_second == pytest.approx(1 / (0.5 + taken), rel=1e-3)


# --- against the timelines


@pytest.mark.parametrize(
    ("topology", "bandwidth"),
    [("ring", 50.0), ("ring", 1000.0), ("random_ring", 1000.0), ("random_pairs", 2e3)],
)
def test_a_neighbourhood_exchanges_as_all_do(
    topology: str, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "topology": topology,
        "link": Link(bandwidth),
        "compute": Compute(0.5, 0.2),
    }
    local = speed(120, **arguments)
    monkeypatch.setattr("lightning_adpsgd.prediction.exchanges._LOCAL", 120)
    whole = speed(120, **arguments)
    # Where links are full, the draw decides for long who takes turns with whom.
    rel = 0.05 if bandwidth > 100 else 0.25
    assert local.exchanges_per_step == pytest.approx(whole.exchanges_per_step, rel=rel)
    assert local.mean_staleness == pytest.approx(whole.mean_staleness, rel=rel)


@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_learners_are_predicted_within_seconds(mode: Mode) -> None:
    found = speed(
        1250,
        8,
        communication=mode,
        compute=Compute(0.5, 0.1),
        link=Link(1000.0),
        inner_link=Link(1000.0),
    )
    assert 0 < found.samples_per_second < 10_000 * BATCH / 0.5


# --- what it is told


def test_hours_are_samples_over_speed() -> None:
    assert speed(4).hours(64 * 7200) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cpu_share": 0.0}, r"`cpu_share` must be in \(0, 1\], got 0.0"),
        ({"num": 0}, "`num_super_learners` must be at least 1, got 0"),
        ({"size": -1}, "`super_learner_size` must be at least 1, got -1"),
        ({"gossip_every": 0}, "`gossip_every` must be at least 1, got 0"),
        ({"communication": "often"}, "`communication` must be one of"),
        (
            {"num": 65, "topology": "complete"},
            "at most 32 super-learners, got 65",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(arguments: dict, message: str) -> None:
    num, size = arguments.pop("num", 4), arguments.pop("size", 1)
    with pytest.raises(ValueError, match=message):
        speed(num, size, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num": 2.5}, "`num_super_learners` must be a whole number, got 2.5 of type"),
        ({"gossip_every": 2.5}, "`gossip_every` must be a whole number, got 2.5 .*=1`"),
    ],
)
def test_what_has_a_wrong_type_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        speed(arguments.pop("num", 4), **arguments)


def test_a_wire_dtype_is_for_exchanges_alone() -> None:
    with pytest.raises(ValueError, match="`wire_dtype` applies to"):
        speed(4, communication="sync", workload=Workload(WEIGHTS, 1, torch.float16))


def test_a_wire_dtype_may_be_a_name_and_must_be_known() -> None:
    assert Workload(WEIGHTS, wire_dtype="int8").wire_dtype == "int8"
    with pytest.raises(ValueError, match="`wire_dtype` must be one of"):
        Workload(WEIGHTS, wire_dtype="int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"must be one of .*, got torch.int32"):
        Workload(WEIGHTS, wire_dtype=torch.int32)


def test_the_backward_pass_is_no_more_than_a_step() -> None:
    with pytest.raises(ValueError, match=r"`backward` must be in \[0, 1\], got 1.1"):
        Workload(WEIGHTS, backward=1.1)
