"""The pure parts of the benchmarks, and emulated hosts where root can make them."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    cables,
    hosts,
    killable,
    kills,
    learners,
    overlap,
    page,
    plots,
    results,
    straggler,
    work_sharing,
    workload,
)
from benchmarks.__main__ import names
from benchmarks.feed import LONGEST, SHORTEST, Reading, Task, Trace, rate
from benchmarks.killable import Outcome
from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, spread, take_turns
from tests.benchmarks.emulated import NEEDS_HOSTS
from tests.helpers import PATIENCE_S


def report() -> Report:
    rows = [
        Row({"size": 1, "method": name}, Spread(2.0, 1.0, 4.0), "ms", ratio)
        for name, ratio in (("copy_", 1.0), ("merge", 0.5), ("peer", None))
    ]
    targets = [Target("merge, of copy_", 0.8, 0.5)]
    return Report("What?", "copy_", rows, targets, {"gpu": "none here"}, ["A note."])


def trace(*stamps: float) -> Trace:
    return Trace(list(stamps), Reading(0, 0, 0), Reading(0, 0, 0))


# --- figures


def test_a_spread_is_the_median_between_its_quartiles() -> None:
    assert spread([1, 2, 3, 4, 5]) == Spread(3, 2, 4)
    assert spread([7.0]) == Spread(7, 7, 7)


def test_a_rate_turns_the_quartiles_round() -> None:
    assert Spread(2.0, 1.0, 4.0).per(8.0) == Spread(4.0, 2.0, 8.0)


def test_works_take_turns_and_warm_up_uncounted() -> None:
    done: list[str] = []
    works = {name: lambda name=name: done.append(name) for name in "ab"}
    seconds = take_turns(works, repetitions=2, warmups=1)
    assert done == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_a_target_knows_its_direction() -> None:
    assert Target("speed", 0.8, 0.8).met
    assert not Target("speed", 0.8, 0.79).met
    assert Target("loss", 1.02, 1.0, at_least=False).met
    assert not Target("loss", 1.02, 1.03, at_least=False).met


def test_a_rate_counts_only_the_time_in_which_all_trained() -> None:
    # Alone at first, the first steps once a second; together, ten times as fast.
    alone_first = trace(0.0, 1.0, 2.0, *(2.0 + 0.1 * k for k in range(1, 11)))
    assert rate([alone_first, trace(2.0, 2.5, 3.0)]) == pytest.approx((10 + 2) / 2)


def test_a_task_counts_whole_periods_within_its_bounds() -> None:
    assert Task(seconds=2.0).count_for(0.1) == 20
    assert Task(seconds=2.0, period=8).count_for(0.1) == 16
    assert Task(seconds=2.0).count_for(5.0) == SHORTEST
    assert Task(seconds=2.0).count_for(1e-6) == LONGEST


def test_a_stragglers_super_learner_takes_fewer_steps() -> None:
    alone, paired = (straggler.counts(name, 1.0) for name in ("adpsgd", "hadpsgd"))
    assert alone[0] == alone[2] > alone[3]
    assert paired[0] == paired[1] > paired[2] == paired[3]
    assert len(set(straggler.counts("ddp", 1.0))) == 1


def test_the_time_of_an_epoch_is_that_of_later_ones_against_the_ideal() -> None:
    row = straggler.epoch_row("5 x", work_sharing.DEFAULT, [9.0, 1.9, 2.1], ideal=1.6)
    assert (row.value.median, row.ratio) == (2.0, 1.25)
    assert row.details == {"first epoch, s": 9.0}
    (target,) = straggler.targets([row])
    assert (target.bound, target.met) == (1.1, False)
    assert "5 x" in target.claim


def test_consensus_distance_is_that_of_the_definition() -> None:
    weights = torch.tensor([[3.0, 4.0], [3.0, 2.0]])
    # Each is 1 away from the mean (3, 3), whose norm is sqrt(18).
    assert overlap.relative_consensus_distance(weights) == pytest.approx(18**-0.5)


# --- workload


def test_a_timed_model_waits_and_fills_gradients() -> None:
    model = workload.make_model(seconds=0.03, widths=workload.NARROW)
    begin = time.perf_counter()
    workload.loss(model, next(workload.batches(seed=1))).backward()
    assert time.perf_counter() - begin >= 0.03
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is not None and torch.all(g == 1e-6) for g in gradients)


def test_models_and_batches_are_the_same_at_every_call() -> None:
    first, second = (workload.weights_of(workload.make_model()) for _ in range(2))
    assert torch.equal(first, second)
    assert first.numel() * 4 == pytest.approx(34e6, rel=0.01)
    batches = [next(workload.batches(seed=3)) for _ in range(2)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    assert torch.equal(batches[0].classes, batches[1].classes)


# --- the file and the page


def test_results_are_written_whole_and_name_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = results.write("some", report(), "make it", seconds=1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["some.json"]
    content = json.loads(path.read_text())
    assert content["rows"][1]["ratio"] == 0.5
    assert content["targets"][0]["met"] is False
    assert {"date", "commit", "machine", "command"} <= set(content)
    assert os.uname().nodename not in path.read_text()


def test_a_failed_write_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = results.write("some", report(), "make it", seconds=1.0)
    before = path.read_text()
    with pytest.raises(TypeError):
        results.write("some", {"figure": object()}, "make it", seconds=1.0)
    assert path.read_text() == before


def test_the_page_shows_figures_misses_and_what_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("some", report(), "make it", seconds=1.0)
    figures = {"epoch": {"of ideal": 1.05, "ms": [2.0, 1.0, 3.0]}}
    results.write("plain", figures, "make it", seconds=1.0)
    text = page.write(tmp_path).read_text()
    assert "| 1 | merge | 2 [1, 4] | 0.500 |" in text
    assert "| some | merge, of copy_ | ≥ 0.8 | 0.5 | **missed** |" in text
    assert "Skipped: gpu: none here" in text
    assert "| epoch, of ideal | 1.05 |" in text
    assert "| epoch, ms | 2 [1, 3] |" in text
    assert (tmp_path / "some.svg").read_text().startswith("<?xml")


def test_numbers_have_three_digits_and_no_needless_exponent() -> None:
    shown = [page.number(value) for value in (0.0, 0.01234, 12.345, 43210.0, 1e-7)]
    assert shown == ["0", "0.0123", "12.3", "43210", "1.00e-07"]


def test_ours_controls_and_peers_are_told_apart_by_colour() -> None:
    names = {
        plots.OURS: ("adpsgd, one learner", "merge", "exchange", "async", "int8"),
        plots.CONTROL: ("solo, plain loop", "ddp", "copy_ (the limit)", "one learner"),
        plots.PEER: ("Decent-DP ring", "torchft DDP", "torch post-local"),
    }
    found = {k: {plots.colour_of(name) for name in v} for k, v in names.items()}
    assert found == {colour: {colour} for colour in names}


def test_a_plot_has_room_for_all_that_it_marks(tmp_path: Path) -> None:
    def row(median: float, **details: float) -> dict[str, Any]:
        value = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
        case = {"link": "slow", "method": f"{median}"}
        return {"case": case, "value": value, "unit": "steps/s", "details": details}

    rows = [row(2.0), row(3.0, predicted=9.0)]
    figure = plots.draw(rows)
    (axes,) = figure.axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert left == 0
    assert right > 9.0
    assert bottom > 1
    assert top < 0
    assert plots.write(rows, "Some plot", tmp_path).name == "some-plot.svg"


def test_losses_are_drawn_from_the_least_and_other_values_from_zero() -> None:
    def begin(unit: str) -> float:
        rows = [Row({"method": str(v)}, Spread(v, v, v), unit) for v in (1.0, 1.1)]
        (axes,) = plots.draw(Report("What?", "", rows).as_dict()["rows"]).axes
        return axes.get_xlim()[0]

    assert begin("steps/s") == 0
    assert begin("nats") == pytest.approx(0.996)


def test_the_runner_finds_the_modules_that_measure() -> None:
    known = {"exchange", "overlap", "merge", "overhead", "scaling", "straggler"}
    assert known <= set(names())
    assert not {"timing", "hosts", "results"} & set(names())


# --- learners and hosts


def test_learners_report_by_rank_and_name_who_failed() -> None:
    assert learners.run(lambda place: place.rank * 10, 2, timeout_s=PATIENCE_S) == [
        0,
        10,
    ]

    def fail_in_one(place: learners.Place) -> None:
        if place.rank == 1:
            raise ValueError("no gradient today")

    with pytest.raises(learners.LearnersFailed, match=r"learner 1(.|\n)*no gradient"):
        learners.run(fail_in_one, 2, timeout_s=PATIENCE_S)


def test_a_learner_that_does_not_end_is_killed() -> None:
    def stay(place: learners.Place) -> None:
        while True:
            time.sleep(1)

    with pytest.raises(learners.LearnersFailed, match="did not end in time"):
        learners.run(stay, 1, timeout_s=0.5)


def test_a_command_that_takes_too_long_ends_with_all_that_it_has_started() -> None:
    words = ["sh", "-c", "sleep 600 & wait"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, start_new_session=True) as process:
        assert hosts.wait_or_kill([process], timeout_s=0.2) == [-9]
        assert process.stdout is not None
        # It ends when nobody is left who could write to it.
        assert process.stdout.read() == b""


@NEEDS_HOSTS
def test_hosts_know_one_another_by_name_and_are_gone_at_the_end() -> None:
    with hosts.emulated(2, "200mbit") as emulated:
        namespaces = [emulated.namespace(host) for host in range(2)]
        command = ["sh", "-c", "hostname; getent hosts host1; echo $MASTER_ADDR"]
        found = emulated.run(lambda host: command, timeout_s=PATIENCE_S)
        assert [done.code for done in found] == [0, 0]
        words = [done.output.split() for done in found]
        assert words == [
            [f"host{h}", "10.77.0.2", "host1", "10.77.0.1"] for h in (0, 1)
        ]
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    assert not [name for name in namespaces if name in left.stdout]


HEARS = """
import socket, sys, time
talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
talk.bind(("", 9999))
talk.setblocking(False)
heard = False
for _ in range(40):
    talk.sendto(b"x", (sys.argv[1], 9999))
    time.sleep(0.02)
    try:
        heard |= bool(talk.recv(1))
    except OSError:
        pass
