"""Lightning inside Ray Train with this strategy, on a local cluster of Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import PROGRAM_S
from tests.pages.blocks import programs

pytest.importorskip("ray", reason="pip install 'ray[train]', see docs/clusters.md")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_program_for_ray_gossips_in_two_workers(tmp_path: Path) -> None:
    (program,) = programs(ROOT / "docs" / "clusters.md", "Ray Train")
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),  # where Ray keeps results
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # On a busy machine its processes take longer than Ray expects.
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_worker_register_timeout_seconds": "300",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        },
        capture_output=True,
        text=True,
        timeout=2 * PROGRAM_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    counts = re.findall(r"learner ([01]): (\d+) exchanges", said)
    # What workers print may come twice.
    assert {learner for learner, _ in counts} == {"0", "1"}
    assert all(int(count) > 0 for _, count in counts)
    (loss,) = re.findall(r"validation loss (\S+)", done.stdout)
    assert float(loss) < 5
    assert "saved layer.weight layer.bias" in done.stdout
