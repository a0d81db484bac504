"""The rows of runs: written whole, read back, from files and from Weights & Biases."""

import dataclasses
import sys
from typing import Any

import pytest

from lightning_adpsgd.callbacks import runs
from lightning_adpsgd.callbacks.runs import Run, fetch_runs, read_runs, write_run
from tests.helpers import forked

RUN = Run(
    name="adpsgd-B64",
    algorithm="adpsgd",
    topology="ring",
    communication="async",
    num_super_learners=4,
    super_learner_size=1,
    global_batch=64,
    lr=0.1,
    best_loss=1.2345678901234567,
    diverged=True,
)


def named(name: str) -> Run:
    return dataclasses.replace(RUN, name=name)


def test_a_run_comes_back_as_it_was(tmp_path):
    path = write_run(RUN, tmp_path / "new")
    assert path.name == "adpsgd-B64.run.csv"
    assert read_runs(tmp_path) == [RUN]


def test_a_run_of_the_same_name_is_replaced(tmp_path):
    write_run(RUN, tmp_path)
    better = dataclasses.replace(RUN, best_loss=1.0, diverged=False)
    write_run(better, tmp_path)
    assert read_runs(tmp_path) == [better]


def test_processes_that_end_together_lose_no_run(tmp_path):
    forked(6, lambda rank: write_run(named(f"run{rank}"), tmp_path) and None)
    assert [run.name for run in read_runs(tmp_path)] == [f"run{n}" for n in range(6)]
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_was_not_finished_is_no_run(tmp_path):
    (tmp_path / ".a.1.partial").write_text("name,algorithm\n")
    assert read_runs(tmp_path) == []


def test_a_file_of_something_else_is_named(tmp_path):
    path = tmp_path / "a.run.csv"
    path.write_text("name,lr\na,high\n")
    with pytest.raises(ValueError, match=f"{path} does not hold the row of a run"):
        read_runs(tmp_path)


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_name_that_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="must be the name of a file"):
        write_run(named(name), tmp_path)


def test_without_weights_and_biases_the_files_remain(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_run(RUN, tmp_path)
    assert read_runs(tmp_path) == [RUN]
    with pytest.warns(UserWarning, match="no runs from Weights & Biases"):
        assert fetch_runs("entity/project") == []


def test_a_server_that_does_not_answer_gives_no_runs(monkeypatch):
    wandb = pytest.importorskip("wandb")

    def silent(**_):
        raise ConnectionError("no route")

    monkeypatch.setattr(wandb, "Api", silent)
    with pytest.warns(UserWarning, match="no route"):
        assert fetch_runs("entity/project") == []


class Found:
    """A run as the server keeps it."""

    def __init__(self, run: Run | None) -> None:
        self.config = {"lr": 3} | (runs.settings_of(run) if run else {})
        self.summary: dict[str, Any] = runs.results_of(run) if run else {}


def serve(monkeypatch: pytest.MonkeyPatch, *found: Found) -> None:
    wandb = pytest.importorskip("wandb")

    class Server:
        def __init__(self, timeout: int) -> None:
            pass

        def runs(self, project: str) -> tuple[Found, ...]:
            return found

    monkeypatch.setattr(wandb, "Api", Server)


def test_runs_of_a_server_are_those_that_were_watched(monkeypatch):
    serve(monkeypatch, Found(RUN), Found(None))
    assert fetch_runs("entity/project") == [RUN]


def test_a_run_that_is_still_written_is_left_out_by_name(monkeypatch):
    half, odd = Found(named("half")), Found(named("odd"))
    del half.config["run/topology"]
    odd.summary["run/best_loss"] = {"min": 1.0}
    serve(monkeypatch, half, Found(RUN), odd)
    with pytest.warns(UserWarning, match="left out run 'half': .*'topology'"):
        assert fetch_runs("entity/project") == [RUN]
