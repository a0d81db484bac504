"""What is read from the folders of trainings, and what is said of broken files."""

import json
from pathlib import Path

import pytest

from lightning_adpsgd.callbacks.timeline import Entry, write_timeline
from lightning_adpsgd.report import collect
from lightning_adpsgd.report.collect import Report
from tests.report.runs import (
    write_lanes,
    write_rows,
    write_run,
    write_score,
    write_sound,
)


def one_run(folder: Path) -> Report:
    return collect([folder])


def names(report: Report) -> list[str]:
    return [run["name"] for run in report.runs]


def test_the_figures_of_a_run_are_series_against_steps(tmp_path):
    rows = write_run(tmp_path, "first")
    [run] = one_run(tmp_path).runs
    expected = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    assert run["series"]["val_loss"] == expected
    assert run["series"]["gossip/staleness_1"][-1] == (999, 90)


def test_what_nobody_asks_for_may_be_anything(tmp_path):
    write_rows(tmp_path / "metrics.csv", [{"step": 1, "val_loss": 2, "mine": "a, b"}])
    [run] = one_run(tmp_path).runs
    assert run["series"] == {"val_loss": [(1, 2)]}


def test_the_same_figure_logged_twice_at_a_step_is_the_later_one(tmp_path):
    rows = [{"step": 5, "val_loss": 2}, {"step": 1, "val_loss": 9}]
    write_rows(tmp_path / "metrics.csv", [*rows, {"step": 5, "val_loss": 3}])
    [run] = one_run(tmp_path).runs
    assert run["series"]["val_loss"] == [(1, 9), (5, 3)]


def test_a_long_series_keeps_its_mean_in_at_most_a_thousand_points(tmp_path):
    rows = [{"step": k, "curve/loss": k} for k in range(4000)]
    write_rows(tmp_path / "metrics.csv", rows)
    [run] = one_run(tmp_path).runs
    points = run["series"]["curve/loss"]
    assert len(points) == 1000
    assert points[0] == (1.5, 1.5)
    assert points[-1] == (3997.5, 3997.5)


def test_settings_come_from_the_row_beside_the_figures(tmp_path):
    write_run(tmp_path / "a", "first", seed=3)
    [run] = one_run(tmp_path).runs
    assert run["name"] == "first"
    assert run["settings"]["seed"] == 3
    assert run["settings"]["lr"] == 0.1


def test_each_of_two_runs_of_one_name_has_its_own_row(tmp_path):
    """The second has diverged, and its row has no best loss."""
    results = {"a": {"best_loss": 1.5}, "b": {"diverged": "True"}}
    for folder, more in results.items():
        write_run(tmp_path / folder, "same")
        row = {"name": "same", **more}
        write_rows(tmp_path / folder / "same.run.csv", [row])
    settings = [run["settings"] for run in one_run(tmp_path).runs]
    assert settings == [{"name": "same", **more} for more in results.values()]


def test_a_row_beside_no_run_is_that_of_the_last_run_of_its_name(tmp_path):
    for version in (0, 1):
        logged = tmp_path / "logs" / f"version_{version}"
        write_rows(logged / "metrics.csv", [{"step": 1, "val_loss": 2}])
        (logged / "hparams.yaml").write_text("run/name: mine\n")
    write_rows(tmp_path / "runs" / "mine.run.csv", [{"name": "mine", "wer": 0.25}])
    settings = [run["settings"] for run in one_run(tmp_path).runs]
    assert settings == [{"name": "mine"}, {"name": "mine", "wer": 0.25}]


def test_settings_come_from_what_the_logger_was_told_where_the_row_is_elsewhere(
    tmp_path,
):
    logged = tmp_path / "logs" / "version_0"
    write_rows(logged / "metrics.csv", [{"step": 1, "val_loss": 2}])
    (logged / "hparams.yaml").write_text("hidden: 3\nrun/name: mine\nrun/lr: 0.2\n")
    write_rows(tmp_path / "runs" / "mine.run.csv", [{"name": "mine", "wer": 0.25}])
    [run] = one_run(tmp_path).runs
    assert run["settings"] == {"name": "mine", "lr": 0.2, "wer": 0.25}


