"""The sweep over batch sizes: its search, its limits, its samples, and a whole one."""

import itertools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recipes.batch_size
from lightning_adpsgd import VirtualCluster
from recipes.batch_size.__main__ import main
from recipes.batch_size.claim import SettingsChanged, claim
from recipes.batch_size.doubts import doubts
from recipes.batch_size.effective_rate import effective_share
from recipes.batch_size.limits import Limit, limit, limits, ratio
from recipes.batch_size.outcomes import (
    Outcome,
    load,
    read_table,
    save,
    write_table,
)
from recipes.batch_size.report import _facts, limit_table, loss_table, write_report
from recipes.batch_size.search import (
    Best,
    Score,
    Scores,
    at_rule,
    best_of,
    by_cell,
    missing,
    neighbours,
)
from recipes.batch_size.settings import QUICK, Cell, Run, Setting, Settings
from recipes.batch_size.sweep import Sweep, next_runs, run_sweep
from recipes.batch_size.training import make_cluster, options_of, schedule_of, train
from recipes.batch_size.workloads import Workload, batches_of, classifier
from tests.pages.blocks import programs

BASELINE = Cell("ssgd", 64)
TINY = Settings(
    algorithms=("ssgd", "adpsgd_random"),
    baseline_batch=64,
    batches=(128,),
    seeds=2,
    min_rate=0.5,
    max_rate=1.0,
    num_learners=4,
    epochs=2,
    warmup_epochs=1.0,
    points=2,
)


def tiny_workload() -> Workload:
    return classifier(num_train=300, num_held_out=64).cut(128)


def outcome(run: Run, loss: float) -> Outcome:
    why = "" if math.isfinite(loss) else "made up"
    step, clip = run.setting
    return Outcome(*run.cell, step, run.seed, run.setting.rate, loss, loss, clip, why)


def best(*losses: float) -> Best:
    return Best(Setting(0), dict(enumerate(losses)), at_edge=False)


def scores(losses: Mapping[int, Mapping[int, float]]) -> Scores:
    """By rate and seed, the same on both halves of the held-out samples."""
    return {
        Setting(step): {seed: Score(loss, loss) for seed, loss in of_seeds.items()}
        for step, of_seeds in losses.items()
    }


# --- the search


def search(settings: Settings, loss_of: Mapping[int, float]) -> list[Run]:
    """The runs of the baseline, if losses depend on the rate alone."""
    outcomes: list[Outcome] = []
    while todo := missing(BASELINE, by_cell(outcomes), settings):
        outcomes += [outcome(run, loss_of[run.setting.step]) for run in todo]
    return [o.run for o in outcomes]


def test_the_best_rate_gets_all_seeds_and_its_neighbours_one() -> None:
    settings = Settings(baseline_batch=64, min_rate=0.5, max_rate=8.0)
    loss_of = {step: 1 + abs(step - 5) for step in settings.grid}  # best: 2^(5/2)
    runs = search(settings, loss_of)
    seeds = {
        step: {r.seed for r in runs if r.setting.step == step} for step in settings.grid
    }
    assert seeds[5] == {0, 1, 2}
    assert seeds[4] == seeds[6] == {0}
    assert len(runs) == len(set(runs))


def test_a_neighbour_that_is_close_behind_gets_all_seeds() -> None:
    settings = Settings(baseline_batch=64, min_rate=1.0, max_rate=4.0)
    runs = search(settings, {0: 9.0, 1: 1.02, 2: 1.0, 3: 1.04, 4: 9.0})
    steps = [run.setting.step for run in runs]
    assert (steps.count(1), steps.count(3)) == (3, 1)


def test_the_search_leaves_rates_that_diverge_downwards() -> None:
    settings = Settings(baseline_batch=64, min_rate=0.5, max_rate=8.0, seeds=1)
    loss_of = {step: math.inf if step > -1 else 1.0 for step in settings.grid}
    assert -1 in {run.setting.step for run in search(settings, loss_of)}


