"""Two processes measure their loopback, by the command that users type."""

import subprocess
from pathlib import Path

from lightning_adpsgd import __main__ as command_line
from lightning_adpsgd.prediction.calibration import read
from tests import warm


def test_this_machine_is_measured_and_predicted_from(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    words = ["calibrate", "--out", str(file), "--weight-mb", "4"]
    words += ["--step-s", "0.1", "--step-processor-s", "0.08"]
    # Processes that begin from `python -m` find nothing in its own file.
    subprocess.run([warm.python(), "-m", "lightning_adpsgd", *words], check=True)
    found = read(file)
    assert found.bandwidth > 1e6
    assert 0 < found.latency < 1
    assert found.step_seconds == 0.1
    assert found.step_processor_seconds == 0.08
    words = ["predict", "--calibration", str(file), "--learners", "8"]
    assert command_line.main(words) == 0
