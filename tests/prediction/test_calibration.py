"""What is measured, its file, and the command line around both."""

import json
import os
import signal
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_adpsgd import __main__ as command_line
from lightning_adpsgd.prediction import calibration
from lightning_adpsgd.prediction.calibration import (
    Calibration,
    measure_arithmetic,
    read,
)
from tests import warm
from tests.helpers import PATIENCE_S

FOUND = Calibration(
    bandwidth=1e9,
    latency=1e-4,
    copy=1e-10,
    exchange=1e-9,
    lattice=5e-10,
    merge=2e-10,
    round=1e-9,
    gradient=5e-10,
    cores=2,
    step_seconds=0.1,
    step_processor_seconds=0.02,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return FOUND.write(tmp_path / "machine.json")


def test_a_calibration_is_read_as_it_was_written(file: Path) -> None:
    assert read(file) == FOUND
    assert [path.name for path in file.parent.iterdir()] == ["machine.json"]


def test_a_link_is_that_of_the_file() -> None:
    assert FOUND.link.seconds(1e9) == pytest.approx(1.0001)


def test_learners_that_share_cores_repeat_what_goes_over_memory_alone() -> None:
    assert FOUND.costs() == replace(FOUND.costs(2), cores=2)
    four = FOUND.costs(4)
    assert four.round == pytest.approx(1e-9 + 3e-10)
    assert four.gradient == pytest.approx(5e-10 + 2e-10)
    assert four.step == pytest.approx(0.02)
    assert four.merge == FOUND.merge


def test_exchanges_find_the_cores_that_steps_leave() -> None:
    four = FOUND.costs(4)
    assert four.cores == 0.5
    assert four.machine_cores == 2
    assert four.busy == pytest.approx(0.2)
    assert four.lattice == FOUND.lattice
    # All that an exchange takes is three and a half times its arithmetic.
    assert four.work == pytest.approx(3.5 * FOUND.exchange)
    assert replace(FOUND, step_seconds=None).costs(4).busy == 0


def test_a_machine_has_a_learner() -> None:
    with pytest.raises(ValueError, match="`learners_per_machine` must be at least 1"):
        FOUND.costs(0)


def test_no_more_is_repeated_than_there_is() -> None:
    quick = replace(FOUND, round=1e-11, gradient=0.0)
    assert quick.costs(4).round == pytest.approx(2e-11)
    assert quick.costs(4).gradient == 0


def test_each_kind_of_arithmetic_takes_time() -> None:
    found = measure_arithmetic(8 << 20)
    # A merge is a difference of two durations.
    assert 0 <= found.pop("merge") < 1e-3
    assert found.keys() == {"copy", "exchange", "lattice"}
    assert all(0 < seconds < 1e-3 for seconds in found.values())  # of a byte


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bandwidth", 0, "`bandwidth` must be positive and finite, got 0"),
        ("latency", -1, "`latency` must be at least 0 and finite, got -1"),
        ("cores", "two", "`cores` must be a number, positive, got 'two' of type str"),
        ("merge", True, "`merge` must be a number, at least 0, got True of type bool"),
        ("bandwidth", None, "`bandwidth` must be a number, positive, got None"),
        ("cores", None, "`cores` must be a number, positive, got None"),
        (
            "step_processor_seconds",
            None,
            "`step_processor_seconds` must be a number, at least 0, got None",
        ),
        ("colour", 1, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_bad_number_is_named_with_its_file(
    name: str, value: object, message: str, file: Path
) -> None:
    file.write_text(json.dumps({**asdict(FOUND), name: value}, indent=1))
    with pytest.raises(
        ValueError, match=f"machine.json is not a calibration: .*{message}"
    ):
        read(file)


def test_a_file_that_is_not_whole_is_refused(file: Path) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:4]))
    with pytest.raises(
        ValueError, match=r"machine\.json is not a calibration: .*line 4"
    ):
        read(file)
    file.write_text("[1]")
    with pytest.raises(
        ValueError, match=r"machine\.json is not a calibration: .*mapping"
    ):
        read(file)
    file.write_text('{\n "bandwidth": 1\n}\n')
    with pytest.raises(ValueError, match=r"missing .* arguments: .*'copy'"):
        read(file)