print(heard)
"""


@NEEDS_HOSTS
def test_hosts_are_parted_and_muted_and_hear_one_another_again() -> None:
    with hosts.emulated(2) as emulated:

        def hears() -> list[bool]:
            others = emulated.addresses[::-1]
            done = emulated.run(
                lambda host: [sys.executable, "-c", HEARS, others[host]], PATIENCE_S
            )
            return [one.output.strip() == "True" for one in done]

        assert hears() == [True, True]
        emulated.mute(0, True)
        assert hears() == [True, False]
        emulated.mute(0, False)
        emulated.part([1], True)
        assert hears() == [False, False]
        emulated.part([1], False)
        assert hears() == [True, True]


@NEEDS_HOSTS
def test_hosts_are_removed_after_a_failure() -> None:
    made: list[str] = []

    def fail() -> None:
        with hosts.emulated(1) as emulated:
            made.append(emulated.namespace(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    assert made
    assert made[0] not in left.stdout


@NEEDS_HOSTS
def test_a_command_that_stays_is_killed_on_its_host() -> None:
    with hosts.emulated(1) as emulated:
        (done,) = emulated.run(lambda host: ["sleep", "60"], timeout_s=0.3)
    assert done.code == -9


@NEEDS_HOSTS
def test_a_shaped_link_is_as_fast_as_it_says() -> None:
    """4 MB at 80 Mbit/s take 0.4 s, less the bucket's 256 kB; the best of three."""
    program = (
        "import socket, sys, time\n"
        "host, size = sys.argv[1], 4_000_000\n"
        "if host == '0':\n"
        "    server = socket.create_server(('10.77.0.1', 5000))\n"
        "    for _ in range(3):\n"
        "        connection, _ = server.accept(); begin, got = time.time(), 0\n"
        "        while got < size: got += len(connection.recv(1 << 20))\n"
        "        print(time.time() - begin)\n"
        "else:\n"
        "    for _ in range(3):\n"
        "        while True:\n"
        "            try: c = socket.create_connection(('10.77.0.1', 5000)); break\n"
        "            except OSError: time.sleep(0.05)\n"
        "        c.sendall(bytes(size)); c.close()\n"
    )
    with hosts.emulated(2, "80mbit") as emulated:
        found = emulated.run(
            lambda host: [sys.executable, "-c", program, str(host)],
            timeout_s=PATIENCE_S,
        )
    seconds = [float(line) for line in found[0].output.split()]
    assert 0.33 < min(seconds) < 1.5