@pytest.mark.parametrize("name", ["001", "0.10", "1e-3", "nan"])
def test_a_name_that_looks_like_a_number_stays_as_it_is(tmp_path, name):
    write_run(tmp_path / "row" / "a", name)
    logged = tmp_path / "logged" / "a"
    write_rows(logged / "metrics.csv", [{"step": 1, "val_loss": 2}])
    (logged / "hparams.yaml").write_text(f"run/name: '{name}'\nrun/lr: 0.2\n")
    write_rows(tmp_path / "logged" / "one.run.csv", [{"name": name, "wer": 0.25}])
    assert names(one_run(tmp_path / "row")) == [name]
    [run] = one_run(tmp_path / "logged").runs
    assert run["name"] == name
    assert run["settings"] == {"name": name, "lr": 0.2, "wer": 0.25}
    both = collect([tmp_path / "row", tmp_path / "logged"])
    assert names(both) == [f"row: {name}", f"logged: {name}"]


def test_a_row_without_figures_is_a_run_too(tmp_path):
    write_rows(tmp_path / "only.run.csv", [{"name": "only", "lr": 0.2}])
    assert names(one_run(tmp_path)) == ["only"]


def test_what_a_run_was_made_of_is_not_a_run_of_its_own(tmp_path):
    write_run(tmp_path / "train", "first")
    write_run(tmp_path / "train" / "logs" / "attempt_0", "first")
    assert names(one_run(tmp_path)) == ["first"]


def race_of(*runs: str, against: str = "seconds") -> str:
    chart = {"runs": list(runs), "against": against}
    return json.dumps({"tables": [{"title": "Race", "head": [], "chart": chart}]})


def test_a_chart_names_its_runs_as_the_page_does(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder, "ddp")
        (tmp_path / folder / "race.page.json").write_text(race_of("ddp"))
    notes = collect([tmp_path / "a", tmp_path / "b"]).notes
    charts = [one["tables"][0]["chart"]["runs"] for one in notes]
    assert charts == [["a: ddp"], ["b: ddp"]]


def test_a_chart_against_what_nobody_records_is_refused(tmp_path):
    (tmp_path / "race.page.json").write_text(race_of("ddp", against="hours"))
    with pytest.raises(ValueError, match=r"race.page.json: a `chart` must .*steps;"):
        collect([tmp_path])


def test_unfinished_work_is_left_out(tmp_path):
    write_run(tmp_path / "done", "first")
    write_run(tmp_path / ".other.partial", "second")
    assert names(one_run(tmp_path)) == ["first"]


def test_folders_beside_each_other_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder, "ddp")
        write_score(tmp_path / folder, "ddp", 0.1)
    report = collect([tmp_path / "a", tmp_path / "b"])
    assert names(report) == ["a: ddp", "b: ddp"]
    assert [score["name"] for score in report.scores] == ["a: ddp", "b: ddp"]
    assert names(collect([tmp_path])) == ["ddp", "ddp (2)"]


def test_lanes_belong_to_the_run_above_them_and_count_from_its_beginning(tmp_path):
    write_run(tmp_path / "train", "first")
    write_lanes(tmp_path / "train" / "timeline", begin=1.7e9 + 0.25)
    [lanes] = one_run(tmp_path).lanes
    assert lanes["name"] == "first"
    assert [one["name"] for one in lanes["learners"]] == ["0", "1"]
    quick, slow = lanes["learners"]
    assert quick["steps"][4] == [0.65, 0.75, 0.02, 1, ["1"], 0]
    assert slow["events"] == [[8.25, 8.25, "RuntimeError: <b>gone</b>"]]


def test_the_page_reads_what_the_callback_writes(tmp_path):
    step = Entry(10.0, 10.5, waited=0.125, exchanges=2, peers="1 3", members=4, lost=1)
    entries = [step, Entry(10.5, 11.0, event="validation")]
    write_timeline(tmp_path / "10.timeline.csv", entries)
    write_timeline(tmp_path / "9.timeline.csv", [])
    [lanes] = one_run(tmp_path).lanes
    empty, learner = lanes["learners"]
    assert (empty["name"], empty["steps"]) == ("9", [])
    assert learner["steps"] == [[0, 0.5, 0.125, 2, ["1", "3"], 1]]
    assert learner["events"] == [[0.5, 1.0, "validation"]]


