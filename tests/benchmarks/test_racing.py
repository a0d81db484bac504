"""The race: its data and pace, the search for rates, what is run, and the report."""

import itertools
import json
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import hosts, page, plots, race, results
from benchmarks.racing import (
    columns,
    entrants,
    loops,
    report,
    runs,
    schedule,
    tuning,
)
from benchmarks.racing.course import Course, shares_ended, weights_of
from benchmarks.racing.entrants import AT_THE_END, FLOOR, SHARDED
from benchmarks.racing.problems import FRAMES, PHONES, PROBLEMS, Pace
from benchmarks.racing.runs import Cell, Run, Track
from benchmarks.racing.schedule import Race, Standing
from benchmarks.racing.tuning import Setting
from benchmarks.timing import mean_with_interval
from benchmarks.workload import AT_PEAK, WARM_UP, Batch, loss, rate_at
from lightning_adpsgd.strategy.job import Job
from tests.benchmarks.emulated import NEEDS_HOSTS

# --- problems


@pytest.mark.parametrize("name", PROBLEMS)
def test_data_and_start_are_decided_by_the_seed_alone(name: str) -> None:
    problem = PROBLEMS[name]
    first, second = (next(problem.batches_of(3, rank=1)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.classes, second.classes)
    assert not torch.equal(first.inputs, next(problem.batches_of(3, rank=2)).inputs)
    starts = [next(iter(problem.make_model(seed).parameters())) for seed in (3, 3, 4)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_phones_of_generated_speech_stay_for_several_frames() -> None:
    batch = next(PROBLEMS["bilstm"].batches(1, 200))
    assert batch.classes.shape == (200, FRAMES)
    assert 0 <= batch.classes.min() <= batch.classes.max() < PHONES
    changed = (batch.classes[:, 1:] != batch.classes[:, :-1]).float().mean().item()
    assert 0.15 < changed < 0.26


def test_a_step_lasts_as_long_as_it_says_and_its_gradient_is_that_of_no_wait() -> None:
    problem = PROBLEMS["perceptron"]
    batch, pace = next(problem.batches_of(1, 0)), Pace(0.2)
    paced, free = problem.make_model(0, pace), problem.make_model(0)
    loss(free, batch).backward()
    begin = time.monotonic()
    pace.begin()
    loss(paced, batch).backward()
    pace.until(1.0)
    assert time.monotonic() - begin >= 0.2
    for waited, at_once in zip(paced.parameters(), free.parameters(), strict=True):
        assert waited.grad is not None
        assert at_once.grad is not None
        assert torch.equal(waited.grad, at_once.grad)


# --- the course


def test_the_rate_rises_stays_and_falls_as_the_papers_does() -> None:
    shares = [k / 1000 for k in range(1000)]
    rates = [rate_at(share) for share in shares]
    assert max(rates) == 1.0 == rate_at(WARM_UP) == rate_at(AT_PEAK - 1e-9)
    assert rates[0] < rates[50] < rates[99]
    falls = [b / a for a, b in itertools.pairwise(rates[600:]) if b != a]
    assert falls == pytest.approx([0.5**0.5] * 7)
    assert rate_at(0.999) == pytest.approx(1 / 16)


@pytest.mark.parametrize("num_steps", [4, 125, 624])
def test_learners_of_any_speed_make_equally_many_rounds(num_steps: int) -> None:
    ended = [shares_ended(10, step, num_steps) for step in range(1, num_steps + 1)]
    assert sum(ended) == 10
    assert max(ended) == max(1, math.ceil(10 / num_steps))
    assert ended[-1] > 0


def test_columns_fit_links_to_the_models_and_count_the_samples() -> None:
    small, large = PROBLEMS["bilstm"], PROBLEMS["perceptron"]
    fast = (columns.FAST, 3.9), (columns.OWN_FAST, 3.9)
    for name, steps in (*fast, (columns.SLOW, 19.4), (columns.OWN_SLOW, 19.4)):
        column = columns.COLUMNS[name]
        for problem in (small, large):
            bits_per_s = 1e3 * float(column.rate(problem).removesuffix("kbit"))
            took = 8 * problem.num_bytes / bits_per_s / (0.07 * column.slow_motion)
            assert took == pytest.approx(steps, rel=0.01)
    shares = [c.share_of_samples for c in columns.COLUMNS.values()]
    own = [1, 1, 3.2 / 4]
    assert shares == pytest.approx([1, 1, 3.2 / 4, 3.5 / 4, 1, 1, 0.6, *own])
    slow = columns.COLUMNS[columns.SHARDS_STRAGGLER]
    assert slow.times_slower == (4, 4, 20, 20)
    assert columns.COLUMNS[columns.OWN_STRAGGLER].times_slower == (4, 4, 4, 20)


def test_in_slow_motion_steps_and_race_are_slower_alike() -> None:
    for name, usual in ((columns.OWN_FAST, columns.FAST), (columns.SLOW, columns.SLOW)):
        run = Run(Cell("perceptron", name, "adpsgd"), 45.0, 0.1, 0, 1, "report")
        twin = replace(run, cell=replace(run.cell, column=usual))
        times = [run.heat([1]).slowness(0) / twin.heat([1]).slowness(0)]
        times.append(run.heat([1]).seconds / twin.heat([1]).seconds)
        assert times == [columns.COLUMNS[name].slow_motion] * 2


@pytest.mark.parametrize(
    ("column", "of", "num_steps"),
    [
        (columns.FAST, columns.FAST, 90),
        (columns.OWN_FAST, columns.OWN_FAST, 360),
        (columns.OWN_SLOW, columns.OWN_FAST, 360),
        (columns.OWN_STRAGGLER, columns.OWN_STRAGGLER, 288),
    ],
)
def test_a_floor_has_the_steps_of_learners_that_are_alone(
    column: str,
    of: str,
    num_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps per second, in the same motion and without a fault."""
    monkeypatch.setattr(entrants, "train_floor", lambda heat: heat)
    monkeypatch.setattr(
        runs.learners, "run", lambda program, size, limit_s: [program(None)]
    )
    monkeypatch.setattr(runs, "_result", lambda run, heats: heats[0].__dict__)
    track, cell = Track(None, tmp_path), Cell("perceptron", column, FLOOR)
    run = schedule.run_of(Race(), cell, Setting(0.1), 1, "report")
    assert run.cell.column == of
    motion = columns.without_fault(of)
    alone = replace(run, cell=Cell("perceptron", motion, AT_THE_END))
    track.keep_speeds(alone, [2.0] * 4)
    heat = track._floor(run)
    assert heat["steps"] == (num_steps,)
    assert heat["seconds"] == run.duration_s


def test_learners_that_hold_shards_race_among_themselves() -> None:
    methods = {
        column: {cell.method for cell in cells}
        for cells in Race(problems=("perceptron",)).lineups()
        for column in {cell.column for cell in cells}
    }
    assert methods[columns.SHARDS] == methods[columns.SHARDS_STRAGGLER]
    assert {SHARDED, "HSDP"} < methods[columns.SHARDS]
    assert not methods[columns.SHARDS] & methods[columns.FAST]


def test_weights_are_put_together_from_the_rows_that_each_learner_has() -> None:
    problem = PROBLEMS["perceptron"]
    weights = list(problem.make_model(0).parameters())
    parts = [torch.cat([w.chunk(2)[n].flatten() for w in weights]) for n in range(2)]
    assert torch.equal(problem.joined(parts), weights_of(problem.make_model(0)))


def test_the_learners_of_a_host_make_equally_many_steps() -> None:
    speeds = [4.0, 3.0, 1.0, 2.0]
    for method, expected in ((SHARDED, [3.0, 3.0, 1.0, 1.0]), ("HSDP", [1.0] * 4)):
        run = Run(Cell("perceptron", columns.SHARDS, method), 1, 0.1, 0, 1, "report")
        assert runs.in_step(speeds, run) == expected


def test_the_seed_says_who_is_killed_and_the_first_host_never_is() -> None:
    kill, fast = (columns.COLUMNS[name] for name in (columns.KILL, columns.FAST))
    victims = [kill.victim(seed) for seed in range(50)]
    assert set(victims) == {1, 2, 3}
    assert victims == [kill.victim(seed) for seed in range(50)]
    assert fast.victim(0) is None


# --- the search


def search(
    losses: Any, start: Setting, bounds: Any = None, rate_factor: float = 2.0
) -> dict[Setting, float]:
    found: dict[Setting, float] = {}
    while (one := tuning.next_setting(found, start, bounds, rate_factor)) is not None:
        found[one] = losses(one)
    return found


def test_the_best_rate_is_inside_of_what_was_tried() -> None:
    for ideal in (0.01, 0.1, 3.0):
        found = search(lambda s, at=ideal: abs(math.log(s.rate / at)), Setting(0.1))
        best = tuning.best(found)
        assert 0.7 < best.rate / ideal < 1.5
        assert {Setting(best.rate * 2), Setting(best.rate / 2)} <= set(found)
        assert len(found) <= 9


@pytest.mark.parametrize("factor", [2.0, 2.0**0.5, 1.4142136, 1.1])
def test_a_finer_grid_of_rates_is_searched_without_trying_one_twice(
    factor: float,
) -> None:
    found = search(lambda s: abs(math.log(s.rate / 0.37)), Setting(0.1), None, factor)
    places = [math.log(setting.rate / 0.1, factor) for setting in found]
    assert places == pytest.approx([round(place) for place in places], abs=1e-9)
    assert len({round(place) for place in places}) == len(places)
    best = tuning.best(found).rate
    assert factor**-0.51 < best / 0.37 < factor**0.51
    assert max(s.rate for s in found) == pytest.approx(best * factor)
    assert len(found) == round(math.log(best / 0.1, factor)) + 2


def test_a_setting_that_diverged_is_not_chosen() -> None:
    found = search(lambda s: math.inf if s.rate > 0.1 else 1 / s.rate, Setting(0.1))
    assert tuning.best(found) == Setting(0.1)


def test_periods_are_searched_within_their_bounds() -> None:
    found = search(
        lambda s: s.option + abs(math.log(s.rate / 0.1)), Setting(0.1, 64), (8, 512)
    )
    assert tuning.best(found).option == 8
    assert min(setting.option for setting in found) == 8


# --- what is run


ANYTHING: Any = object()


class PaperTrack(Track):
    """Runs nothing: losses are a formula, and speeds are given."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ANYTHING, folder)
        self.performed = list[Run]()

    def _perform(self, run: Run) -> dict[str, Any]:
        self.performed.append(run)
        if run.cell.method == "ddp, bf16":
            return {"failed": "no such type\n"}
        if run.role == "calibrate":
            alone = run.cell.method == AT_THE_END
            return {"speeds": [10.0 if alone else 5.0] * 4}
        off = abs(math.log(run.rate / 0.1)) + run.seed / 100
        return {
            "loss": 1 + off,
            "loss to choose by": 1 + off,
            "steps": [100] * 4,
            "seconds": run.seconds,
            "MB a step": 1.0,
            "exchanges a step": 0.1,
            "speeds": [2.0] * 4,
            "curve": [(1.0, 3.0), (2.0, None if run.seed == 2 else 2.0)],
        }


RACE = Race(("perceptron",), (columns.FAST, columns.KILL), ("adpsgd", "ddp", FLOOR), 4)


def test_a_second_call_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    track = PaperTrack(tmp_path)
    first = [*schedule.run_all(RACE, track)]
    num = len(track.performed)
    assert [*schedule.run_all(RACE, track)] == first
    assert len(track.performed) == num
    more = Race(RACE.problems, RACE.columns, RACE.methods, 4, num_seeds=4)
    standings = [*schedule.run_all(more, track)]
    # A fourth seed of three methods in two columns.
    assert len(track.performed) == num + 6
    assert all(len(standing.results) == 4 for standing in standings)


def test_what_a_race_has_left_so_far_is_reported_without_running(
    tmp_path: Path,
) -> None:
    one = Race(RACE.problems, (columns.FAST,), RACE.methods, 4, num_seeds=1)
    ran = [*schedule.run_all(one, PaperTrack(tmp_path))]
    found = [*schedule.run_all(RACE, Track(None, tmp_path))]
    assert [s.results for s in found[:3]] == [s.results for s in ran]
    # In the other column nothing has been run.
    assert all(not s.results and s.trouble.endswith(runs.NOT_RUN) for s in found[3:])
    assert [s.trouble for s in found[:3]] == [""] * 3
    where = f"perceptron, {columns.KILL}"
    assert race.without_lone_floors(found) == found
    lone = [s for s in found if not s.results or s.cell.method == FLOOR]
    assert race.without_lone_floors(lone) == [s for s in lone if not s.results]
    assert race.skipped_of(found) == {where: f"not run: adpsgd; ddp; {FLOOR}"}


def test_rates_are_chosen_by_seeds_that_are_not_reported(tmp_path: Path) -> None:
    track = PaperTrack(tmp_path)
    standings = [*schedule.run_all(RACE, track)]
    roles = {
        role: {r.seed for r in track.performed if r.role == role}
        for role in ("choose", "report")
    }
    assert roles == {"choose": {0}, "report": {1, 2, 3}}
    assert {s.setting.rate for s in standings if s.setting} == {0.1}
    # Where a host is killed nothing is chosen.
    killed = [r for r in track.performed if r.cell.column == columns.KILL]
    assert {run.role for run in killed} == {"report"}


def test_a_method_that_fails_is_told_and_others_go_on(tmp_path: Path) -> None:
    two = Race(("perceptron",), (columns.FAST,), ("ddp, bf16", "ddp"), 4)
    failed, ran = schedule.run_all(two, PaperTrack(tmp_path))
    assert "ddp, bf16" in failed.trouble
    assert not failed.results
    assert len(ran.results) == 3


def test_speeds_of_a_long_period_follow_from_those_of_a_short_one(
    tmp_path: Path,
) -> None:
    track = PaperTrack(tmp_path)
    cell = Cell("perceptron", columns.FAST, "local SGD")
    run = Run(cell, 45.0, 0.1, 512, 1, "report")
    # A step alone takes 0.1 s, and an average of which an eighth is 0.1 s: 0.8 s.
    assert track.speeds(run) == pytest.approx([1 / (0.1 + 0.8 / 512)] * 4)


def test_a_round_is_as_long_for_a_slow_learner_as_for_the_others() -> None:
    column, method = columns.STRAGGLER, "local SGD, timed rounds"
    run = Run(Cell("perceptron", column, method), 45.0, 0.1, 64, 1, "report")
    speeds = [10.0, 10.0, 10.0, 2.0]
    assert runs.in_step(speeds, run) == speeds
    in_lockstep = Run(Cell("perceptron", column, "local SGD"), 45, 0.1, 64, 1, "report")
    assert runs.in_step(speeds, in_lockstep) == [2.0] * 4


def a_course(**more: Any) -> Any:
    model = PROBLEMS["bilstm"].make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    course = {"model": model, "optimizer": optimizer, "pace": Pace(0.0)}
    return SimpleNamespace(**course, tick=lambda: None, exchanges=0.0, **more)


def a_batch() -> Batch:
    return next(PROBLEMS["bilstm"].batches_of(1, 0))


@pytest.mark.parametrize("ended", [(0, 1, 0), (0, 1, 1)])
def test_the_last_step_is_averaged_once(ended: tuple[int, ...]) -> None:
    taken, counts, stack = list[int](), iter(ended), ExitStack()
    average, counter = (lambda: taken.append(1)), (lambda: next(counts))
    make = loops.in_rounds(lambda _: average, lambda _: counter)
    step, close = make(a_course(), stack)
    for _ in ended:
        step(a_batch())
    close()
    assert len(taken) == 2


def test_names_of_files_differ_where_runs_do(tmp_path: Path) -> None:
    every = list(itertools.chain(*Race().lineups()))
    names = {
        Run(cell, 45, rate, 64, seed, "report").name
        for cell in every
        for rate in (0.05, 0.1)
        for seed in (1, 2)
    }
    assert len(names) == 4 * len(every)


def test_the_time_said_beforehand_shrinks_with_what_is_asked_for() -> None:
    assert Race().estimated_s() > 10 * 3600
    assert RACE.estimated_s() < 30 * 60
    finer = replace(RACE, rate_factor=2**0.5)
    assert RACE.estimated_s() < finer.estimated_s() < 2 * RACE.estimated_s()


# --- the report


def standing(method: str, *losses: float, column: str = columns.FAST) -> Standing:
    results = [
        {
            "loss": loss,
            "steps": [100],
            "seconds": 4.0,
            "MB a step": 1.0,
            "exchanges a step": 0.1,
            "curve": [(1.0, 3.0)],
        }
        for loss in losses
    ]
    return Standing(Cell("perceptron", column, method), Setting(0.1), results)


STANDINGS = [
    standing("adpsgd_random", 1.01, 1.03),
    standing("local SGD", 1.00, 1.02),
    standing(FLOOR, 1.0, 1.0),
]


def test_rows_are_sorted_by_loss_and_say_what_was_sent() -> None:
    rows = list(report.rows_of(STANDINGS))
    assert [row.case["method"] for row in rows] == [
        FLOOR,
        "local SGD",
        "adpsgd_random",
    ]
    assert rows[-1].value.median == pytest.approx(1.02)
    assert rows[-1].ratio == pytest.approx(1.02)
    assert rows[-1].details["exchanges a step"] == pytest.approx(0.1)
    assert rows[-1].details["MB sent a step"] == 1.0


def test_bounds_are_about_the_defaults_and_name_who_beats_them() -> None:
    floor, other = report.targets_of(report.means_of(STANDINGS))
    assert (floor.bound, floor.value, floor.met) == (1.005, pytest.approx(1.02), False)
    assert "local SGD" in other.claim
    assert other.value == pytest.approx(1.01 / 1.02)
    assert not other.met


def test_a_curve_ends_at_the_loss_that_is_reported_and_has_gaps() -> None:
    results = [{"loss": 1.0, "curve": [(1.0, 3.0), (2.0, None)]}] * 2
    one = Standing(Cell("bilstm", columns.SLOW, "ddp"), Setting(0.1), results)
    (curve,) = report.curves_of([one], 4.0)
    assert (curve.seconds, curve.losses) == ([1.0, 2.0, 4.0], [3.0, None, 1.0])
    assert curve.panel == "bilstm, 200 Mbit/s"
    slower = one._replace(cell=replace(one.cell, column=columns.OWN_SLOW))
    (curve,) = report.curves_of([slower], 4.0)
    assert curve.seconds == [1.0, 2.0, 16.0]


def test_curves_are_drawn_with_a_name_for_each(tmp_path: Path) -> None:
    curves = [
        {"panel": "p", "label": name, "seconds": [1, 2, 4], "losses": [3, None, end]}
        for name, end in (("adpsgd", 1.0), ("ddp", 2.0), ("gone", None))
    ]
    path = plots.write_curves(curves, "race p", tmp_path)
    assert path.name == "race-p.svg"
    first = path.read_bytes()
    assert plots.write_curves(curves, "race p", tmp_path).read_bytes() == first
    (axes,) = plots.draw_curves(curves).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(axes.lines) == 3
    assert {text.get_text() for text in axes.texts} == {"1.000  adpsgd", "2.000  ddp"}


def test_an_interval_lies_within_the_values_and_shrinks_with_their_number() -> None:
    few = mean_with_interval([1.0, 2.0, 3.0])
    many = mean_with_interval([1.0, 2.0, 3.0] * 20)
    assert few.median == many.median == 2.0
    assert 1.0 <= few.low < many.low < 2.0 < many.high < few.high <= 3.0
    assert mean_with_interval([5.0]) == (5.0, 5.0, 5.0)


def test_the_race_has_options_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["race", "--estimate", "--columns", "fast", "--methods", "ddp", "local SGD"]
    assert runner.main(words) == 0
    few = capsys.readouterr().out
    assert runner.main(["race", "--estimate"]) == 0
    minutes = [float(said.split()[1]) for said in (few, capsys.readouterr().out)]
    assert 0 < minutes[0] < minutes[1]
    with pytest.raises(SystemExit):
        runner.main(["race", "--columns", "none"])
    with pytest.raises(SystemExit):
        runner.main(["race", "--rate-factor", "1"])
    assert "--rate-factor must be above 1, got 1" in capsys.readouterr().err
    assert "race" not in runner.names()


def test_races_of_shards_or_own_cores_leave_the_other_results_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "write", lambda: results.ROOT / "page")
    folder = ["--report", "--folder", str(tmp_path / "runs")]
    for column in (columns.SHARDS, columns.FAST, columns.OWN_FAST):
        assert runner.main(["race", *folder, "--columns", column]) == 0
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"race_shards.json", "race.json", "race_own_cores.json"}


# --- processes


def stop_only_with_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a learner fail whose clock stops before it has the mean of all."""
    finish, stop, means = Job.finish, Course.stop, list[object]()

    def noted(job: Job) -> Any:
        means.append(finish(job))
        return means[-1]

    def checked(course: Course) -> None:
        assert means, "the clock stops before the mean"
        assert means[0] is not None
        stop(course)

    monkeypatch.setattr(Job, "finish", noted)
    monkeypatch.setattr(Course, "stop", checked)


@NEEDS_HOSTS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "speed", "role"), [("adpsgd", 4.0, "report"), ("ddp", 2.0, "choose")]
)
def test_a_run_goes_on_without_a_host_that_is_killed(
    method: str,
    speed: float,
    role: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "ATTEMPTS", 1)
    if method == "adpsgd":
        stop_only_with_a_mean(monkeypatch)  # learners are forked from this process
    cell = Cell("bilstm", columns.KILL, method)
    run = Run(cell, 3.0, 0.4, 0, 1, role)
    with hosts.emulated(columns.NUM_HOSTS) as emulated:
        track = Track(emulated, tmp_path)
        track.keep_speeds(run, [speed] * columns.NUM_HOSTS)
        result = track.result(run)
    steps, planned = result["steps"], round(3 * speed)
    assert len(steps) == columns.NUM_HOSTS - 1
    # A busy machine may lose one to the host's death.
    assert planned - 1 <= min(steps) <= max(steps) == planned, result
    assert 0 < result["loss"] < 4.5
    if method == "ddp":
        # All gradients of 1.5 MB travel twice but for a quarter, or a third.
        assert 1.8 < result["MB a step"] < 2.6
        assert 0.5 < result["exchanges a step"] < 1
    else:
        assert 0 < result["exchanges a step"] < 1
    assert bool(result["curve"]) == (role == "report")
    assert json.loads((tmp_path / f"{run.name}.json").read_text()) == result


@NEEDS_HOSTS
@pytest.mark.slow
@pytest.mark.parametrize(("method", "role"), [(SHARDED, "report"), ("HSDP", "choose")])
def test_pairs_that_hold_shards_race_on_two_hosts(
    method: str, role: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ATTEMPTS", 1)
    cell = Cell("bilstm", columns.SHARDS_STRAGGLER, method)
    run = Run(cell, 4.0, 0.4, 0, 1, role)
    speeds = [2.5, 2.5, 0.5, 0.5]
    with hosts.emulated(columns.NUM_HOSTS) as emulated:
        track = Track(emulated, tmp_path)
        track.keep_speeds(run, speeds)
        result = track.result(run)
    ours = method == SHARDED
    assert result["steps"] == ([10, 10, 2, 2] if ours else [2] * 4), result
    assert 0 < result["loss"] < 4.5
    assert result["MB a step"] > 0.1