@NEEDS_HOSTS
def test_a_long_cable_takes_a_round_trip_of_its_delay() -> None:
    """A connection that is refused has taken one; the first one has asked for names."""
    program = (
        "import socket, time\n"
        "for _ in range(5):\n"
        "    begin = time.time()\n"
        "    try: socket.create_connection(('10.77.0.2', 9), 20)\n"
        "    except OSError: print(time.time() - begin)\n"
    )
    with hosts.emulated(2, delay_s=0.05) as emulated:
        found = emulated.run(
            lambda host: [sys.executable, "-c", program if host == 0 else ""],
            timeout_s=PATIENCE_S,
        )
    seconds = [float(line) for line in found[0].output.split()]
    assert 0.1 <= min(seconds) < 1.0


@pytest.mark.parametrize(("loss", "arrives"), [(0.0, True), (1.0, False)])
def test_a_frame_arrives_late_or_not_at_all(loss: float, arrives: bool) -> None:
    begin, enter = os.pipe2(os.O_NONBLOCK)
    leave, end = os.pipe2(os.O_NONBLOCK)
    direction = cables.Direction(begin, end, 0.5, loss)
    os.write(enter, b"frame")
    now = time.monotonic()
    direction.take()
    assert direction.deliver(now + 0.4) < 1.01
    with pytest.raises(BlockingIOError):
        os.read(leave, 9)
    assert direction.deliver(now + 60.0) == 1.0
    with nullcontext() if arrives else pytest.raises(BlockingIOError):
        assert os.read(leave, 9) == b"frame"
    for one in (begin, enter, leave, end):
        os.close(one)


