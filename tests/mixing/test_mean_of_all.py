"""The mean over all learners, against arithmetic, whole and on a lattice."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.mixing import mean_of_all
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.mean_of_all import average_shards, average_whole
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import Span
from tests.helpers import PATIENCE, forked, random_rows

ROWS = random_rows(3, length=10)


def averaged(folder: Path, rank: int, diverged: int | None) -> Any:
    """The consensus, the weights after it, and what was said."""
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=3, rank=rank)
    rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]
    mean_of_all._CHUNK = 4  # so that there are several, and a shorter one
    row = ROWS[rank].clone()
    if rank == diverged:
        row[7] = float("nan")
    vectors = [row[:6].clone(), row[6:].clone()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained = [vector.clone() for vector in vectors]
        found = average_whole(vectors, trained, Partition((1, 1, 1)))
    return found, torch.cat(vectors).tolist(), [str(one.message) for one in told]


@pytest.mark.parametrize("diverged", [None, 1])
def test_the_mean_is_that_of_all_whose_weights_are_finite(
    tmp_path: Path, diverged: int | None
) -> None:
    outcomes = forked(3, lambda rank: averaged(tmp_path, rank, diverged))
    rows = ROWS[[n for n in range(3) if n != diverged]]
    mean = rows.mean(0)
    distance = float((rows - mean).square().sum(1).mean().sqrt())
    for rank, outcome in enumerate(outcomes):
        found, weights, told = outcome.value
        assert ["learners [1] are infinite" in one for one in told] == (
            [True] if rank == 0 and diverged is not None else []
        )
        assert weights == pytest.approx(mean.tolist())
        assert found.distance == pytest.approx(distance)
        assert found.relative_distance == pytest.approx(distance / float(mean.norm()))


def test_a_learner_alone_is_its_own_mean() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert average_whole([], [], Partition((1,))) == Consensus(0.0, 0.0)
        group = dist.distributed_c10d._get_default_group()
        row, buffer = ROWS[0].clone(), torch.tensor([4.0])
        alone = SuperLearnerGroup(holds_all=False), Partition((1,))
        both = [row, buffer], [row + 1, buffer]
        found = average_shards(*both, *alone, [group], [buffer], PATIENCE)
        assert (row.tolist(), buffer.tolist()) == (ROWS[0].tolist(), [4.0])
        assert found.distance == pytest.approx(10**0.5)
        with pytest.raises(FloatingPointError, match="weights of all learners are"):
            average_whole([row * float("inf")], [row], Partition((1,)))
    finally:
        dist.destroy_process_group()


NUM = 150_000
UNTRAINED = slice(5000, 5100)
SPANS = [Span(5000, True), Span(100, False), Span(NUM - 5100, True)]


@pytest.fixture
def bytes_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each all-reduce."""
    sent, really = list[int](), dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> object:
        sent.append(tensor.nbytes)
        return really(tensor, *arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", counted)
    return sent


@pytest.mark.parametrize(
    ("millions", "num_messages", "longest"), [(0.5, 1, 0.5), (3, 3, 1), (16, 8, 2)]
)
def test_learners_that_shard_send_a_share_of_their_weights_at_once(
    bytes_sent: list[int], millions: float, num_messages: int, longest: float
) -> None:
    """Near the limit of their memory, they have none for a copy of all."""
    number = int(millions * 2**20)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        vectors = [torch.ones(number // 2), torch.ones(number - number // 2)]
        alone = SuperLearnerGroup(holds_all=False), Partition((1,))
        group = dist.distributed_c10d._get_default_group()
        average_shards(vectors, vectors, *alone, [group], [], PATIENCE)
        average_whole(vectors, vectors, Partition((1,)))
    finally:
        dist.destroy_process_group()
    for_whole = max(1, number // 2**22)
    of_shards, of_whole = bytes_sent[:-for_whole], bytes_sent[-for_whole:]
    assert len(of_shards) == num_messages
    assert max(of_shards) == 4 * longest * 2**20
    assert sum(of_shards) == sum(of_whole) == 4 * number


def weights_of(rank: int) -> Tensor:
    """Weights near those of other ranks; where they are not trained, the same."""
    everyones = torch.randn(NUM, generator=torch.Generator().manual_seed(0))
    own = torch.randn(NUM, generator=torch.Generator().manual_seed(rank + 1))
    own[UNTRAINED] = 0
    return everyones + 0.01 * own


def mean_over_slow_link(
    folder: Path, rank: int, partition: Partition, row: Tensor, **link: Any
) -> tuple[Tensor, Consensus]:
    num = partition.num_learners
    dist.init_process_group("gloo", f"file://{folder}/s", world_size=num, rank=rank)
    rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]
    vectors = [row.clone()]
    is_slow = link.get("is_slow", lambda: rank == 1)
    spans = lambda: [link.get("spans", SPANS)]  # noqa: E731
    found = average_whole(vectors, [row], partition, is_slow, spans)
    return vectors[0], found


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_over_one_slow_link_a_mean_takes_a_byte_for_each_weight(
    tmp_path: Path, bytes_sent: list[int], sizes: tuple[int, ...]
) -> None:
    partition = Partition(sizes)

    def program(rank: int) -> tuple[Tensor, Consensus, int]:
        row = weights_of(partition.super_learner(rank))
        mean = mean_over_slow_link(tmp_path, rank, partition, row)
        return *mean, sum(bytes_sent)

    outcomes = [one.value for one in forked(3, program)]
    rows = torch.stack([weights_of(n).double() for n in range(len(sizes))])
    exact, kept = rows.mean(0), weights_of(0)[UNTRAINED]
    distance = (rows - exact).square().sum(1).mean().sqrt().item()
    for mean, consensus, num_bytes in outcomes:
        assert torch.equal(mean, outcomes[0][0])
        assert 0 < (mean - exact).square().mean().sqrt() < 0.001
        # As precise as a sum in float32.
        torch.testing.assert_close(mean[UNTRAINED], kept, rtol=2e-7, atol=0.0)
        assert consensus.distance == pytest.approx(distance, rel=0.01)
        assert num_bytes < 1.2 * NUM


WHOLE: dict[str, Callable[[int], dict[str, Any]]] = {
    "no slow link": lambda rank: {"is_slow": lambda: False},
    "a NaN": lambda rank: {"row": weights_of(rank).index_fill_(0, NANS[rank], 1e999)},
    "another is frozen": lambda rank: {"spans": [SPANS, SPANS[::-1]][rank // 2]},
    "all is frozen": lambda rank: {"spans": [Span(NUM, False)]},
    "many biases": lambda rank: {"spans": [Span(1000, True)] * (NUM // 1000)},
}
NANS = [torch.tensor(places, dtype=torch.int64) for places in ([], [5], [])]


@pytest.mark.parametrize("name", WHOLE)
def test_a_mean_is_exact_where_few_bits_do_not_fit(tmp_path: Path, name: str) -> None:
    def program(rank: int) -> Tensor:
        case = {"row": weights_of(rank), **WHOLE[name](rank)}
        return mean_over_slow_link(tmp_path, rank, Partition((1, 1, 1)), **case)[0]

    means = [one.value for one in forked(3, program)]
    rows = [WHOLE[name](rank).get("row", weights_of(rank)) for rank in range(3)]
    finite = torch.stack([row.double() for row in rows if row.isfinite().all()])
    for mean in means:
        torch.testing.assert_close(mean, finite.mean(0).float(), rtol=1e-6, atol=1e-7)


def test_no_weight_is_rounded_on_the_scale_of_another(tmp_path: Path) -> None:
    small = slice(0, SPANS[0].length)

    def row_of(rank: int) -> Tensor:
        row = weights_of(rank)
        row[small] = 1e-3 + 1e-6 * row[small]
        row[UNTRAINED] = -1e9
        return row

    def program(rank: int) -> Tensor:
        partition = Partition((1, 1, 1))
        return mean_over_slow_link(tmp_path, rank, partition, row_of(rank))[0]

    exact = torch.stack([row_of(rank).double() for rank in range(3)]).mean(0)
    for one in forked(3, program):
        error = (one.value - exact).abs()
        assert error[small].max() < 1e-8
        assert error[UNTRAINED].max() == 0
        assert error.max() < 0.01


def test_all_is_written_before_the_last_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A learner that leaves it first may ask another for its weights.
    def program(rank: int) -> tuple[Tensor, Tensor]:
        dist.init_process_group("gloo", f"file://{tmp_path}/s", world_size=2, rank=rank)
        vector, at_last = weights_of(rank), list[Tensor]()
        vector[UNTRAINED] += rank

        def noted(really: Any, *arguments: Any, **options: Any) -> object:
            at_last[:] = [vector.clone()]
            return really(*arguments, **options)

        for name in ("all_reduce", "all_gather"):
            monkeypatch.setattr(dist, name, partial(noted, getattr(dist, name)))
        link, local = (lambda: True, lambda: [SPANS]), [vector.clone()]
        average_whole([vector], local, Partition((1, 1)), *link)
        return at_last[0], vector

    for one in forked(2, program):
        torch.testing.assert_close(*one.value, rtol=0.0, atol=0.0)
