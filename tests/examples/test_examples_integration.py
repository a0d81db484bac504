"""The programs in examples/ train under `ddp` and the asynchronous modes.

One launch of two learners runs them all, with sizes that are not their own.
"""

import contextlib
import importlib.util
import io
import math
import re
from typing import Any, NamedTuple

import pytest

from lightning_adpsgd.islands import island
from lightning_adpsgd.islands.member_list import Heartbeat
from tests.examples.programs import FOLDER, program_of
from tests.helpers import PROGRAM_S, engine_threads, forked
from tests.learners import learners, values

MOST_LINES = 80
STEPS = 6
MODES = ("ddp", "adpsgd", "rdpsgd")
# Odd batch sizes, and models of other sizes than the programs' own.
SIZES = {
    "image_classifier": ["--batch-size", "7", "--width", "5"],
    "language_model": ["--batch-size", "3", "--width", "12", "--depth", "3"],
    "fine_tuning": ["--batch-size", "5", "--width", "40", "--rank", "3"],
    "gan": ["--batch-size", "9", "--width", "11"],
    "fabric_loop": ["--batch-size", "13", "--width", "17"],
}
RUNS = [(name, mode) for name in SIZES for mode in MODES]
RUNS += [("fine_tuning", "lean")]
if importlib.util.find_spec("jsonargparse") is not None:
    RUNS += [("cli", mode) for mode in (*MODES, "yaml")]


class Ended(NamedTuple):
    """What a program has returned, and what it has printed in one learner."""

    value: float
    printed: str


def arguments(name: str, mode: str) -> list[str]:
    """The command line of a run."""
    if name == "cli":
        yaml = ["fit", "--config", str(FOLDER / "cli.yaml"), "--data.batch_size=11"]
        strategy = [] if mode == "yaml" else [f"--trainer.strategy={mode}"]
        return [*yaml, f"--trainer.max_steps={STEPS}", *strategy]
    if (name, mode) == ("gan", "ddp"):
        mode = "ddp_find_unused_parameters_true"
    return [*SIZES[name], "--strategy", mode, "--steps", str(STEPS)]


def ended(name: str, mode: str) -> Ended:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        value = program_of(name)(arguments(name, mode))
    assert engine_threads() == []
    return Ended(float(value), printed.getvalue())


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str], Ended]]:
    def program(rank: int) -> dict[tuple[str, str], Ended]:
        return {run: ended(*run) for run in RUNS}

    return values(learners(2, program, PROGRAM_S))


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_learners_end_in_one_model_and_the_first_says_what_it_did(
    results: Any, run: tuple[str, str]
) -> None:
    first, second = (runs[run] for runs in results)
    assert first.value == second.value
    assert math.isfinite(first.value)
    taken = 2 * STEPS if run[0] == "gan" else STEPS
    assert f"{taken} steps" in first.printed
    assert ("exchanges per step" in first.printed) == (run[1] != "ddp")
    assert ("consensus distance" in first.printed) == (run[1] != "ddp")
    assert "steps" not in second.printed


def killed() -> list[list[int]]:
    """Rows seen by each island; nobody waits for the list of members to stay empty."""
    object.__setattr__(island._TIMEOUTS, "heartbeat", Heartbeat(empty_s=1.0))
    return program_of("killed_island")(["--batch-size", "3", "--steps", "150"]).tolist()


def test_no_row_is_left_out_when_an_island_is_killed() -> None:
    [seen] = values(forked(1, lambda rank: killed(), PROGRAM_S))
    assert all(sum(times) >= 1 for times in zip(*seen, strict=True))
    by_islands = [sum(row) for row in seen]
    assert all(by_islands)
    assert by_islands[2] < sum(by_islands[:2])


# --- what a reader finds


def test_each_program_fits_on_a_page() -> None:
    for path in FOLDER.glob("*.py"):
        assert path.read_text().count("\n") <= MOST_LINES, path.name


def test_the_page_lists_each_program_with_a_command_that_exists() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    programs = {path.name for path in FOLDER.glob("*.py")}
    assert set(re.findall(r"`python examples/(\w+\.py)[ `]", page)) == programs
    files = {path.name for path in FOLDER.iterdir() if path.suffix != ".md"}
    assert set(re.findall(r"\]\((\w+\.\w+)\)", page)) >= files - {"__pycache__"}
    for name, options in re.findall(r"`python examples/(\w+)\.py ([^`|]*)`", page):
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        for option in re.findall(r"--([\w-]+)", options):
            assert option in text or name == "cli", f"{name} --{option}"
