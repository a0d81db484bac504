"""The rows of runs: written whole, read back, from files and from Weights & Biases."""

import dataclasses
import importlib.util
import json
import struct
from pathlib import Path

import pytest

from lightning_adpsgd.callbacks import runs, wandb_log
from lightning_adpsgd.callbacks.loggers import _finish, make_wandb_logger
from lightning_adpsgd.callbacks.runs import Run, fetch_runs, read_runs, write_run
from tests.helpers import forked, until

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


def log_offline(folder: Path, run: Run) -> None:
    logger = make_wandb_logger(folder, run.name)
    assert logger is not None
    logger.log_hyperparams({"text": "x" * 100_000, **runs.settings_of(run)})
    logger.log_metrics({"run/best_loss": 9.0}, step=1)
    logger.log_metrics(runs.results_of(run), step=2)
    _finish(logger)


@pytest.mark.slow
def test_runs_of_weights_and_biases_are_read_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr(
        "lightning_adpsgd.callbacks.loggers._is_logged_in", lambda: False
    )
    log_offline(tmp_path, RUN)
    # Its own process writes the last block after the run has been closed.
    until(lambda: read_runs(tmp_path) == [RUN], "the end of the log")
    # One that has a file too counts once, as its file says.
    renewed = dataclasses.replace(RUN, wer=0.25)
    write_run(renewed, tmp_path / "files")
    assert read_runs(tmp_path) == [renewed]


def test_without_weights_and_biases_the_files_remain(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_run(RUN, tmp_path)
    (tmp_path / "run-1.wandb").write_bytes(b"")
    assert read_runs(tmp_path) == [RUN]
    with pytest.warns(UserWarning, match="is not installed"):
        assert fetch_runs("entity/project") == []


def test_a_broken_log_is_left_out_with_a_warning(tmp_path):
    pytest.importorskip("wandb")
    (tmp_path / "run-1.wandb").write_bytes(b"something else")
    with pytest.warns(UserWarning, match="was left out"):
        assert read_runs(tmp_path) == []


def test_a_server_that_does_not_answer_gives_no_runs(monkeypatch):
    wandb = pytest.importorskip("wandb")

    def silent(**_):
        raise ConnectionError("no route")

    monkeypatch.setattr(wandb, "Api", silent)
    with pytest.warns(UserWarning, match="no route"):
        assert fetch_runs("entity/project") == []


def test_runs_of_a_server_are_those_that_were_watched(monkeypatch):
    wandb = pytest.importorskip("wandb")

    class Found:
        def __init__(self, run: Run | None) -> None:
            self.config = {"lr": 3} | (runs.settings_of(run) if run else {})
            self.summary = runs.results_of(run) if run else {}

    class Server:
        def __init__(self, timeout: int) -> None:
            pass

        def runs(self, project: str) -> list[Found]:
            return [Found(RUN), Found(None)]

    monkeypatch.setattr(wandb, "Api", Server)
    assert fetch_runs("entity/project") == [RUN]


def record(kind: int, data: bytes) -> bytes:
    return struct.pack("<IHB", 0, len(data), kind) + data


def test_records_go_on_in_the_next_block_of_the_log(tmp_path):
    """Kinds: 1 whole, 2 first, 3 middle, 4 last; no header within 6 bytes of an end."""
    first = b"a" * ((1 << 15) - 7 - 7 - 7 - 3)  # leaves room for a header and 3 bytes
    whole = record(1, first) + record(2, b"bcd")
    whole += record(3, b"e" * ((1 << 15) - 7 - 5)) + bytes(5)
    whole += record(4, b"f") + record(1, b"cut off")[:-1]
    path = tmp_path / "run-1.wandb"
    path.write_bytes(b":W&B" + bytes(3) + whole)
    expected = [first, b"bcd" + b"e" * ((1 << 15) - 12) + b"f"]
    assert list(wandb_log._records(path)) == expected


def test_the_last_figure_of_a_name_counts(tmp_path):
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    path = tmp_path / "run-1.wandb"
    content = b":W&B" + bytes(3)
    for value in (2.0, 1.0):
        message = internal.Record()
        message.history.item.add(key="loss", value_json=json.dumps(value))
        content += record(1, message.SerializeToString())
    path.write_bytes(content)
    assert wandb_log.last_figures(path) == {"loss": 1.0}
