"""Checkpoints, evaluation, compilation, Fabric and shards on GPU 0.

Without a GPU one program runs on the CPU, so that it is known. Other folders have tests
of the same on the CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.jobs import NEEDS_GPU, Ended, finish, start_all
from tests.helpers import num_gpus
from tests.islands.archipelago import rendezvous

ACCELERATOR = "cuda" if num_gpus() else "cpu"


def run(program: str, num: int = 2, **told: Any) -> Ended:
    """What the learners of a program end with."""
    strategy = told.pop("strategy", {})
    job = {
        "program": program,
        "accelerator": ACCELERATOR,
        "num_learners": num,
        "strategy": strategy,
        **told,
    }
    return finish(start_all("tests.gpu.trainings", job, num))


@NEEDS_GPU
@pytest.mark.parametrize("communication", ["sync", "delay_by_one"])
def test_a_resume_equals_the_run_that_was_not_interrupted(
    communication: str, tmp_path: Path
) -> None:
    options = {"communication": communication, "save_learners": True}
    told = {"path": str(tmp_path / "a.ckpt"), "strategy": options}
    whole = run("resumed", goes_on=False, **told)
    rest = run("resumed", goes_on=True, **told)
    for before, after in zip(whole, rest, strict=True):
        trajectory = after["trajectory"]
        assert list(trajectory) == [str(n) for n in range(6, 13)]
        assert all(before["trajectory"][n] == trajectory[n] for n in trajectory)


@pytest.mark.parametrize(
    "told",
    [
        {},
        pytest.param({"clip": 0.5}, marks=NEEDS_GPU),
        pytest.param({"precision": "bf16-mixed"}, marks=NEEDS_GPU),
        pytest.param({"strategy": {"super_learner_size": 2}}, marks=NEEDS_GPU),
        pytest.param({"strategy": {"after_evaluation": "adopt"}}, marks=NEEDS_GPU),
    ],
    ids=str,
)
def test_all_learners_evaluate_the_same_model(told: dict[str, Any]) -> None:
    first, second = run("validated", **told)
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-6)
    assert len(first["losses"]) == 3
    assert first["steps"] == 12


@NEEDS_GPU
def test_a_compiled_module_trains() -> None:
    plain, _ = run("validated", strategy={"communication": "sync"})
    told = {"strategy": {"communication": "sync"}, "compiled": True}
    compiled, _ = run("validated", **told)
    # Compiled dropout draws other numbers.
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=0.1)


@NEEDS_GPU
def test_fabric_ends_in_one_model() -> None:
    first, second = run("by_fabric")
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-5)
    assert first["device"].startswith(ACCELERATOR)


@NEEDS_GPU
@pytest.mark.parametrize("communication", ["async", "sync"])
def test_shards_end_in_one_model(communication: str) -> None:
    told = {"communication": communication, "topology": "complete"}
    backend = "nccl" if ACCELERATOR == "cuda" else "gloo"
    options = {**told, "process_group_backend": backend}
    ended = run("sharded", 4, strategy=options)
    weights = [torch.tensor(learner["weights"]) for learner in ended]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-5, atol=1e-6)
    assert all(learner["steps"] == 4 for learner in ended)


@NEEDS_GPU
def test_islands_exchange_on_a_gpu() -> None:
    with rendezvous() as server:
        url = f"tcp://{server.address.host}:{server.address.port}/job"
        ended = run("island", strategy={"islands": url})
    assert all(learner["exchanges"] > 0 for learner in ended)
    assert all(torch.tensor(learner["last"]).isfinite().all() for learner in ended)