def test_a_baseline_does_not_stay_in_a_second_valley() -> None:
    """Losses that a model of characters had: the middle of the grid is a valley too."""
    losses = (2.98, 3.01, 3.11, 3.16, 3.43, 3.5, 3.6, 3.57, 3.25, 3.36, math.inf)
    settings = Settings(baseline_batch=64, min_rate=0.25, max_rate=8.0)
    runs = search(settings, dict(zip(settings.grid, losses, strict=True)))
    assert {run.seed for run in runs if run.setting.rate == 0.25} == {0, 1, 2}
    assert {run.seed for run in runs if run.setting.rate == 4.0} == {0}


def test_clipped_baselines_are_tried_at_rates_of_the_whole_grid_too() -> None:
    settings = Settings(algorithms=("ssgd", "ssgd+clip"), baseline_batch=64)
    first = missing(Cell("ssgd+clip", 64), {}, settings)
    assert [run.setting for run in first] == [Setting(n, -1) for n in range(-4, 13, 2)]


def test_other_cells_begin_at_one_rate() -> None:
    cells = {BASELINE: scores({0: {0: 1.0}})}
    (first,) = missing(Cell("ssgd", 256), cells, Settings(baseline_batch=64))
    assert first.setting == Setting(0)


def test_a_sweep_of_before_is_read_without_the_rates_it_did_not_try() -> None:
    settings = Settings(algorithms=("ssgd",), baseline_batch=64, batches=(64,), seeds=1)
    runs = [Run(BASELINE, Setting(step), 0) for step in (3, 4, 5)]
    outcomes = [outcome(run, 1 + abs(run.setting.step - 4)) for run in runs]
    sweep = Sweep(settings, outcomes)
    assert sweep.bests[BASELINE].setting == Setting(4)
    assert {run.setting.step for run in next_runs(outcomes, settings)} == {
        *range(-4, 13, 2)
    } - {4}


def test_a_cell_begins_within_the_grid() -> None:
    settings = Settings(baseline_batch=64, batches=(128,), min_rate=2, max_rate=4)
    cells = {BASELINE: scores({-4: {0: 1.0}})}
    (first,) = missing(Cell("adpsgd", 128), cells, settings)
    assert first.setting.rate == 2.0


def test_the_best_rate_is_that_of_the_mean_over_the_seeds() -> None:
    """Seed 0 alone would take step 1; a rate at which a seed diverged is out."""
    losses = {
        0: {0: 1.2, 1: 1.0},
        1: {0: 1.0, 1: 1.4},
        2: {0: 0.5, 1: math.inf},
        3: {0: 0.1},
    }
    settings = Settings(seeds=2, min_rate=1.0, max_rate=4.0)
    chosen = best_of(scores(losses), settings)
    assert (chosen.setting.step, chosen.mean, chosen.at_edge) == (0, 1.1, True)
    assert not best_of(
        scores(losses), Settings(seeds=2, min_rate=0.5, max_rate=4.0)
    ).at_edge


def test_the_rule_is_a_rate_in_proportion_to_the_batch() -> None:
    settings = Settings(
        baseline_batch=64, batches=(256,), seeds=1, min_rate=0.5, max_rate=8.0
    )
    wide = Cell("adpsgd", 256)
    four_times = scores({1: {0: 1.0}, 5: {0: 2.0}})  # 2^(1/2) and 2^(5/2)
    found = at_rule({BASELINE: scores({1: {0: 1.0}}), wide: four_times}, settings)
    assert found[wide].setting.rate == pytest.approx(4 * found[BASELINE].setting.rate)
    assert found[wide].mean == 2.0


def test_a_setting_is_chosen_by_samples_that_are_not_reported() -> None:
    found = {Setting(0): {0: Score(1.0, 1.5)}, Setting(1): {0: Score(1.1, 1.2)}}
    chosen = best_of(found, Settings(seeds=1))
    assert (chosen.setting, chosen.mean) == (Setting(0), 1.5)


