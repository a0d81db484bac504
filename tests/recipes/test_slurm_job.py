"""The job file of SWB-2000, with stand-ins for SLURM's programs.

They start the tasks of a step and note what they are asked for, as SLURM would do it.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from recipes.swb2000.__main__ import main as swb2000
from tests import warm

JOB = Path(__file__).parents[2] / "recipes" / "swb2000" / "slurm.sh"
NUM_NODES = 2
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$BIN/srun.options"; shift; done
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
SCONTROL = """#!/bin/bash
echo "$*" >> "$BIN/scontrol.calls"
"""
FAILS = """#!/bin/bash
exit 3
"""
Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Runs the job file, with these programs as SLURM's and as `python`."""
    shim = f'#!/bin/sh\nexec "{warm.python()}" "$@"\n'
    (tmp_path / "bin").mkdir()

    def submits(
        *arguments: str, srun: str = SRUN, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        programs = {"srun": srun, "scontrol": SCONTROL, "python": shim}
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        job = {
            "BIN": str(tmp_path / "bin"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": str(NUM_NODES),
            "SLURM_NTASKS": str(NUM_NODES),
            "OUT": str(tmp_path / "out"),
            "TQDM_DISABLE": "1",
        }
        return subprocess.run(
            ["bash", str(JOB), *arguments],
            env={**os.environ, **job, **variables},
            cwd=JOB.parents[2],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return submits


def discs_of(corpus: Path) -> dict[str, str]:
    """Where the job file looks for each kind of disc."""

    def named(*names: str) -> str:
        return " ".join(str(corpus / name) for name in names)

    return {
        "SWB": named("LDC97S62"),
        "FISHER": named("LDC2004S13", "LDC2004T19"),
        "CALLHOME": named("LDC97S42", "LDC97T14"),
        "HUB5": named("LDC2002S09", "LDC2002T43"),
    }


@pytest.mark.slow
def test_the_tasks_of_a_step_share_the_stages(submit, discs: Path, tmp_path: Path):
    few = ("--set", "prepare.dev_utterances=6", "--to", "features")
    few += ("--learners", "1", "--cores", "1", "--super-learners")
    ended = submit(*few, str(NUM_NODES), **discs_of(discs))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    options = (tmp_path / "bin/srun.options").read_text().split()
    assert options == ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    assert not (tmp_path / "bin/scontrol.calls").exists()

    alone = ("--corpus", str(discs), "--out", str(tmp_path / "alone"))
    assert swb2000([*alone, *few, "1"]) == 0
    exp = [tmp_path / name / "exp" for name in ("out", "alone")]
    together, single = (read_utterances(e / "prepare/train.jsonl") for e in exp)
    assert [u.id for u in together] == [u.id for u in single]
    ours, theirs = (np.load(e / "features/train/frames.npy") for e in exp)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("restarts", "calls"), [(None, 1), ("19", 1), ("20", 0)])
def test_a_job_that_ends_early_is_queued_again_but_not_for_ever(
    submit, tmp_path: Path, restarts: str | None, calls: int
):
    before = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    ended = submit(srun=FAILS, **before, **discs_of(tmp_path))
    assert ended.returncode == 1
    noted = tmp_path / "bin/scontrol.calls"
    assert (noted.read_text() if noted.exists() else "") == "requeue 7\n" * calls


def test_a_job_without_its_folders_stops_before_the_step(submit, tmp_path: Path):
    ended = submit(srun=FAILS, SWB="", FISHER="f", CALLHOME="c", HUB5="h")
    assert ended.returncode != 0
    assert "SWB: parameter null or not set" in ended.stderr
    assert not (tmp_path / "bin/scontrol.calls").exists()


def test_the_job_asks_for_what_its_command_uses():
    text = JOB.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    tasks = int(asked["ntasks-per-node"])
    assert f"--learners {tasks} " in text
    assert int(asked["gpus-per-node"]) == tasks
    assert f"--cores {tasks * int(asked['cpus-per-task'])} " in text
    assert asked["distribution"] == "block"  # super-learners lie within nodes
