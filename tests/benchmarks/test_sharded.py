"""The benchmark of learners that hold a model in shards."""

from functools import partial
from operator import sub

import pytest

from benchmarks import learners, sharded
from benchmarks.learners import Place
from benchmarks.sharded import GOSSIP, PAIRS, WARMUPS, Reading, Seen
from tests.sharded import needs_fsdp2_on_cpus

pytestmark = needs_fsdp2_on_cpus

LIMIT_S = 200.0


def seen(*stamps: float, busy_s: float = 0.0, sent: int = 0, tensors: int = 0) -> Seen:
    """A learner of shards of 100 bytes that warmed up before its first stamp."""
    warm = [stamps[0] - n for n in range(WARMUPS, 0, -1)]
    last = Reading(busy_s, 0.5, sent)
    return Seen([*warm[1:], *stamps], Reading(), last, tensors, 100)


def test_steps_are_compared_where_all_learners_trained() -> None:
    # The second begins late, and is slow while the first does not train.
    run = [seen(0.0, 9.0, 10.0, 11.0, 12.0), seen(8.0, 9.1, 10.2, 11.3, 99.0)]
    assert sharded.step_s(run) == pytest.approx((1.0 + 1.1) / 2)


def test_counters_are_those_of_the_steps_after_the_first() -> None:
    one = seen(10.0, 11.0, 12.0, busy_s=0.8, sent=400)
    assert sharded.shards_a_step(one) == 2.0
    assert sharded.exposed_share(one) == 0.25
    assert sharded.processor_s([one]) == pytest.approx(0.4)


def test_a_ratio_is_to_the_run_beside_it() -> None:
    slow, fast = [seen(0.0, 2.0, 4.0)], [seen(0.0, 1.0, 2.0)]
    runs = {PAIRS: [slow, fast], GOSSIP: [slow, fast]}
    row = sharded.row_of("paced", GOSSIP, runs)
    assert (row.ratio, row.details["ratio, high"]) == (1.0, 1.0)
    assert row.value.median == 1500.0


def test_memory_is_counted_in_shards_beside_the_control_and_has_a_bound() -> None:
    runs = {
        PAIRS: [[seen(0.0, 1.0, tensors=1000)]],
        GOSSIP: [[seen(0.0, 1.06, tensors=1120)]],
    }
    rows = [sharded.row_of("paced", GOSSIP, runs), sharded.memory_row("paced", runs)]
    time, memory = sharded.targets_of(rows)
    assert (time.bound, time.value, time.met) == (1.05, pytest.approx(1.06), False)
    assert (memory.bound, memory.value, memory.met) == (1.3, pytest.approx(1.2), True)


def test_the_control_is_two_jobs_with_ports_of_their_own() -> None:
    places = [sharded.pair_of(Place(rank, 4, 4, port=20_000)) for rank in range(4)]
    assert [place.rank for place in places] == [0, 1, 0, 1]
    assert [place.port for place in places] == [20_000, 20_000, 20_004, 20_004]
    assert {place.world_size for place in places} == {2}


def test_what_is_compared_is_the_same_training_with_and_without_gossip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("WIDTH", 16), ("DEPTH", 1), ("LENGTH", 4)):
        monkeypatch.setattr(sharded, name, value)
    runs: dict[str, list[list[Seen]]] = {}
    for name in (PAIRS, GOSSIP):
        program = partial(sharded.learn, name=name, step_s=0.02, steps=WARMUPS + 3)
        runs[name] = [learners.run(program, 4, LIMIT_S)]
    for (run,) in runs.values():
        assert all(len(one.stamps) == WARMUPS + 3 for one in run)
        assert len({one.shard for one in run}) == 1
        assert all(one.last.processor_s > one.first.processor_s for one in run)
        # Of each learner: on a busy machine three steps of one are over before
        # another begins.
        assert all(min(map(sub, one.stamps[1:], one.stamps)) >= 0.02 for one in run)
    assert all(sharded.shards_a_step(one) == 0 for one in runs[PAIRS][0])
    row = sharded.memory_row("paced", runs)
    assert row.value.low >= 1.0