def test_seeds_of_a_larger_sweep_are_left_out() -> None:
    found = scores({0: {0: 1.0, 1: 3.0, 2: 9.0}})
    assert best_of(found, Settings(seeds=2)).losses == {0: 1.0, 1: 3.0}


def test_a_clipped_cell_finds_rate_and_norm_along_a_valley() -> None:
    """Rate and norm count by their product, and a little by themselves."""
    settings = Settings(
        algorithms=("ssgd", "ssgd+clip"),
        baseline_batch=64,
        seeds=1,
        min_rate=0.25,
        max_rate=64.0,
    )
    cell, outcomes = Cell("ssgd+clip", 64), list[Outcome]()
    while todo := missing(cell, by_cell(outcomes), settings):
        for run in todo:
            step, clip = run.setting
            assert clip is not None
            valley = 1 + abs(step / 2 + clip - 1) + 0.1 * abs(clip + 3)
            outcomes.append(outcome(run, valley))
    assert best_of(by_cell(outcomes)[cell], settings).setting == Setting(8, -3)


def test_unclipped_cells_have_no_norms_around_them() -> None:
    around = neighbours(Setting(2), Settings())
    assert around == [Setting(3), Setting(1)]


def test_clipped_algorithms_need_clipped_ssgd_to_compare_with() -> None:
    with pytest.raises(ValueError, match=r"'ssgd\+clip' if one"):
        Settings(algorithms=("ssgd", "adpsgd+clip"))
    settings = Settings(algorithms=("ssgd", "ssgd+clip", "adpsgd+clip"))
    first = [cell.algorithm for cell in settings.cells()][:2]
    assert first == ["ssgd", "ssgd+clip"]


# --- limits


def test_a_limit_lies_between_batches_in_their_logarithm() -> None:
    assert limit({64: 1.0, 256: 1.2}, 1.1).batch == pytest.approx(128)
    assert limit({64: 1.0, 256: 1.1}, 1.1) == Limit(256.0, True)
    assert limit({64: 1.2, 256: 1.0}, 1.1) == Limit(0.0, False)


def test_a_batch_that_diverges_leaves_the_limit_open() -> None:
    assert limit({64: 1.0, 256: math.inf}, 1.1) == Limit(64.0, True)
    assert limit({64: 1.2, 256: math.inf}, 1.1) == Limit(0.0, False)


def test_losses_beyond_the_first_that_is_too_large_do_not_count() -> None:
    assert limit({64: 1.0, 128: 2.0, 256: 1.0}, 1.5).batch == pytest.approx(64 * 2**0.5)


def made_up_cells(wide: Best) -> dict[Cell, Best]:
    """SSGD leaves 10 % at 128; the other where `wide`, its loss at 512, says."""
    return {
        BASELINE: best(1.0, 1.0),
        Cell("ssgd", 256): best(1.2, 1.2),
        Cell("adpsgd", 128): best(1.0, 1.0),
        Cell("adpsgd", 512): wide,
    }


def test_limits_are_of_the_mean_over_the_seeds() -> None:
    cells = made_up_cells(best(1.1, 1.3))
    found = limits(cells, BASELINE.batch, 0.10, [0, 1])
    assert found["ssgd"].batch == pytest.approx(128)
    assert found["adpsgd"].batch == pytest.approx(256)


def test_a_clipped_limit_is_held_against_clipped_ssgd() -> None:
    clipped = {
        Cell("ssgd+clip", 64): best(0.5, 0.5),
        Cell("ssgd+clip", 256): best(0.6, 0.6),
        Cell("adpsgd+clip", 64): best(0.5, 0.5),
        Cell("adpsgd+clip", 256): best(0.55, 0.55),
    }
    cells = made_up_cells(best(1.1, 1.1)) | clipped
    found = limits(cells, 64, 0.10, [0, 1])
    assert found["ssgd+clip"].batch == pytest.approx(128)
    assert found["adpsgd+clip"].batch == pytest.approx(256)
    assert ratio(cells, 64, 0.10, "adpsgd+clip").value == pytest.approx(2)


