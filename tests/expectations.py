"""What processes must come to, whichever face of the strategy they train by.

Results are of one training of a few steps: for each learner its weights after every
step, [steps, 3], and at the end those of the consensus, [3].
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_adpsgd.reference import delay_by_one, synchronous
from tests.helpers import Outcome, mixing_of, take_first
from tests.learners import LR, Rows, consensus_after

Results = Sequence[tuple[Tensor, Tensor]]

MODES = [
    ("ring", "sync", 1),
    ("complete", "delay_by_one", 1),
    ("ring", "async", 1),
    ("ring", "async", 2),
]
"""Topology, communication, and learners of a super-learner, of four that train."""


def gradients_of(num_rows: int, num: int) -> list[Tensor]:
    """Rows of step k in learner i, as `loader` deals them: [num, 3] each."""
    return list(Rows(num_rows).rows.split(num))


def expect_oracle(results: Results, oracle: Iterator[Tensor]) -> None:
    """After each of five steps all have the weights of the oracle, [num, 3]."""
    found = torch.stack([trajectory for trajectory, _ in results], dim=1)
    torch.testing.assert_close(
        found, torch.stack(take_first(oracle, 5)), atol=1e-12, rtol=0
    )


def expect_consensus(results: Results, expected: Tensor) -> None:
    """All end with that mean."""
    for _, final in results:
        torch.testing.assert_close(final, expected, atol=1e-12, rtol=0)


def expect_matrices(
    results: Results,
    topology: str,
    order: Literal["step_then_average", "average_then_step"],
) -> None:
    """Three learners, with fixed gradients of 15 rows, went by the mixing matrices."""
    start, batches = torch.zeros(3, 3, dtype=torch.float64), gradients_of(15, 3)
    mixing = mixing_of(topology, 3)
    oracle = synchronous(start, lambda w, k: batches[k], mixing, LR, order)
    expect_oracle(results, oracle)


def expect_delay_by_one(results: Results) -> None:
    """Three learners went down a bowl, each step from the mean of the last weights."""
    start, batches = torch.zeros(3, 3, dtype=torch.float64), gradients_of(15, 3)
    bowl = lambda w, k: 2 / 3 * (w - batches[k])  # noqa: E731
    expect_oracle(results, delay_by_one(start, bowl, mixing_of("complete", 3), LR))


def expect_super_learners_of_two(results: Results) -> None:
    """Of four learners two each were equal at all steps, and kept the mean of 40."""
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(results[first][0], results[second][0])
    assert not torch.equal(results[0][0], results[2][0])
    expect_consensus(results, consensus_after(40, 4))


# --- the ends of learners


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("the answer is 42")


def leave() -> None:
    raise SystemExit(3)


def expect_ends(
    outcomes: Sequence[Outcome], rank: int, action: Callable[[], Any]
) -> None:
    """One of them was killed, or else failed; all others failed."""
    for own, outcome in enumerate(outcomes):
        if own == rank and action is kill:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.exit_code > 0


def expect_error_named(outcomes: Sequence[Outcome], rank: int) -> None:
    """`raise_error` in one learner ended all four, and they say whose it was."""
    assert "ValueError: the answer is 42" in outcomes[rank].error
    if rank:
        message = rf"learner {rank} on host \S+ raised ValueError: the answer is 42"
        assert re.search(message, outcomes[0].error)
    for other in {1, 2, 3} - {rank}:
        assert "LearnerFollows" in outcomes[other].error


def expect_death_named(outcomes: Sequence[Outcome]) -> None:
    """Learner 2 was killed, and the first one says so."""
    names = ["learner 2", "learner [2]", "[2, 3]"]
    assert any(name in outcomes[0].error for name in names)
