"""How far ahead exchanges read: the share of an update that the next one repeats."""

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.weights import look_ahead
from lightning_adpsgd.weights.look_ahead import LookAhead
from lightning_adpsgd.weights.replica import Part, Replica, as_real
from tests.helpers import PATIENCE_S

pytestmark = pytest.mark.usefixtures("engine_device")


def looking(weights: Tensor) -> tuple[Replica, LookAhead]:
    replica = Replica([[as_real(weights)]], 8, threading.Condition(), part_elements=4)
    return replica, LookAhead(replica, most_of_step=math.inf)


def step(weights: Tensor, ahead: LookAhead, update: Tensor | float) -> None:
    ahead.begin_update()
    weights += update
    ahead.end_update()


def factor_after(updates: Iterable[Tensor | float]) -> float:
    weights = torch.zeros(10, dtype=torch.float64)
    _, ahead = looking(weights)
    for update in updates:
        step(weights, ahead, update)
    return ahead.factors()[0]


def read(replica: Replica, ahead: float) -> Tensor:
    pieces = [torch.empty(len(chunk), dtype=chunk.dtype) for chunk in replica.chunks]
    for chunk, piece in zip(replica.chunks, pieces, strict=True):
        chunk.read(piece, [ahead])
    return torch.cat(pieces)


def with_momentum(momentum: float, seed: int) -> list[Tensor]:
    generator, velocity, updates = torch.Generator().manual_seed(seed), 0.0, []
    for _ in range(200):
        velocity = momentum * velocity + torch.randn(10, generator=generator)
        updates.append(velocity)
    return updates


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_factor_is_the_momentum_of_the_updates(momentum: float) -> None:
    found = [factor_after(with_momentum(momentum, seed)) for seed in range(20)]
    # Without momentum a share below zero counts as zero.
    assert sum(found) / len(found) == pytest.approx(momentum, abs=0.12)


def test_equal_updates_repeat_whole_and_shrinking_ones_in_part() -> None:
    assert factor_after([1.0] * 50) == pytest.approx(1.0, abs=1e-4)
    assert factor_after([0.5**n for n in range(50)]) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    "updates",
    [
        [],
        [1.0],
        [1.0, -1.0] * 10,  # beyond the stable rate
        [0.0] * 10,
        [float("nan")] * 3,
        [1.0, float("inf"), 1.0],
    ],
    ids=str,
)
def test_where_nothing_repeats_no_reading_is_ahead(updates: list[float]) -> None:
    assert factor_after(updates) == 0.0


def test_it_recovers_from_a_step_that_changed_nothing() -> None:
    """Such as one that a gradient scaler skipped."""
    assert factor_after([1.0] * 20 + [0.0] + [1.0] * 30) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_reading_adds_the_share_of_the_optimizers_own_update(
    dtype: torch.dtype,
) -> None:
    weights = torch.arange(6).to(dtype)
    replica, ahead = looking(weights)
    real = as_real(weights)
    before = read(replica, 0.5)
    assert torch.equal(before, real)  # no update is known
    ahead.begin_update()
    real += 2.0
    assert torch.equal(read(replica, 0.5), before + 2.0)  # it is not complete
    ahead.end_update()
    for chunk in replica.chunks:
        chunk.add(torch.ones(len(chunk), dtype=chunk.dtype), 4.0)
    replica.merge()
    assert torch.equal(real, before + 6.0)
    # What exchanges changed is not repeated.
    assert torch.equal(read(replica, 0.5), before + 6.0 + 0.5 * 2.0)
    assert torch.equal(read(replica, 0.0), real)


def test_half_precision_keeps_its_update_in_full() -> None:
    weights = torch.ones(4, dtype=torch.bfloat16)
    replica, ahead = looking(weights)
    step(weights, ahead, 0.0078125)  # the last place of 1
    assert torch.equal(read(replica, 0.5), torch.full((4,), 1 + 1.5 * 0.0078125))


def test_other_weights_forget_the_update() -> None:
    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    step(weights, ahead, 1.0)
    replica.put([torch.full((4,), 5.0)])
    assert torch.equal(read(replica, 1.0), torch.full((4,), 5.0))


def test_weights_that_are_shown_in_place_of_others_have_no_update() -> None:
    """Those of a load, or a mean that is adopted: the update was that of the others."""
    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    step(weights, ahead, 1e6)
    weights.fill_(5.0)
    replica.show([[weights]])
    assert torch.equal(read(replica, 1.0), weights)
    step(weights, ahead, 1.0)
    assert torch.equal(read(replica, 1.0), weights + 1.0)