def test_a_batch_at_which_all_rates_diverge_is_beyond_the_limit() -> None:
    """Such a cell has one seed alone: no more are trained."""
    interval = ratio(made_up_cells(best(math.inf)), BASELINE.batch, 0.10, "adpsgd")
    assert interval == pytest.approx((1.0, 1.0, 1.0))


def ratio_in_table(cells: dict[Cell, Best]) -> tuple[str, str]:
    """Limit and ratio of "adpsgd" within 10 %, as a report has them."""
    settings = Settings(
        algorithms=("ssgd", "adpsgd"),
        baseline_batch=BASELINE.batch,
        batches=(128, 256, 512),
        seeds=2,
        margins=(0.10,),
    )
    (row,) = (
        line.split(" | ")
        for line in limit_table(Sweep(settings, []), cells).splitlines()
        if line.startswith("| adpsgd ")
    )
    return row[1], row[2].removesuffix(" |").strip()


def test_a_ratio_of_limits_at_which_both_diverge_is_not_told() -> None:
    cells = made_up_cells(best(math.inf)) | {Cell("ssgd", 256): best(math.inf)}
    assert ratio_in_table(cells) == (">= 128", "")


def test_a_ratio_is_a_bound_where_one_diverges() -> None:
    assert ratio_in_table(made_up_cells(best(math.inf)))[0] == ">= 128"
    assert ratio_in_table(made_up_cells(best(math.inf)))[1].startswith(">= 1.00 ")
    cells = made_up_cells(best(1.3, 1.3)) | {Cell("ssgd", 256): best(math.inf)}
    assert ratio_in_table(cells)[1].startswith("<= 3")


def test_seeds_that_agree_leave_no_interval() -> None:
    interval = ratio(made_up_cells(best(1.2, 1.2)), BASELINE.batch, 0.10, "adpsgd")
    assert interval == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_spans_the_seeds() -> None:
    """Alone, seed 0 gives 512 (4 times SSGD's limit) and seed 1 128 * 4^(1/4)."""
    interval = ratio(made_up_cells(best(1.1, 1.4)), BASELINE.batch, 0.10, "adpsgd")
    assert interval.low == pytest.approx(4**0.25)
    assert interval.high == pytest.approx(4.0)
    assert interval.value == pytest.approx(4**0.4)


# --- baselines


def doubted(**losses: float) -> list[str]:
    """The warnings for baselines and SSGD of larger batches; c: clipped."""
    cells = {
        Cell("ssgd+clip" if name[0] == "c" else "ssgd", int(name[1:])): best(loss)
        for name, loss in losses.items()
    }
    algorithms = ("ssgd", "ssgd+clip", "adpsgd", "adpsgd+clip")
    settings = Settings(
        algorithms=algorithms, baseline_batch=64, batches=(128, 256), seeds=1
    )
    others = {Cell(name, 128): best(0.1) for name in ("adpsgd", "adpsgd+clip")}
    return doubts(cells | others, settings)


def test_a_baseline_above_a_larger_batch_is_doubted() -> None:
    (warning,) = doubted(u64=3.277, c64=3.2, u128=3.3, u256=2.883, c128=3.2, c256=3.3)
    assert warning.startswith(
        "Warning: the baseline ssgd at batch 64 has a loss of 3.277 at rate 1, above "
        "that of ssgd at batch 256 (2.883). It was likely trained at a bad rate"
    )
    assert "--min-rate" in warning
    (warning,) = doubted(u64=1.0, c64=1.0, u128=1.0, c128=0.9)
    assert "baseline ssgd+clip at batch 64" in warning


def test_a_baseline_far_above_its_clipped_twin_is_doubted() -> None:
    (warning,) = doubted(u64=1.1, c64=1.0, u128=1.2, c128=1.0)
    assert "above that of ssgd+clip at batch 64 (1.000)." in warning
    assert doubted(u64=1.0, c64=1.1, u128=1.1, c128=1.2) == []


def test_differences_as_between_seeds_raise_no_doubt() -> None:
    assert doubted(u64=1.04, c64=1.0, u128=1.035, c128=0.995) == []


