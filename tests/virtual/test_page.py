"""The program on the page of the virtual cluster runs and learns."""

import re
import subprocess
from pathlib import Path

from tests import warm
from tests.helpers import PROGRAM_S

ROOT = Path(__file__).parents[2]


def test_the_program_of_the_page_learns_in_an_empty_folder(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "virtual-cluster.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    done = subprocess.run(
        [warm.python(), "-c", program],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    loss, rate = re.findall(r"loss ([\d.]+), (\d+) samples", done.stdout)[0]
    assert float(loss) < 0.01
    # Fifteen learners at 16 samples in 0.1 s, and one at a fifth of that.
    assert abs(int(rate) - 15.2 * 160) < 0.05 * 15.2 * 160
    rows = (tmp_path / "run.csv").read_text().splitlines()
    assert len(rows) > 20