def test_an_update_within_which_exchanges_were_merged_is_not_used() -> None:
    """As where `on_before_optimizer_step` saves a checkpoint with all learners."""
    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    step(weights, ahead, 1.0)
    ahead.begin_update()
    for chunk in replica.chunks:
        chunk.add(torch.ones(len(chunk)), 4.0)
    replica.merge_all()
    replica.show([[weights]])
    weights += 1.0
    ahead.end_update()
    assert torch.equal(read(replica, 1.0), weights)


def test_weights_are_named_in_place_only_where_nothing_is_added() -> None:
    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    ((part,),) = (chunk.parts for chunk in replica.chunks)
    assert part.plain is weights or part.plain is not None
    step(weights, ahead, 1.0)
    assert part.plain is None


def test_a_learner_without_weights_of_its_own_looks_at_nothing() -> None:
    ahead = LookAhead(Replica([[]], 8, threading.Condition()))
    for _ in range(3):
        step(torch.zeros(1), ahead, 1.0)
    assert ahead.factors()[0] == 0.0


def test_an_older_update_counts_by_what_is_left_of_it() -> None:
    weights = torch.zeros(4, dtype=torch.float64)
    _, ahead = looking(weights)
    for n in range(40):
        step(weights, ahead, 0.5**n)
    now, later, *_ = ahead.factors()
    assert (now, later) == pytest.approx((0.5, 0.25), abs=1e-3)


def test_parts_take_turns_where_finding_updates_would_take_long() -> None:
    weights = torch.zeros(12)  # three parts
    replica = Replica([[weights]], 8, threading.Condition(), part_elements=4)
    ahead = LookAhead(replica, most_of_step=1e-9)
    for found_ago in ([0, 0, 0], [0, 1, 1], [1, 0, 2], [2, 1, 0], [0, 2, 1]):
        step(weights, ahead, 1.0)
        pieces = [torch.empty(len(chunk)) for chunk in replica.chunks]
        for chunk, piece in zip(replica.chunks, pieces, strict=True):
            chunk.read(piece, [10.0, 20.0, 30.0])
        added = (torch.cat(pieces) - weights)[::4]
        assert added.tolist() == [10.0 * (1 + age) for age in found_ago]
    assert ahead.factors()[0] > 0.5  # measured in each step all the same


