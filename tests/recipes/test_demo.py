"""The demo's table and report, from made-up figures."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_adpsgd.asr.scoring import Errors
from lightning_adpsgd.callbacks.timeline import Entry, write_timeline
from recipes.demo import demo
from recipes.demo.__main__ import SHORT_TRAINING, main, parser, settings_of
from recipes.demo.facts import facts_of
from recipes.demo.lanes import Step, read_lanes
from recipes.demo.race import (
    Entrant,
    comparison,
    draw_race,
    race_figure,
    race_of,
    race_table,
)
from recipes.demo.report import write_report
from recipes.demo.results import (
    Result,
    as_text,
    read_baseline,
    read_result,
    speeds_in_words,
    table,
    trainings_compared,
)
from recipes.hybrid.pipeline.groups import RaceSettings, TrainSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage
from recipes.hybrid.training.held_out import HeldOut, Point, Spoken
from recipes.hybrid.training.metrics import (
    by_step,
    read_rows,
    series,
    summarize_run,
    write_rows,
)


def made_up_rows(gossips: bool) -> list[dict[str, float]]:
    """Ten epochs of a hundred steps: the loss falls as 4 / (1 + epoch)."""
    rows: list[dict[str, float]] = []
    for epoch in range(1, 11):
        step, samples = 100.0 * epoch, 6400.0 * epoch
        rows.append(
            {
                "step": step,
                "curve/loss": 4 / (1 + epoch),
                "curve/global_samples": samples,
                "curve/train_seconds": 5.0 * epoch,
                "curve/wall_seconds": 6.0 * epoch,
            }
        )
        rows.append({"step": step, "val_loss": 4.5 / (1 + epoch), "val_accuracy": 0.8})
        rows.append(learners(step, samples) | (gossip(epoch) if gossips else {}))
    return rows


def learners(step: float, samples: float) -> dict[str, float]:
    return {
        "step": step,
        "learners/global_samples": samples,
        "learners/train_seconds": step / 20,
        "learners/samples_per_second": 1280,
        "learners/exposed_fraction": 0.125,
    }


def gossip(epoch: int) -> dict[str, float]:
    return {
        "gossip/consensus_distance": 0.5,
        "gossip/relative_consensus_distance": 0.01 / epoch,
        "gossip/staleness_1": 90.0 * epoch,
        "gossip/staleness_3": 10.0 * epoch,
    }


def made_up_results() -> list[Result]:
    swb, ch = Errors(1000, 40, 20, 10), Errors(500, 30, 10, 5)
    errors = {"SWB": swb, "CH": ch, "total": swb.plus(ch)}
    runs = [("ddp", False), ("hadpsgd", True)]
    words = {"wer": errors["total"].wer, "wer_low": 0.06, "wer_high": 0.0912}
    test = {"num_segments": 9, "difference": 0.002, "z": 0.4, "p": 0.7}
    trained = [
        Result(
            name,
            errors,
            0.8,
            {**summarize_run(made_up_rows(gossips)), "other_cores": 0.01},
            made_up_rows(gossips),
            words,
            {"ddp": test} if gossips else {},
        )
        for name, gossips in runs
    ]
    return [Result("gmm", errors, 0.6, words=words), *trained]


def made_up_race() -> list[Entrant]:
    """`adpsgd` makes 4 steps while `ddp` makes one, and has half of its loss."""
    return [made_up_entrant("ddp", 1.0), made_up_entrant("adpsgd", 0.25)]


def made_up_entrant(method: str, step_s: float) -> Entrant:
    waits = 0.75 * step_s if method == "ddp" else 0.0
    steps = [Step(n * step_s, (n + 1) * step_s, waits, (1,)) for n in range(8)]
    summary = {
        "num_learners": 2,
        "seconds": 45.0,
        "step_s": 0.05,
        "pause_s": 0.2,
        "train_seconds": 45.25,
        "global_samples": 6400.0 / step_s,
        "exposed_fraction": waits / step_s,
        "frame_loss": 2 * step_s,
        "other_cores": 0.5,
    }
    rates = {f"learners/steps_per_second_{n}": (2 - n) / step_s for n in range(2)}
    test = {"num_segments": 9, "difference": -0.01, "z": -2.0, "p": 0.03}
    utterances = {name: Spoken(10, 20 * step_s) for name in "abc"}
    curve = (Point(5, 20.0, 3200, 4 * step_s), Point(9, 45.25, 6400, 2 * step_s))
    words = {"wer": 0.05, "wer_low": 0.04, "wer_high": 0.0612}
    against = {} if method == "ddp" else {"race-ddp": test}
    return Entrant(
        method,
        Result(f"race-{method}", {}, 0.8, summary, [rates], words, against),
        HeldOut(curve, utterances),
        [steps, steps],
    )


def test_the_table_has_a_line_per_run_and_a_dash_for_what_a_run_lacks():
    header, gmm, ddp, hadpsgd = table(made_up_results())
    assert header[:4] == ["run", "WER SWB", "WER CH", "WER total"]
    wers = ["7.00%", "9.00%", "7.67% (6.00% to 9.12%)"]
    assert gmm == ["gmm", *wers, "-", "60.0%", *["-"] * 4]
    assert ddp[4:] == ["0.409", "80.0%", "1280", "12.5%", "-", "50 s"]
    assert hadpsgd[8] == "0.29%"  # the mean of 1 % / epoch


def test_the_words_of_the_trainings_are_compared():
    expected = "hadpsgd less ddp: WER +0.20%, p = 0.7 by matched pairs."
    assert trainings_compared(made_up_results()) == expected


def test_few_speakers_give_no_interval_and_few_segments_no_certainty():
    gmm, ddp, hadpsgd = made_up_results()
    words = {"wer": 0.05, "wer_low": None, "wer_high": None}
    assert table([replace(gmm, words=words)])[1][3] == "5.00%"
    test = {"num_segments": 1, "difference": 0.002, "z": None, "p": None}
    unsure = replace(hadpsgd, against={"ddp": test})
    assert trainings_compared([gmm, ddp, unsure]) == "hadpsgd less ddp: WER +0.20%."


@pytest.mark.parametrize("others", [None, 0.9])
def test_speeds_are_told_only_where_it_is_known_that_nothing_else_ran(others):
    results = [
        replace(one, summary={**one.summary, "other_cores": others})
        for one in made_up_results()[1:]
    ]
    for line in table(results)[1:]:
        assert [line[n] for n in (6, 7, 9)] == ["-"] * 3
        assert line[4] == "0.409"
    assert ("0.90, 0.90 cores" in speeds_in_words(results)) is (others is not None)
    assert "nothing else ran" in speeds_in_words(made_up_results())


def test_the_columns_of_the_printed_table_stand_below_each_other():
    lines = as_text(table(made_up_results())).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_rows_survive_the_way_through_the_file(tmp_path):
    rows = made_up_rows(gossips=True)
    write_rows(tmp_path / "metrics.csv", rows)
    assert read_rows(tmp_path / "metrics.csv") == rows


def test_a_cell_that_is_no_number_is_named_by_file_and_line(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n2,oops\n")
    with pytest.raises(ValueError, match=r"metrics\.csv, line 3: .*oops"):
        read_rows(tmp_path / "metrics.csv")


def test_figures_of_one_step_become_one_row():
    rows = by_step([{"step": 2, "a": 1}, {"step": 1, "a": 5}, {"step": 2, "b": 3}])
    assert rows == [{"step": 1, "a": 5}, {"step": 2, "a": 1, "b": 3}]


def test_a_series_has_the_rows_with_both_figures():
    assert series([{"x": 1, "y": 2}, {"x": 3}, {"y": 4}], "x", "y") == [(1, 2)]


def test_the_consensus_distance_of_a_run_is_the_mean_over_its_validations():
    name = "gossip/consensus_distance"
    assert summarize_run([{name: 1.0}, {}, {name: 4.0}])["consensus_distance"] == 2.5


def test_the_times_of_all_finished_stages_are_told(tmp_path):
    runs = [Settings(corpus=tmp_path, out=tmp_path, run=r) for r in ("ddp", "hadpsgd")]
    for seconds, folder in enumerate([*(r.directory("train") for r in runs)], 7):
        folder.mkdir(parents=True)
        (folder / ".done").write_text(json.dumps({"seconds": seconds}))
    assert facts_of(runs, "")["time"] == "train (ddp) 7 s, train (hadpsgd) 8 s"


def test_a_result_is_read_from_the_finished_stages(tmp_path):
    settings = Settings(corpus=tmp_path, out=tmp_path, run="hadpsgd")
    expected = made_up_results()[2]
    write_score(settings.directory("score"), expected)
    trained = settings.directory("train")
    trained.mkdir(parents=True)
    write_rows(trained / "metrics.csv", expected.rows)
    (trained / "summary.json").write_text(json.dumps(expected.summary))
    found = read_result(settings)
    assert found.summary["staleness"] == {"1": 900.0, "3": 100.0}
    assert found == replace(expected, summary=found.summary)


def test_the_baseline_is_a_result_without_training(tmp_path):
    settings = Settings(corpus=tmp_path, out=tmp_path)
    expected = made_up_results()[0]
    write_score(settings.directory("baseline"), expected)
    assert read_baseline(settings) == expected


def write_score(folder: Path, result: Result) -> None:
    folder.mkdir(parents=True)
    parts = {part: {"wer": e.wer, **e._asdict()} for part, e in result.errors.items()}
    parts["total"] |= result.words
    score = {"parts": parts, "frame_accuracy": result.frame_accuracy}
    score["compared"] = result.against
    (folder / "score.json").write_text(json.dumps(score))


def test_the_report_shows_every_cell_of_the_table(tmp_path):
    page = report(tmp_path)
    cells = {cell for line in table(made_up_results()) for cell in line}
    assert {cell for cell in cells if json.dumps(cell) not in page} == set()


def test_the_report_escapes_what_it_is_told(tmp_path):
    page = report(tmp_path)
    assert "a \\u003c b" in page
    assert "a < b" not in page


def test_the_report_tells_of_the_race_if_there_was_one(tmp_path):
    assert "one slow machine" not in report(tmp_path)
    page = report(tmp_path, made_up_race())
    for cell in (cell for line in race_table(made_up_race()) for cell in line):
        assert json.dumps(cell) in page


def test_the_report_leaves_out_speeds_where_other_programs_ran(tmp_path):
    assert "Speed of learners" not in hidden_by(tmp_path, made_up_results())
    crowded = [
        replace(one, summary={**one.summary, "other_cores": 0.9})
        for one in made_up_results()[1:]
    ]
    hidden = hidden_by(tmp_path, crowded)
    assert {"samples_per_second", "Speed of learners"} <= set(hidden)


def test_figures_of_the_first_table_have_no_second_value_under_runs(tmp_path):
    hidden = hidden_by(tmp_path, made_up_results())
    assert hidden == ["samples_per_second", "exposed_share", "train_seconds"]
    assert "mean consensus dist." in table(made_up_results())[0]


def test_the_report_draws_the_race_alone_against_seconds(tmp_path):
    report(tmp_path, made_up_race())
    first, race = json.loads((tmp_path / "demo.page.json").read_text())["tables"]
    assert "chart" not in first
    assert race["chart"] == {"runs": ["race-ddp", "race-adpsgd"], "against": "seconds"}


def hidden_by(folder: Path, results: Sequence[Result]) -> list[str]:
    write_report(folder / "report.html", results, {}, "Made up")
    return json.loads((folder / "demo.page.json").read_text())["hide"]


def report(folder: Path, race: Sequence[Entrant] = ()) -> str:
    path = folder / "report.html"
    write_report(path, made_up_results(), {"command": "a < b"}, "Made up", race)
    return path.read_text()


# --- the settings


def test_only_generated_speech_is_learnt_in_the_short_training(tmp_path):
    generated = settings_of(parser().parse_args(["--out", str(tmp_path)]))
    assert generated.train == SHORT_TRAINING
    assert SHORT_TRAINING.epochs < TrainSettings().epochs
    assert not generated.decode.best_epoch
    assert generated.corpus == tmp_path / "corpus"
    given = settings_of(parser().parse_args(["--corpus", str(tmp_path / "tree")]))
    assert given.train == TrainSettings()
    assert given.decode.best_epoch
    assert given.corpus == tmp_path / "tree"


# --- the race


def test_a_step_of_the_race_is_one_of_the_control_and_the_slow_learners_five(tmp_path):
    control = Settings(corpus=tmp_path, out=tmp_path, run="ddp")
    control.directory("train").mkdir(parents=True)
    summary = {"train_seconds": 100.0, "steps": 2000.0}
    (control.directory("train") / "summary.json").write_text(json.dumps(summary))
    assert race_of(control, 0.0) == []
    ddp, adpsgd = race_of(control, 45.0)
    assert (ddp.run, adpsgd.run) == ("race-ddp", "race-adpsgd")
    assert (ddp.train.strategy, adpsgd.train.strategy) == ("ddp", "adpsgd")
    expected = RaceSettings(seconds=45.0, step_s=0.05, pause_s=0.2)
    assert ddp.race == adpsgd.race == expected
    assert replace(ddp.train, strategy="adpsgd") == adpsgd.train


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--race-seconds=-3"], "`seconds` must be at least 0, got -3"),
        (["--race-seconds=nan"], "`seconds` must be at least 0, got nan"),
    ],
)
def test_a_race_of_less_than_no_time_is_refused_at_once(capsys, arguments, problem):
    with pytest.raises(SystemExit):
        main(arguments)
    assert problem in capsys.readouterr().err


def test_the_other_trainings_of_the_demo_are_no_race(tmp_path, capsys):
    settings = ["--set=race.seconds=5", "--out", str(tmp_path)]
    assert main(settings) == 1
    assert "the race has --race-seconds" in capsys.readouterr().err


def test_the_table_of_the_race_has_intervals_and_the_steps_of_fast_and_slow():
    _, ddp, adpsgd = race_table(made_up_race())
    loss, rate = "2.000 (2.000 to 2.000)", "5.00% (4.00% to 6.12%)"
    assert ddp == ["ddp", "45.2 s", "6,400", "90", "45", "75%", loss, rate, "0.50"]
    assert adpsgd[2:6] == ["25,600", "362", "181", "0%"]


def test_methods_are_compared_on_the_same_utterances():
    assert comparison(*made_up_race()) == (
        "adpsgd less ddp: frame loss -1.500 (-1.500 to -1.500), WER -1.00%, p = 0.03 "
        "by matched pairs."
    )


def test_the_picture_shows_who_waited_for_how_long(tmp_path):
    draw_race(made_up_race(), tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    losses, ddp, _ = race_figure(made_up_race()).axes
    curves = {str(one.get_label()): np.asarray(one.get_data()) for one in losses.lines}
    assert curves["ddp"].tolist() == [[20.0, 45.25], [4.0, 2.0]]
    bars: Any = ddp.collections[0]
    (step, wait) = (path.get_extents().bounds for path in bars.get_paths())
    # The last 3 s, of steps of 1 s of which 0.75 s were waits.
    assert (step[0], step[2]) == pytest.approx((0.0, 0.25))
    assert (wait[0], wait[2]) == pytest.approx((0.25, 0.75))


def test_lanes_are_read_in_the_order_of_learners_without_events(tmp_path):
    for learner in (10, 9):
        entries = [
            Entry(learner, learner + 0.5, 0.25, 2, "1 3"),
            Entry(20.0, 21.0, event="validation"),
        ]
        write_timeline(tmp_path / f"{learner}.timeline.csv", entries)
    lanes = read_lanes(tmp_path)
    assert lanes == [[Step(n, n + 0.5, 0.25, (1, 3))] for n in (9, 10)]


def test_a_damaged_lane_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "0.timeline.csv"
    write_timeline(path, [Entry(1.0, 2.0)])
    path.write_text(path.read_text() + "2.5,oops")
    with pytest.raises(ValueError, match=r"0\.timeline\.csv, line 3: .*oops"):
        read_lanes(tmp_path)


def test_another_setting_is_refused_with_advice_that_the_demo_can_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ends = [
        Stage(name, "p", lambda settings, output: None, (), depends)
        for name, depends in (("realign", ("align",)), ("adapted_baseline", ()))
    ]
    monkeypatch.setattr(demo, "STAGES", [*ends, ends[1]._replace(name="baseline")])
    (tmp_path / "corpus").mkdir()
    arguments = ["--corpus", f"{tmp_path}/corpus", "--out", f"{tmp_path}/out"]
    assert main(arguments) == 1  # a corpus without a test set, after `realign`
    capsys.readouterr()

    assert main([*arguments, "--set", "align.beam=9"]) == 1
    told = capsys.readouterr().err
    options = {text for action in parser()._actions for text in action.option_strings}
    assert {word for word in told.split() if word.startswith("--")} <= {
        f"{option}{mark}" for option in options for mark in ("", ",", ".", ":")
    }
    assert "stage `realign`" in told
    assert "align.beam was 8.0, is 9.0. Repeat the demo with the earlier" in told
    assert f"choose another --out, or delete {tmp_path}/out/exp" in told
