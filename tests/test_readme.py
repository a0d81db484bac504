import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _first_block() -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hadpsgd", "adpsgd"])
def test_the_readmes_program_trains_in_an_empty_folder(
    name: str, tmp_path: Path
) -> None:
    program = _first_block().replace('"hadpsgd"', f'"{name}"')
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "`max_epochs=5` reached" in done.stderr
