import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import PROGRAM_S, free_port

ROOT = Path(__file__).parents[1]


def _first_block(page: str) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[0]


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()),
        },
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_readmes_program_trains_in_an_empty_folder(tmp_path: Path) -> None:
    done = _run(_first_block("README.md"), tmp_path)
    assert "`max_epochs=5` reached" in done.stderr


@pytest.mark.slow
def test_the_program_for_fabric_trains_in_an_empty_folder(tmp_path: Path) -> None:
    done = _run(_first_block("docs/fabric.md"), tmp_path)
    assert done.stdout.count("validation loss") == 5
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    # It learns the sum of its features.
    expected = torch.ones(1, 8)
    torch.testing.assert_close(saved["model"]["weight"], expected, atol=0.05, rtol=0)


@pytest.mark.slow
def test_the_page_on_monitoring_shows_what_a_run_came_to(tmp_path: Path) -> None:
    done = _run(_first_block("docs/monitoring.md"), tmp_path)
    # Both learners write to one output, and one of them draws progress bars there.
    losses = re.findall(r"adpsgd 64 ([\d.]+) False", done.stdout)
    assert losses, done.stdout
    assert float(losses[-1]) < 1
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs/monitoring.md").read_text()
    _run(re.findall(r"```python\n(.*?)```", page, re.S)[1], tmp_path)
    assert (tmp_path / "loss_against_batch.png").stat().st_size > 0