def test_a_report_begins_with_its_doubts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tiny_workload()
    settings = replace(TINY, algorithms=("ssgd",), seeds=1)
    sweep = run_sweep(workload, settings, tmp_path)
    worse = [
        replace(o, loss=9.0) if o.run.cell == BASELINE else o for o in sweep.outcomes
    ]
    report = write_report(tmp_path, Sweep(settings, worse), workload)
    told = "Warning: the baseline ssgd at batch 64 has a loss of 9.000"
    assert told in report.read_text(encoding="utf-8").split("![loss")[0]
    assert told in capsys.readouterr().out


# --- the same samples


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_a_step_takes_the_same_samples_however_many_learners_share_it(
    num_shares: int,
) -> None:
    samples = (torch.arange(24), torch.arange(24))
    whole = batches_of(samples, 8, 1, seed=3)(0)
    of = batches_of(samples, 8, num_shares, seed=3)
    for shares in itertools.islice(zip(*map(of, range(num_shares)), strict=True), 6):
        together = torch.cat([inputs for inputs, _ in shares])
        assert torch.equal(together, next(whole)[0])


def test_an_epoch_takes_every_sample_once() -> None:
    samples = (torch.arange(24), torch.arange(24))
    for batch in (4, 8, 24):
        steps = itertools.islice(batches_of(samples, batch, 1, seed=0)(0), 24 // batch)
        assert sorted(torch.cat([x for x, _ in steps]).tolist()) == list(range(24))


def test_a_batch_that_an_epoch_cannot_fill_continues_into_the_next() -> None:
    samples = (torch.arange(24), torch.arange(24))
    whole, divided = (batches_of(samples, b, 1, seed=0)(0) for b in (8, 9))
    taken = (
        torch.cat([inputs for inputs, _ in itertools.islice(steps, num)])
        for steps, num in ((whole, 9), (divided, 8))
    )
    assert torch.equal(*taken)


def test_all_algorithms_begin_at_the_same_weights() -> None:
    settings = Settings(num_learners=8, super_learner_size=4)
    workload = tiny_workload()
    rows = [
        row
        for algorithm in settings.algorithms
        for row in make_cluster(
            Run(Cell(algorithm, 128), Setting(0), 5), workload, settings
        ).weights()[0]
    ]
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert len(rows) == 1 + 8 * 5 + 2


def test_averaging_over_all_is_ssgd_but_for_whose_gradient_is_clipped() -> None:
    # A constant rate: learners of a step read the schedule one after another.
    settings = replace(QUICK, rise=1, decay=1.0)
    workload = classifier(num_train=256, num_held_out=64)
    losses = {
        algorithm: train(Run(Cell(algorithm, 32), setting, 0), workload, settings).loss
        for name in ("ssgd", "sdpsgd_complete")
        for algorithm, setting in (
            (name, Setting(-2)),
            (f"{name}+clip", Setting(-2, -3)),
        )
    }
    assert losses["sdpsgd_complete"] == pytest.approx(losses["ssgd"], rel=1e-4)
    clipped = losses["ssgd+clip"], losses["sdpsgd_complete+clip"]
    assert clipped[0] != pytest.approx(clipped[1], rel=1e-3)
    assert clipped[0] != pytest.approx(losses["ssgd"], rel=1e-3)


def test_super_learners_are_of_hadpsgd_alone() -> None:
    sizes = {a: options_of(a, Settings()) for a in Settings().algorithms}
    assert sizes["hadpsgd"]["num_super_learners"] == 4
    assert sizes["ssgd"] == {"num_super_learners": 1}
    assert {sizes[a]["num_super_learners"] for a in sizes} == {1, 4, 16}


def test_the_baseline_s_batch_is_one_column_wherever_it_is_named() -> None:
    settings = Settings(baseline_batch=128, batches=(512, 128, 256))
    assert settings.all_batches == [128, 256, 512]
    header = loss_table(Sweep(settings, []), {}).splitlines()[0]
    assert header.count("batch 128") == 1


def test_the_rate_rises_from_a_part_of_the_peak_to_it() -> None:
    run, settings = (
        Run(BASELINE, Setting(4), 0),
        Settings(warmup_epochs=2.0, rise=8, decay=0.5),
    )
    schedule = schedule_of(run, 100, settings)
    assert [schedule.rate(n) for n in (0, 200, 201, 301)] == [0.5, 4.0, 2.0, 1.0]


# --- runs


def test_a_run_that_diverges_is_marked_and_does_not_raise() -> None:
    workload = tiny_workload()
    for step in (10, 40):  # hopeless after a while; not finite at once
        done = train(Run(Cell("adpsgd_random", 128), Setting(step), 0), workload, TINY)
        assert done.diverged
        assert done.loss == math.inf


def test_a_run_is_the_same_twice() -> None:
    run, workload = Run(Cell("adpsgd_random", 128), Setting(-2), 1), tiny_workload()
    first, second = (train(run, workload, TINY) for _ in range(2))
    assert first.losses == second.losses
    assert first.staleness == second.staleness > 0


def test_a_clipped_run_is_another_one() -> None:
    """At a rate at which steps are far too large, smaller ones learn."""
    cell, workload = Cell("adpsgd_random", 128), tiny_workload()
    assert train(Run(cell, Setting(10), 0), workload, TINY).diverged
    clipped = train(Run(cell, Setting(10, -4), 0), workload, TINY)
    assert not clipped.diverged
    assert clipped.choice != clipped.loss


def test_outcomes_survive_their_files(tmp_path: Path) -> None:
    run = Run(Cell("adpsgd+clip", 128), Setting(3, -1), 1)
    rate = run.setting.rate
    done = Outcome(
        "adpsgd+clip", 128, 3, 1, rate, 1.25, 1.5, -1, "", 1.5, 0.25, 8.0, 0.5
    )
    done = Outcome(**{**vars(done), "samples": (0, 128), "losses": (3.5, 1.25)})
    save(tmp_path, done)
    assert load(tmp_path) == [done]
    write_table(tmp_path / "results.csv", [done])
    (read,) = read_table(tmp_path / "results.csv")
    assert read.run == run
    assert (read.samples, read.losses, read.loss) == (done.samples, done.losses, 1.25)


# --- a whole sweep


def test_a_sweep_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_sweep(tiny_workload(), TINY, tmp_path / "whole")
    count = itertools.count()

    def interrupted(*arguments: object) -> Outcome:
        if next(count) == 5:
            raise KeyboardInterrupt
        return train(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("recipes.batch_size.sweep.train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tiny_workload(), TINY, tmp_path / "parts")
    assert len(load(tmp_path / "parts" / "runs")) == 5
    again = run_sweep(tiny_workload(), TINY, tmp_path / "parts")
    assert [o.run for o in again.outcomes] == [o.run for o in whole.outcomes]
    assert [o.losses for o in again.outcomes] == [o.losses for o in whole.outcomes]
    assert next(count) == len(whole.outcomes) + 1  # none was trained twice
    assert next_runs(again.outcomes, TINY) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of `TINY`, for tests that copy it."""
    folder = tmp_path_factory.mktemp("sweep") / "finished"
    run_sweep(tiny_workload(), TINY, folder)
    return folder


def wider() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 32))


def without_relu() -> torch.nn.Module:
    """Parameters of the same names, forms and first values as the classifier's."""
    model = tiny_workload().make()
    assert isinstance(model, torch.nn.Sequential)
    model[1] = torch.nn.Tanh()
    return model


def changed_in(which: str) -> Workload:
    workload = tiny_workload()
    inputs, labels = getattr(workload, which)
    inputs = inputs.clone()
    inputs[7, 3] += 1e-3
    return replace(workload, **{which: (inputs, labels)})


OTHERS: list[tuple[Workload, str]] = [
    (
        replace(tiny_workload(), make=wider),
        r"parameters 0.weight: \[128, 64\] there, \[16, 64\] here",
    ),
    (replace(tiny_workload(), num_classes=33), "num_classes: 32 there, 33 here"),
    (changed_in("train"), r"\(data: [0-9a-f]{16} there, [0-9a-f]{16} here\)"),
    (changed_in("held_out"), r"\(data: [0-9a-f]{16} there, [0-9a-f]{16} here\)"),
    (replace(tiny_workload(), make=without_relu), r"another model, .* \(seed 0 begins"),
]


def test_a_folder_takes_no_runs_of_other_settings(finished: Path) -> None:
    changed = replace(TINY, epochs=3)
    with pytest.raises(SettingsChanged, match="epochs: 2 there, 3 here"):
        run_sweep(tiny_workload(), changed, finished)


@pytest.mark.parametrize(("other", "message"), OTHERS)
def test_a_folder_takes_no_runs_of_another_model_or_other_data(
    finished: Path, other: Workload, message: str
) -> None:
    before = (finished / "settings.json").read_bytes()
    with pytest.raises(SettingsChanged, match=message):
        run_sweep(other, TINY, finished)
    assert (finished / "settings.json").read_bytes() == before


def of_before(finished: Path, folder: Path) -> Path:
    """The folder as versions left it whose claims knew neither model nor data."""
    shutil.copytree(finished, folder)
    path = folder / "settings.json"
    told = json.loads(path.read_text())
    del told["num_classes"], told["parameters"], told["data"]
    path.write_text(json.dumps(told))
    return folder


def test_a_claim_of_before_is_taken_up_where_runs_begin_at_the_same_loss(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = of_before(finished, tmp_path / "before")
    outcomes = load(folder / "runs")
    claim(folder, tiny_workload(), TINY, outcomes)
    assert "had no num_classes, parameters, data" in capsys.readouterr().err
    new = [path / "settings.json" for path in (folder, finished)]
    assert new[0].read_bytes() == new[1].read_bytes()
    claim(folder, tiny_workload(), TINY, outcomes)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("make", [wider, without_relu])
def test_a_claim_of_before_is_refused_where_runs_begin_at_another_loss(
    finished: Path, tmp_path: Path, make: Any
) -> None:
    folder = of_before(finished, tmp_path / "before")
    before = (folder / "settings.json").read_bytes()
    with pytest.raises(SettingsChanged, match="another model, loss or held-out"):
        run_sweep(replace(tiny_workload(), make=make), TINY, folder)
    assert (folder / "settings.json").read_bytes() == before


def test_runs_without_a_claim_are_compared_by_their_start(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    with pytest.raises(SettingsChanged, match="another model, loss or held-out"):
        run_sweep(replace(tiny_workload(), make=wider), TINY, tmp_path)


def test_batches_that_learners_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of the number of learners 16"):
        Settings(batches=(100, 200))


@pytest.mark.parametrize(("num", "size"), [(10, 4), (6, 4), (4, 4), (1, 1)])
def test_learners_that_super_learners_cannot_share_are_refused(
    num: int, size: int
) -> None:
    sizes = {"num_learners": num, "super_learner_size": size}
    batches = {"baseline_batch": num, "batches": (2 * num,)}
    several: dict[str, Any] = {**sizes, **batches}
    with pytest.raises(ValueError, match=rf"`num_learners` must be .*, got {num}$"):
        Settings(algorithms=("ssgd", "hadpsgd"), **several)
    with pytest.raises(ValueError, match=rf"`num_learners` must be .*, got {num}$"):
        Settings(algorithms=("ssgd", "ssgd+clip", "hadpsgd+clip"), **several)
    others = ("ssgd", "adpsgd") if num > 1 else ("ssgd",)
    assert Settings(algorithms=others, **several).num_learners == num


def test_one_learner_is_refused_for_all_but_ssgd() -> None:
    with pytest.raises(ValueError, match=r"`num_learners` must be at least 2 .* got 1"):
        Settings(algorithms=("ssgd", "adpsgd"), num_learners=1)


def test_the_command_line_says_how_many_learners_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--num-learners", "10", "--baseline-batch", "10", "--batches", "20"])
    assert "multiple of `super_learner_size` 4" in capsys.readouterr().err


def test_a_quick_sweep_leaves_table_figures_and_report(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert main(["--quick", "--seeds", "1", "--out", str(out)]) == 0
    report = (out / "RESULTS.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in report for name in QUICK.algorithms)
    assert "commit" in report
    assert (out / "loss.png").stat().st_size > 10_000
    assert "<svg" in (out / "loss.svg").read_text(encoding="utf-8")
    trained = {(o.algorithm, o.batch) for o in read_table(out / "results.csv")}
    assert len(trained) == 1 + 2 * 3


def test_a_report_tells_the_samples_that_were_trained_on() -> None:
    workload = classifier(num_train=300, num_held_out=64)
    sweep = Sweep(TINY, [])
    assert "classifier: 256 samples of 300, 32 classes" in _facts(sweep, workload)
    assert "classifier: 256 samples, 32 classes" in _facts(sweep, workload.cut(128))


def test_a_folder_without_speech_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "nothing"
    assert main(["--data", str(data), "--out", str(tmp_path / "out")]) == 1
    assert f"{data}/exp/features is not finished" in capsys.readouterr().err


def test_of_equal_weights_the_whole_learning_rate_is_effective() -> None:
    workload = classifier(num_train=64, num_held_out=32)
    run = Run(Cell("sdpsgd", 16), Setting(0), seed=0)
    cluster = make_cluster(run, workload, QUICK)
    cluster.learners.consensus()
    assert effective_share(cluster, workload) == pytest.approx(1.0, abs=1e-6)


# --- a model of one's own


def test_the_program_of_the_page_sweeps_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(recipes.batch_size.__file__).with_name("README.md")
    (program,) = programs(page, "Your own model and data")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        exec(program, {"__name__": "program"})
    finally:
        torch.set_num_threads(threads)
    report = (tmp_path / "runs" / "rows" / "RESULTS.md").read_text(encoding="utf-8")
    assert "- workload: rows: 512 samples, 8 classes" in report
    trained = read_table(tmp_path / "runs" / "rows" / "results.csv")
    assert {o.run.cell for o in trained} == {
        Cell("ssgd", 16),
        *(Cell(name, n) for name in ("ssgd", "adpsgd_random") for n in (64, 128)),
    }
    learnt = [o.loss for o in trained if o.run.cell == Cell("ssgd", 16)]
    assert min(learnt) < 0.9 * math.log(8)


def test_a_workload_needs_a_label_for_each_input_and_two_halves() -> None:
    workload = tiny_workload()
    inputs, labels = workload.train
    with pytest.raises(ValueError, match=r"`train` must have .* 256 inputs and 255"):
        replace(workload, train=(inputs, labels[1:]))
    with pytest.raises(ValueError, match=r"`held_out` must have at least 2 .* got 1"):
        replace(workload, held_out=(inputs[:1], labels[:1]))
    with pytest.raises(ValueError, match="`num_classes` must be at least 2, got 1"):
        replace(workload, num_classes=1)


@pytest.mark.parametrize(("power", "expected"), [(2, 1.0), (3, 5.0)])
def test_the_effective_rate_compares_gradients_with_that_of_the_mean(
    power: int, expected: float
) -> None:
    # Weights 3 and -1. Of w^2 / 2: the mean of 3 and -1, which is the gradient at 1. Of
    # w^3 / 3: (9 + 1) / 2 against 1.
    module = torch.nn.Linear(1, 1, bias=False)

    def loss(module: Any, batch: Any) -> torch.Tensor:
        return module.weight.pow(power).sum() / power

    samples = (torch.zeros(2, 1), torch.zeros(2))
    workload = Workload("bowl", samples, samples, lambda: module, loss, 2)
    cluster = VirtualCluster(
        module, 2, loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    for row, value in zip(cluster.weights()[0], (3.0, -1.0), strict=True):
        row[0] = value
    cluster.learners.consensus()
    assert effective_share(cluster, workload) == pytest.approx(expected)