def test_a_timeline_without_a_step_counts_from_its_event(tmp_path):
    failed = Entry(1.7e9 + 0.5, 1.7e9 + 0.5, event="RuntimeError: at the first batch")
    write_timeline(tmp_path / "0.timeline.csv", [failed])
    [lanes] = one_run(tmp_path).lanes
    assert lanes["start"] == 1.7e9
    assert lanes["learners"][0]["events"] == [[0.5, 0.5, failed.event]]


def test_a_score_has_its_parts_and_its_tests(tmp_path):
    write_score(tmp_path / "score", "second", 0.04, other="first")
    [score] = one_run(tmp_path).scores
    assert score["parts"]["total"]["wer_high"] == 0.08
    assert score["compared"]["first"]["p"] == 0.0124


def test_the_sound_of_an_utterance_is_part_of_the_page(tmp_path):
    write_score(tmp_path, "first", 0.04)
    [words] = one_run(tmp_path).words
    assert words["utterances"][0]["audio"].startswith("data:audio/wav;base64,UklGR")


def test_a_score_of_something_else_is_left_out(tmp_path):
    write_run(tmp_path, "first")
    for text in ('{"points": 3}', "[3]"):
        (tmp_path / "score.json").write_text(text)
        assert one_run(tmp_path).scores == []


def test_a_folder_without_a_run_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"has no files of a run: no metrics\.csv"):
        collect([tmp_path])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the folder .*/nowhere does not exist"):
        collect([tmp_path / "nowhere"])


def test_a_file_is_not_taken_for_a_folder_that_is_not_there(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step\n")
    with pytest.raises(ValueError, match=r"metrics\.csv is a file: give the folder"):
        collect([file])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.csv", "step,val_loss\n1,2\n2\n", r"metrics\.csv, line 3: 1 cells"),
        ("metrics.csv", "step,val_loss\n1,2\n2,o\n", r"line 3: `val_loss` must be a"),
        ("metrics.csv", "step,val_loss\nx,2\n", r"line 2: `step` must be a number"),
        ("a.run.csv", "name,lr\n", r"a\.run\.csv, line 2: the row of the run is"),
        ("score.json", '{"parts":\n{"SWB"', r"score\.json, line 2: the file is not c"),
        ("a.page.json", "[]", r"page\.json: expected a JSON dict, got list"),
        ("score.json", '{"parts": {"SWB": {}}}', r"part 'SWB' must have `num_words`"),
        ("a.page.json", '{"facts": []}', r"page\.json: `facts` must be a JSON dict"),
        ("0.timeline.csv", "begin,end\n1,\n", r"csv, line 2: `end` is missing"),
        ("0.timeline.csv", "begin,end\n1,2\n3,", r"csv, line 3: `end` is missing"),
        ("0.timeline.csv", "begin,end\n1,2\n3", r"csv, line 3: 1 cells under 2"),
    ],
)
def test_half_a_file_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        collect([tmp_path])


@pytest.mark.parametrize(
    ("utterances", "message"),
    [
        ([{"words": 3}], r"utterance 0 must have a list of `pairs`"),
        (
            [{"pairs": [], "audio": "gone.wav"}],
            r"utterance 0: its sound .*gone\.wav is missing",
        ),
        ([{"pairs": [["C", "a"]]}], r"utterance 0: a pair must be \[kind, said, heard"),
    ],
)
def test_an_utterance_that_cannot_be_shown_is_named(tmp_path, utterances, message):
    write_score(tmp_path, "first", 0.1)
    (tmp_path / "utterances.json").write_text(json.dumps(utterances))
    with pytest.raises(ValueError, match=message):
        collect([tmp_path])


def test_a_sound_outside_of_its_folder_is_refused(tmp_path):
    write_sound(tmp_path / "secret.wav")
    write_score(tmp_path / "score", "first", 0.1)
    outside = [{"pairs": [], "audio": "../secret.wav"}]
    (tmp_path / "score" / "utterances.json").write_text(json.dumps(outside))
    with pytest.raises(ValueError, match="must lie below"):
        collect([tmp_path])