def test_a_step_that_was_not_measured_may_be_null(tmp_path: Path) -> None:
    unmeasured = replace(FOUND, step_seconds=None)
    assert read(unmeasured.write(tmp_path / "machine.json")) == unmeasured


def test_a_file_that_is_no_text_is_named(file: Path) -> None:
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(
        ValueError, match=r"machine\.json is not a calibration: 'utf-8' codec"
    ):
        read(file)


# --- the command line


def predict(file: Path, *words: str) -> int:
    return command_line.main(["predict", "--calibration", str(file), *words])


def test_a_prediction_is_a_table(file: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--learners", "4", "--gbit", "1000", "--local-batch", "10"]
    assert predict(file, *words, "--samples", "1.44e6") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["samples/s", "steps/s"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert list(cells) == ["ddp", "sync", "delay_by_one", "async"]
    # Merges take 2e-10 seconds a byte of a tenth of a second.
    speed = float(cells["async"][0].replace(",", ""))
    assert 400 / (1 + 172.6e6 * 2e-10 / 0.1) - 1 < speed <= 400
    assert float(cells["async"][-1]) == pytest.approx(1.44e6 / speed / 3600, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sent_as"),
    [
        ([], "float32"),
        (["--gbit", "2"], "int8"),
        (["--wire-dtype", "auto", "--gbit", "1"], "int4"),
        (["--wire-dtype", "int4"], "int4"),
        (["--wire-dtype", "float32", "--gbit", "1"], "float32"),
    ],
)
def test_what_a_weight_is_sent_as_is_in_the_table(
    words: list[str], sent_as: str, file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert predict(file, "--learners", "4", "--weight-mb", "40", *words) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    wires = {name: cells[-1] for name, *cells in rows}
    assert wires == {**dict.fromkeys(wires, "float32"), "async": sent_as}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learners", "6", "--super-learner-size", "4"], "must divide `--learners`"),
        (["--learners", "0"], "`--learners` must be at least 1, got 0"),
        (
            ["--learners", "4", "--super-learner-size", "0"],
            "`--super-learner-size` must be at least 1, got 0",
        ),
        (
            ["--learners", "4", "--learners-per-machine", "0"],
            "`--learners-per-machine` must be at least 1, got 0",
        ),
        (
            ["--learners", "4", "--step-s", "0"],
            "`--step-s` must be positive and finite",
        ),
        (
            ["--learners", "4", "--samples", "-5"],
            "`--samples` must be positive and finite, got -5.0",
        ),
        (
            ["--learners", "4", "--samples", "nan"],
            "`--samples` must be positive and finite, got nan",
        ),
        (
            ["--learners", "4", "--weight-mb", "-1"],
            "`--weight-mb` must be positive and finite, got -1.0",
        ),
        (
            ["--learners", "4", "--local-batch", "0"],
            "`--local-batch` must be positive and finite, got 0",
        ),
        (["--learners", "4", "--gbit", "-1"], "`--gbit` must be positive, got -1.0"),
        (
            ["--learners", "4", "--inner-gbit", "0"],
            "`--inner-gbit` must be positive, got 0.0",
        ),
        (
            ["--learners", "4", "--slow", "0"],
            "`--slow` must be positive and finite, got 0.0",
        ),
        (
            ["--learners", "4", "--spread", "-1"],
            "`--spread` must be at least 0 and finite, got -1.0",
        ),
    ],
)
def test_an_error_is_one_line(
    words: list[str], message: str, file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert predict(file, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_step_of_no_time_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture,
) -> None:
    assert command_line.main(["calibrate", "--step-s", "0"]) == 2
    assert "`--step-s` must be positive and finite" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["inf", "nan", "-1", "0", "1e-7", "1e300"])
@pytest.mark.parametrize("master", [[], ["--master", "127.0.0.1:1", "--rank", "1"]])
def test_weights_that_cannot_be_measured_are_refused_at_once(
    size: str,
    master: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    # Without it, a measurement would begin, and wait for another process.
    monkeypatch.setattr(calibration.dist, "init_process_group", pytest.fail)
    monkeypatch.setattr(calibration, "spawn", pytest.fail)
    assert command_line.main(["calibrate", f"--weight-mb={size}", *master]) == 2
    error = capsys.readouterr().err
    assert "`--weight-mb` must be from 0.001 to 1e+06, got " in error
    assert f"got {float(size)}" in error


def dies_or_waits(rank: int, *_: object) -> None:
    if rank:
        os._exit(3)
    threading.Event().wait(PATIENCE_S)
    raise AssertionError("waited for the dead process")


def test_a_dead_process_at_the_other_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As torch would, for five minutes."""
    monkeypatch.setattr(calibration, "_measure_end", dies_or_waits)
    assert command_line.main(["calibrate"]) == 2
    assert "process 1 terminated with exit code 3" in capsys.readouterr().err


def waits_on(rank: int, *_: object) -> None:
    """As within torch's code, which no interrupt ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(rank, flush=True)
    threading.Event().wait(PATIENCE_S)
    print("has not been ended", flush=True)


def calibrate_with_ends_that_wait() -> None:
    calibration._measure_end = waits_on
    command_line.main(["calibrate"])


def test_an_interrupt_of_the_command_alone_ends_its_processes() -> None:
    code = f"from {__name__} import *; calibrate_with_ends_that_wait()"
    words = [warm.python(), "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert sorted(command.stdout.read(4)) == ["\n", "\n", "0", "1"]
        command.send_signal(signal.SIGINT)
        assert command.stdout.read() == ""
        assert command.wait(PATIENCE_S) == -signal.SIGINT


def test_another_step_keeps_as_many_cores_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def table(found: Calibration, *words: str) -> str:
        words = ("--learners", "4", "--learners-per-machine", "4", *words)
        assert predict(found.write(tmp_path / "machine.json"), *words) == 0
        return capsys.readouterr().out

    third = replace(FOUND, step_seconds=0.3, step_processor_seconds=0.06)
    assert table(FOUND, "--step-s", "0.3") == table(third)
    unknown = replace(FOUND, step_seconds=None, step_processor_seconds=0.0)
    assert unknown.with_step(0.3) == replace(unknown, step_seconds=0.3)


def test_what_cannot_be_predicted_hides_no_other_row(
    file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert predict(file, "--learners", "64", "--topology", "complete") == 0
    out, err = capsys.readouterr()
    rows = [row.split()[0] for row in out.splitlines()[1:]]
    assert rows == ["ddp", "sync", "delay_by_one"]
    assert err.startswith("note: no async: ")
    assert "at most 32 super-learners, got 64" in err
    assert len(err.splitlines()) == 1


def test_a_missing_step_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = replace(FOUND, step_seconds=None).write(tmp_path / "machine.json")
    assert predict(file, "--learners", "4") == 2
    assert "Give `--step-s`" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert predict(tmp_path / "none.json", "--learners", "4") == 2
    assert "none.json" in capsys.readouterr().err


def test_processor_seconds_are_of_a_step_whose_seconds_are_known(
    capsys: pytest.CaptureFixture,
) -> None:
    assert command_line.main(["calibrate", "--step-processor-s", "0.1"]) == 2
    assert "`--step-s` must be given with" in capsys.readouterr().err
    words = ["calibrate", "--step-s", "0.2", "--step-processor-s", "-1"]
    assert command_line.main(words) == 2
    assert "`--step-processor-s` must be at least 0" in capsys.readouterr().err


def test_the_second_machine_needs_the_address_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    # Without the check, this machine's loopback would be measured for nobody.
    monkeypatch.setattr(calibration, "measure_loopback", pytest.fail)
    assert command_line.main(["calibrate", "--rank", "1"]) == 2
    assert "`--master` must be given with `--rank 1`" in capsys.readouterr().err


def test_steps_that_share_a_machine_are_said_to_keep_no_core_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = replace(FOUND, step_processor_seconds=0.0).write(tmp_path / "machine.json")
    words = ["--learners", "2", "--weight-mb", "1"]
    assert predict(file, *words) == 0
    assert capsys.readouterr().err == ""
    assert predict(file, *words, "--learners-per-machine", "2") == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: ")
    assert "machine.json has no processor seconds of a step" in note
    assert predict(FOUND.write(file), *words, "--learners-per-machine", "2") == 0
    assert capsys.readouterr().err == ""
