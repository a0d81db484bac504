"""The strategy on GPUs, in real processes; on the CPU once, so that the test is known.

The mean of all learners is known exactly, as in `test_strategy_integration`.
"""

from typing import Any

import pytest

from tests.gpu.jobs import (
    NEEDS_GPU,
    NEEDS_TWO,
    PER_LEARNER,
    assert_consensus,
    fit,
)

COMMUNICATIONS = ["async", "sync", "delay_by_one"]


def test_two_learners_of_two_hosts_on_the_cpu() -> None:
    ended = fit("cpu")
    assert_consensus(ended)
    assert all(learner["device"] == "cpu" for learner in ended)


@NEEDS_GPU
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16", "int8", "int4"])
def test_gossip_on_a_gpu_ends_in_the_mean(wire_dtype: str | None) -> None:
    ended = fit("cuda", wire_dtype=wire_dtype)
    assert_consensus(ended)
    assert all(learner["device"] == "cuda:0" for learner in ended)
    assert sum(learner["exchanges"] for learner in ended) > 0


@NEEDS_GPU
@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
@pytest.mark.parametrize("num_learners", [2, 3])
def test_gossip_on_a_gpu_in_both_orders(order: str, num_learners: int) -> None:
    assert_consensus(fit("cuda", num_learners, order=order))


@NEEDS_GPU
@pytest.mark.parametrize("topology", ["random_pairs", "complete"])
def test_other_topologies_on_a_gpu(topology: str) -> None:
    assert_consensus(fit("cuda", 3, topology=topology))


@NEEDS_GPU
def test_pairs_that_are_ready_on_a_gpu() -> None:
    ended = fit("cuda", 3, communication="ready_pairs", topology="random_pairs")
    assert_consensus(ended)


@NEEDS_GPU
@pytest.mark.parametrize(
    ("precision", "scale", "tolerance"),
    [("bf16-mixed", None, 0.05), ("16-mixed", 1.0, 0.01)],
)
def test_mixed_precision_on_a_gpu(
    precision: str, scale: float | None, tolerance: float
) -> None:
    assert_consensus(fit("cuda", precision=precision, scale=scale), tolerance)


@NEEDS_GPU
def test_learners_agree_where_a_scaler_skips_their_steps() -> None:
    # At the scale that Lightning begins with, the first gradients overflow.
    first, second = fit("cuda", precision="16-mixed")
    assert first["weight"] == pytest.approx(second["weight"], abs=1e-5)
    assert any(abs(weight) > 0.01 for weight in first["weight"])
    assert first["steps"] == second["steps"] == PER_LEARNER


@NEEDS_GPU
@pytest.mark.parametrize("communication", ["sync", "delay_by_one"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_rounds_on_a_gpu_over_the_host(communication: str, topology: str) -> None:
    assert_consensus(fit("cuda", 3, communication=communication, topology=topology))


@NEEDS_GPU
@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_super_learners_of_two_on_one_gpu(communication: str) -> None:
    ended = fit("cuda", 4, super_learner_size=2, communication=communication)
    assert_consensus(ended)


@NEEDS_GPU
@pytest.mark.parametrize("communication", COMMUNICATIONS)
@pytest.mark.parametrize("topology", ["ring", "complete", "random_pairs"])
def test_learners_over_nccl_on_one_gpu(communication: str, topology: str) -> None:
    dials: dict[str, Any] = {"communication": communication, "topology": topology}
    assert_consensus(fit("cuda", 3, nccl=True, **dials))


@NEEDS_GPU
@pytest.mark.parametrize(
    ("communication", "order"),
    [
        ("async", "step_then_average"),
        ("async", "average_then_step"),
        ("sync", "step_then_average"),
        ("sync", "average_then_step"),
        ("delay_by_one", "average_then_step"),
    ],
)
def test_super_learners_of_two_over_nccl_on_one_gpu(
    communication: str, order: str
) -> None:
    dials: dict[str, Any] = {"communication": communication, "order": order}
    assert_consensus(fit("cuda", 4, nccl=True, super_learner_size=2, **dials))


@NEEDS_GPU
def test_one_learner_alone_on_a_gpu() -> None:
    assert_consensus(fit("cuda", 1, nccl=True))


@NEEDS_TWO
@pytest.mark.parametrize("communication", COMMUNICATIONS)
@pytest.mark.parametrize("topology", ["ring", "complete", "random_pairs"])
def test_a_gpu_for_each_learner_over_nccl(communication: str, topology: str) -> None:
    dials: dict[str, Any] = {"communication": communication, "topology": topology}
    assert_consensus(fit("cuda", own_device=True, **dials))