FINAL = overlap.Final(loss=2.0, of_mean=1.9, distance=0.1, exchanges=0.25)


def test_bounds_are_taken_from_the_rows_that_they_name() -> None:
    def row(table: str, name: str, steps: float, ratio: float) -> Row:
        case = {"hosts": "4 x 1", "link": "1 Gbit/s", "method": name}
        value = Spread(steps, steps, steps)
        return Row(case, value, "steps/s", ratio, "", table, {"exposed": 0.02})

    rows = [
        row(overlap.COMPUTED, "adpsgd", 8.0, 0.8),
        row(overlap.COMPUTED, "ddp", 4.0, 0.4),
        row(overlap.COMPUTED, "Decent-DP one-peer-exp", 5.0, 0.5),
        row(overlap.TIMED, "adpsgd", 9.0, 0.99),
        overlap.loss_row("adpsgd, 1 Gbit/s", [FINAL], control=2.0 / 1.01),
    ]
    found = {
        target.claim: (target.value, target.met) for target in overlap.targets(rows)
    }
    assert found == {
        f"adpsgd, 4 hosts, 1 Gbit/s{what}": value
        for what, value in {
            ": exposed share of wall time": (0.02, False),
            ": of solo": (0.8, False),
            ": of ddp": (2.0, True),
            ": of Decent-DP": (1.6, True),
            ", timed wait: of solo": (0.99, True),
            ": loss after 1200 annealed steps, of ddp's": (pytest.approx(1.01), True),
        }.items()
    }


def test_all_losses_stand_in_one_panel_with_their_exchanges() -> None:
    rows = [overlap.loss_row(name, [FINAL] * 3, 2.0) for name in ("ddp", "adpsgd")]
    drawn = [row.__dict__ | {"value": row.value._asdict()} for row in rows]
    assert len(plots.draw(drawn).axes) == 1
    assert rows[0].details["exchanges a step"] == 0.25
    assert rows[0].details["seeds"] == 3


def test_an_annealed_optimizer_follows_the_schedule_by_itself() -> None:
    task = Task(steps=20, annealed=True, widths=workload.NARROW)
    model = task.make_model(rank=0)
    optimizer, rates = task.make_optimizer(model.parameters()), []
    for _ in range(20):
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    shares = [workload.rate_at(step / 20) for step in range(20)]
    assert rates == pytest.approx([workload.PEAK * share for share in shares])
    assert max(rates) == workload.PEAK


def steady(begin: float, end: float, step: float = 0.5) -> list[float]:
    return [begin + step * k for k in range(round((end - begin) / step) + 1)]


def test_a_learner_that_another_s_death_stops_has_a_slow_window() -> None:
    lives = {0: [steady(0, 20), steady(22, 40)], 1: [steady(0, 40)]}
    stopped = Outcome(lives, [], kills=[(20.5, 1)])
    # From 17 to 22: six steps of half a second and one of two.
    assert kills.slowest_window(stopped) == pytest.approx(5 / 7 / 0.5)


def test_a_learner_that_was_killed_itself_has_none() -> None:
    lives = {0: [steady(0, 20), steady(30, 50)], 1: [steady(0, 50)]}
    killed = Outcome(lives, [], kills=[(20.1, 0)])
    assert kills.slowest_window(killed) == 1
    assert kills.steps_per_second(killed) == [2, 2, 2]
    assert [len(stretch) for stretch in kills.settled(killed)] == [38, 38, 98]


def test_learners_are_killed_and_started_again(tmp_path: Path) -> None:
    def program(life: killable.Killable) -> None:
        for _ in life.batches():
            pass
        life.leave(torch.tensor([float(life.number)]))

    first = killable.Killable(0, 2, 0, 0, tmp_path, 0.0)
    outcome = killable.run(program, first, 3.0, kill_every_s=1.0, absent_s=0.2)
    assert len(outcome.kills) == 2
    of_each = [sum(n == number for _, n in outcome.kills) for number in range(2)]
    assert [len(outcome.lives[number]) - 1 for number in range(2)] == of_each
    assert [weights.item() for weights in outcome.weights] == [0.0, 1.0]
    assert not outcome.trouble