def test_parts_that_differ_in_time_take_no_more_than_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each second step is slow; a single one says little about the next."""
    begun, clock = list[int](), [0.0, 0.0]
    fake = SimpleNamespace(
        thread_time=lambda: clock[0], perf_counter=lambda: sum(clock)
    )
    monkeypatch.setattr(look_ahead, "time", fake)

    def begin_update(part: Part, memory: Tensor) -> None:
        clock[0] += 0.004 if len(begun) % 2 else 0.001
        begun[-1] += 1

    monkeypatch.setattr(Part, "begin_update", begin_update)
    parts = Replica([[torch.zeros(400)]], 400, threading.Condition(), part_elements=4)
    ahead = LookAhead(parts, most_of_step=0.02)
    for _ in range(100):
        begun.append(0)
        clock[1] += 1.0
        ahead.begin_update()
        ahead.end_update()
    spent = sum(num * (0.001, 0.004)[n % 2] for n, num in enumerate(begun, 1))
    assert 0.75 < (spent - begun[0] * 0.004) / (0.02 * 100) < 1.25


def test_a_step_that_never_began_finds_nothing() -> None:
    """An optimizer that does not call its closure; the memory has the update before."""
    weights = torch.full((4,), 100.0)
    replica, ahead = looking(weights)
    step(weights, ahead, 1.0)
    weights += 1.0
    ahead.end_update()
    assert torch.equal(read(replica, 1.0), weights)
    assert ahead.factors()[0] == 0.0


def test_an_update_that_is_too_old_is_not_used() -> None:
    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    step(weights, ahead, 1.0)
    for chunk in replica.chunks:
        for part in chunk.parts:
            part.step_on()
    assert torch.equal(read(replica, 1.0), weights)


def test_an_update_of_some_weights_is_noticed_wherever_they_are() -> None:
    """Those before may be frozen, or rows of words that do not occur."""
    weights = torch.zeros(1 << 16)
    ahead = LookAhead(Replica([[weights]], 1 << 16, threading.Condition()))
    for _ in range(20):
        ahead.begin_update()
        weights[3 << 14 :] += 1.0
        ahead.end_update()
    assert ahead.factors()[0] > 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        weights = torch.zeros(4, dtype=torch.float32)
        _, ahead = looking(weights)
        for _ in range(20):
            step(weights, ahead, 1.0)
    finally:
        torch.set_default_dtype(usual)
    assert ahead.factors()[0] > 0.9


def test_weights_that_were_not_finite_leave_nothing_in_those_that_replace_them() -> (
    None
):
    """A mean that a diverged learner adopts is written in place."""
    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    for update in [1.0] * 20 + [math.nan]:
        step(weights, ahead, update)
    weights.fill_(5.0)
    assert torch.equal(read(replica, ahead.factors()[0]), weights)


@pytest.mark.parametrize("accident", [1e4, math.inf, math.nan])
@pytest.mark.parametrize("times", [1, 4])
def test_weights_that_a_program_puts_back_have_nothing_of_an_accident(
    accident: float, times: int
) -> None:
    """Whenever the turn of a part is; and the next updates are looked at again."""
    weights = torch.zeros(12)  # three parts
    replica = Replica([[weights]], 8, threading.Condition(), part_elements=4)
    ahead = LookAhead(replica, most_of_step=1e-9)
    for _ in range(20):
        step(weights, ahead, 1.0)
    for _ in range(times):
        step(weights, ahead, accident)
        weights.fill_(5.0)
    for _ in range(16):
        pieces = [torch.empty(len(chunk)) for chunk in replica.chunks]
        for chunk, piece in zip(replica.chunks, pieces, strict=True):
            chunk.read(piece, ahead.factors())
        added = torch.cat(pieces) - weights
        assert 0.0 <= float(added.min()) <= float(added.max()) <= 1.0
        step(weights, ahead, 1.0)
    assert ahead.factors()[0] > 0.9


def test_updates_that_grow_are_repeated() -> None:
    """As in a warm-up, or at once, as where a layer is unfrozen."""
    assert factor_after([0.0] + [float(n) for n in range(1, 40)]) > 0.9
    assert factor_after([1.0] * 20 + [1e3] * 30) > 0.9


@pytest.mark.parametrize("busy", ["begin", "end", "both"])
def test_training_does_not_wait_for_the_lock(busy: str) -> None:
    """An exchange holds it; the update of before, or a later one, is read instead."""
    weights, state = torch.zeros(4), threading.Condition()
    replica = Replica([[weights]], 8, state)
    ahead = LookAhead(replica, most_of_step=math.inf)
    step(weights, ahead, 1.0)
    with held(state) if busy != "end" else nullcontext():
        ahead.begin_update()
    weights += 2.0
    with held(state) if busy != "begin" else nullcontext():
        ahead.end_update()
    piece = torch.empty(4)
    replica.chunks[0].read(piece, [10.0, 100.0])
    # Without a beginning that of before; without an end none, as during the step.
    assert (piece - weights)[0] == (0.0 if busy == "end" else 100.0)
    step(weights, ahead, 3.0)
    replica.chunks[0].read(piece, [10.0])
    assert (piece - weights)[0] == 30.0


def test_an_update_that_a_busy_lock_has_hidden_is_shown_with_its_age() -> None:
    weights, state = torch.zeros(4), threading.Condition()
    replica = Replica([[weights]], 8, state)
    ahead = LookAhead(replica, most_of_step=math.inf)
    ahead.begin_update()
    weights += 1.0
    with held(state):
        ahead.end_update()
        ahead.begin_update()
    weights += 1.0
    ahead.end_update()
    piece = torch.empty(4)
    replica.chunks[0].read(piece, [10.0, 100.0])
    assert (piece - weights)[0] == 100.0


def test_a_step_that_failed_leaves_no_weights_in_place_of_an_update() -> None:
    """The lock was busy at the end of the step before."""
    weights, state = torch.full((8,), 100.0), threading.Condition()
    replica = Replica([[weights]], 8, state, part_elements=4)
    ahead = LookAhead(replica, most_of_step=1e-9)
    for _ in range(2):
        step(weights, ahead, 1.0)
    ahead.begin_update()
    weights += 1.0
    with held(state):
        ahead.end_update()
    ahead._num_found = 1  # the same part's turn
    ahead.begin_update()  # and an error in the optimizer
    step(weights, ahead, 1.0)
    piece = torch.empty(8)
    replica.chunks[0].read(piece, [1.0] * 16)
    assert float((piece - weights).max()) == 1.0


def test_a_part_may_grow_older_while_it_is_read() -> None:
    """The training thread counts its steps without the lock."""

    class Counting(list[float]):
        def __len__(self) -> int:
            part.step_on()
            return super().__len__()

    weights = torch.zeros(4)
    replica, ahead = looking(weights)
    ((part,),) = (chunk.parts for chunk in replica.chunks)
    step(weights, ahead, 1.0)
    part.read(piece := torch.empty(4), Counting([10.0]))
    assert torch.equal(piece, weights + 10.0)


@contextmanager
def held(state: threading.Condition) -> Iterator[None]:
    """A context in which another thread has the lock."""
    has, done = threading.Event(), threading.Event()

    def hold() -> None:
        with state:
            has.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait(PATIENCE_S)
    try:
        yield
    finally:
        done.set()
        thread.join()
