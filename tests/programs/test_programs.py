"""The judge finds what is wrong, and programs of some seeds run without a finding."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs import judge as rules
from tests.programs.__main__ import line_of, summary, try_seed
from tests.programs.choices import DIMENSIONS, EXCLUDED, draw
from tests.programs.judge import Finding, beyond, judge, refusal
from tests.programs.program import Fault, Program
from tests.programs.report import Report, Run, Training

# Two learners see 24 rows in two epochs.
EPOCHS = tuple((epoch, list(range(0, 24, 2))) for epoch in range(2))
OTHERS = tuple((epoch, list(range(1, 24, 2))) for epoch in range(2))
MINE, THEIRS = Training("same", seen=EPOCHS), Training("same", seen=OTHERS)


def run_of(*reports: Report | None, **fields: object) -> Run:
    return Run(Program(0), list(reports))._replace(**fields)


def ended(first: Training, second: Training) -> Run:
    return run_of(Report({"fit": first}), Report({"fit": second}))


def names(run: Run) -> list[str]:
    return [finding.name for finding in judge(run)]


# --- what is wrong, by the one who ends second


def test_equal_learners_are_clean() -> None:
    assert judge(ended(MINE, THEIRS)) == []


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (replace(THEIRS, weights="other"), "weights differ"),
        (replace(THEIRS, is_finite=False), "weights are not finite"),
        (replace(THEIRS, has_finished=False), "training has not finished"),
        (replace(THEIRS, epochs=1), "epochs differ"),
        (replace(THEIRS, metrics={"val_loss": 1.0}), "validation differs"),
    ],
)
def test_an_end_that_differs_is_found(wrong: Training, name: str) -> None:
    assert names(ended(MINE, wrong)) == [name]


def test_too_few_epochs_are_found() -> None:
    few = [replace(one, epochs=1) for one in (MINE, THEIRS)]
    assert names(ended(*few)) == ["epochs are not as many as asked for"]


def test_a_missing_row_is_found() -> None:
    short = replace(THEIRS, seen=(OTHERS[0], (1, OTHERS[1][1][1:])))
    (finding,) = judge(ended(MINE, short))
    assert str(finding) == (
        "rows are not seen once: fit: epoch 1: 1 of 24 rows missing, 0 twice"
    )


def test_rows_that_are_seen_twice_are_found() -> None:
    both = replace(THEIRS, seen=(*EPOCHS, OTHERS[0], OTHERS[1]))
    assert names(ended(MINE, both)) == ["rows are not seen once"] * 2


def test_rows_need_not_be_seen_where_a_program_drops_them() -> None:
    short = replace(THEIRS, seen=(OTHERS[0], (1, OTHERS[1][1][1:])))
    dropping = Program(0, {"last batch": "dropped"})
    assert judge(ended(MINE, short)._replace(program=dropping)) == []


def test_lost_files_threads_and_other_evaluations_are_found() -> None:
    first = Report({"fit": MINE}, {"test": [1.0]})
    second = Report({"fit": THEIRS}, {"test": [2.0]}, ["no file"], ["adpsgd-x"])
    assert names(run_of(first, second)) == [
        "evaluations differ",
        "a file is wrong",
        "a thread is left",
    ]


# --- ends


def test_a_learner_that_hangs_is_found_and_nothing_else() -> None:
    run = run_of(Report({"fit": MINE}), None, running=(1,))
    assert [str(one) for one in judge(run)] == [
        "a learner does not end: learners 1 had to be killed"
    ]


def test_a_learner_that_says_nothing_is_found() -> None:
    run = run_of(Report({"fit": MINE}), None)
    assert names(run) == ["a learner ends without a word"]


def test_an_error_counts_once_and_not_those_that_follow() -> None:
    follows = Report(error="LearnerFailed: learner 0 raised KeyError: 1")
    run = run_of(Report(error="KeyError: 1"), follows)
    assert judge(run) == [Finding("a learner fails", *2 * ("KeyError: 1",))]


def test_only_what_all_refuse_is_a_refusal() -> None:
    refused = Report(error="ValueError: must", is_refusal=True)
    assert refusal(run_of(refused, refused)) == "ValueError: must"
    assert not refusal(run_of(refused, Report(error="ValueError: must")))
    assert not refusal(run_of(refused, None))


def test_what_ddp_does_too_is_no_finding() -> None:
    found = [Finding("a", "fit", "1"), Finding("a", "again", "1")]
    assert beyond(found, [Finding("a", "fit", "2")]) == found[1:]


# --- faults


RAISES = Program(0, fault=Fault("raise", 0, "training_step"))
KILL = Program(0, fault=Fault("kill", 0))
PLANTED = Report(error="ValueError: planted in training_step", ended=5.0)


@pytest.mark.parametrize(
    "error", ["LearnerFailed: learner 0 on host x raised", "LearnerFollows: 1"]
)
def test_a_failure_that_is_named_is_clean(error: str) -> None:
    run = run_of(PLANTED, Report(error=error, ended=6.0), program=RAISES)
    assert judge(run) == []


@pytest.mark.parametrize("error", ["", "RuntimeError: Connection closed by peer"])
def test_a_failure_that_is_not_named_is_found(error: str) -> None:
    run = run_of(PLANTED, Report(error=error, ended=6.0), program=RAISES)
    assert names(run) == ["a learner does not say who failed"]


def test_an_exception_that_does_not_come_changes_nothing() -> None:
    assert judge(run_of(Report(), Report(), program=RAISES)) == []


def test_a_late_end_is_found() -> None:
    late = Report(error="LearnerFollows: 1", ended=25.0)
    assert names(run_of(PLANTED, late, program=RAISES)) == ["a learner ends late"]
    killed = run_of(None, late, program=KILL, faulted=5.0)
    assert names(killed) == ["a learner ends late"]


def test_a_death_need_only_be_known_as_one() -> None:
    lost = Report(error="LearnerFailed: learner 1 lost another learner", ended=6.0)
    assert judge(run_of(None, lost, program=KILL, faulted=5.0)) == []
    bare = Report(error="RuntimeError: Connection closed by peer", ended=6.0)
    run = run_of(None, bare, program=KILL, faulted=5.0)
    assert names(run) == ["a learner does not say who failed"]


# --- draws and programs


def test_a_seed_always_draws_the_same_program() -> None:
    for faults in ("none", "raise", "kill"):
        assert draw(5, faults) == draw(5, faults)
    drawn = {str(draw(seed)) for seed in range(100)}
    assert len(drawn) == 100


def test_seeds_draw_every_choice() -> None:
    programs = [draw(seed) for seed in range(2000)]
    for dimension, table in DIMENSIONS.items():
        drawn = {program.choices.get(dimension) for program in programs}
        assert set(list(table)[1:]) <= drawn, dimension


def test_rules_name_choices_that_exist() -> None:
    of_judge: list[Mapping[str, tuple[str, ...]]] = [rules.UNEVEN, rules.SHORT]
    excluding = [{one.dimension: one.choices} for one in EXCLUDED]
    for choices in (*of_judge, *excluding):
        for dimension, ones in choices.items():
            # A plain choice is not in a program, so no rule can find it.
            assert set(ones) <= set(list(DIMENSIONS[dimension])[1:])
    assert {name for one in EXCLUDED for name in one.others} <= set(DIMENSIONS)


def test_the_summary_has_a_command_for_each_finding(tmp_path: Path) -> None:
    verdict = try_seed(SEEDS[0], "none", tmp_path)
    wrong = verdict._replace(findings=(Finding("weights differ", "fit"),))
    command = f"--seeds {SEEDS[0]} {SEEDS[0] + 1} --faults none"
    assert command in summary([verdict, wrong], "none")


# Of different algorithms, models, data and optimizers.
SEEDS = (3, 9, 15, 17, 56)


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_run_without_a_finding(seed: int, tmp_path: Path) -> None:
    verdict = try_seed(seed, "none", tmp_path)
    assert not verdict.findings, line_of(verdict)
    assert not verdict.refused, line_of(verdict)
