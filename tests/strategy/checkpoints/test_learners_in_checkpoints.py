"""What a learner takes up from a checkpoint, without a training."""

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_adpsgd.mixing.consensus import Consensus, ConsensusModel
from lightning_adpsgd.strategy.checkpoints import contents
from lightning_adpsgd.strategy.checkpoints.contents import (
    Resumed,
    gather_learners,
    learner_of,
    place_in_epoch,
    resumed_from,
)
from lightning_adpsgd.strategy.job import BUFFERS, NAMESPACE, Job
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import FlatParameters

ALONE = Partition((1,))


def loops_of(processed: int, completed: int) -> dict[str, Any]:
    """The loops of a learner in its third epoch."""
    counts = {"started": 3, "processed": processed, "completed": completed}
    return {"fit_loop": {"epoch_progress": {"total": counts, "current": {**counts}}}}


def saved(num_super_learners: int, size: int) -> list[Any]:
    """As `gather_learners` keeps it; every value says whose it is."""
    return [
        {
            "states": [f"optimizer of {group}"],
            "learners": [
                {
                    "lightning": {"loops": loops_of(group, place)},
                    "place": {"num_samples": 0, "num_batches": place},
                }
                for place in range(size)
            ],
        }
        for group in range(num_super_learners)
    ]


@pytest.mark.parametrize("rank", range(4))
def test_each_learner_takes_up_its_own_state(rank: int) -> None:
    checkpoint = {NAMESPACE: saved(2, 2), f"{NAMESPACE}/samples": 12, "loops": {}}
    resumed = resumed_from(checkpoint, rank, Partition((2, 2)))
    group, place = divmod(rank, 2)
    assert resumed.place == {"num_samples": 0, "num_batches": place, "epoch": group}
    assert resumed.num_samples == 12
    assert checkpoint["optimizer_states"] == [f"optimizer of {group}"]
    assert checkpoint["loops"] == loops_of(group, place)


@pytest.mark.parametrize(
    ("processed", "completed", "num_batches", "epoch"),
    [
        (2, 2, 4, 2),  # within the epoch
        (3, 2, 4, 2),  # it was cut, in the hook of its end
        (3, 3, 4, 2),  # and after that
        (3, 2, 0, 3),  # it ended
    ],
)
def test_a_learner_goes_on_in_the_epoch_whose_batches_are_left(
    processed: int, completed: int, num_batches: int, epoch: int
) -> None:
    kept = saved(1, 1)
    (own,) = kept[0]["learners"]
    own["lightning"]["loops"] = loops_of(processed, completed)
    own["place"]["num_batches"] = num_batches
    checkpoint: dict[str, Any] = {NAMESPACE: kept}
    place = resumed_from(checkpoint, 0, ALONE).place
    assert place is not None
    assert place["epoch"] == epoch
    assert checkpoint["loops"] == loops_of(epoch, 2)


@pytest.mark.parametrize(
    "sizes", [(2,), (1, 1, 1, 1), (2, 2, 2, 2), (4,), (1, 3), (3, 1)]
)
def test_in_a_job_of_another_shape_all_start_from_the_mean(
    sizes: tuple[int, ...],
) -> None:
    assert learner_of(saved(2, 2), 0, Partition(sizes)) is None
    resumed = resumed_from({NAMESPACE: saved(2, 2)}, 0, Partition(sizes))
    assert resumed.learner is resumed.place is None


def test_a_checkpoint_that_keeps_no_learners_is_taken_up_as_it_is() -> None:
    checkpoint: dict[str, Any] = {"optimizer_states": [1]}
    resumed = resumed_from(checkpoint, 0, Partition((1, 1)))
    assert (resumed.learner, resumed.epoch, resumed.num_samples) == (None, None, 0)
    assert checkpoint == {"optimizer_states": [1]}


OF_FIVE = {"place": {"num_samples": 5}, "lightning": {"loops": loops_of(2, 2)}}


@pytest.mark.parametrize(
    ("learner", "is_first", "expected"),
    [
        (None, True, 12),  # of all learners that were, in one place
        (None, False, 0),
        ({"own": OF_FIVE}, True, 5),
        ({"own": OF_FIVE}, False, 5),
    ],
)
def test_the_samples_of_a_job_of_another_shape_are_counted_once(
    learner: dict[str, Any] | None, is_first: bool, expected: int
) -> None:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(is_global_zero=is_first, strategy=strategy)
    place = place_in_epoch(trainer, Resumed(learner, num_samples=12))
    assert place._num_samples == expected


@pytest.mark.parametrize(
    ("ready", "is_last", "within"),
    [(0, False, False), (1, False, True), (5, False, True), (5, True, False)],
)
def test_a_checkpoint_within_an_epoch_is_known_as_such(
    ready: int, is_last: bool, within: bool
) -> None:
    progress = {"current": {"ready": ready}, "is_last_batch": is_last}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    assert resumed_from({"loops": loops}, 0, ALONE).is_within_epoch == within


@pytest.mark.parametrize(("processed", "is_last"), [(4, False), (5, True)])
def test_the_last_batch_is_ahead_if_it_was_under_way(
    processed: int, is_last: bool
) -> None:
    """Lightning would end the epoch at once, and nobody train on that batch."""
    current = {"ready": 5, "processed": processed}
    progress = {"current": current, "is_last_batch": True}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    assert resumed_from({"loops": loops}, 0, ALONE).is_within_epoch != is_last
    assert progress["is_last_batch"] == is_last


def test_all_learners_go_by_the_epoch_of_learner_0() -> None:
    progress = {"current": {"ready": 3}, "is_last_batch": False}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    for rank in range(2):
        checkpoint = {NAMESPACE: saved(2, 1), "loops": loops}
        assert resumed_from(checkpoint, rank, Partition((1, 1))).is_within_epoch
        assert checkpoint["loops"] == loops_of(rank, 0)


PROGRESS = {"epoch_loop.batch_progress": {"current": {"ready": 3}}}


@pytest.mark.parametrize("loops", [{}, {"fit_loop": {}}, {"fit_loop": PROGRESS}])
def test_a_checkpoint_without_loops_is_of_no_epoch(loops: dict[str, Any]) -> None:
    assert not resumed_from({"loops": loops}, 0, ALONE).is_within_epoch
    assert not resumed_from({}, 0, ALONE).is_within_epoch


# --- weights of each learner


class Layers(nn.Module):
    """Linear layers of one shape, with names in an order."""

    def __init__(self, names: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2, dtype=dtype))


def job_of(module: nn.Module) -> Any:
    """What a job knows when it saves a learner and restores it."""
    flat = FlatParameters(module)
    return SimpleNamespace(
        flat=flat, partition=ALONE, _rank=0, _communication=None, _consensus=None
    )


def saved_of(module: nn.Module) -> dict[str, Any]:
    return {**Job.learner_state(job_of(module), [])}


def mean_of_fives(vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
    for vector in vectors:
        vector.fill_(5.0)
    return Consensus(0.0, 0.0)


@pytest.mark.parametrize(("adopts", "weight"), [(False, 1.0), (True, 5.0)])
def test_a_buffer_that_a_validation_assigns_is_saved_as_it_is(
    adopts: bool, weight: float
) -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    module.register_buffer("best", torch.tensor(1.0))
    job = job_of(module)
    job._consensus = ConsensusModel(
        job.flat, Mock(), lambda _: None, average=mean_of_fives
    )
    job._consensus.enter("validation", adopts)
    module.best = torch.tensor(7.0)
    (saved,) = Job.learner_state(job, [])["weights"]
    assert sorted(saved.tolist()) == [weight, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_before", [False, True])
def test_weights_go_back_to_the_module_that_they_are_of(
    dtype: torch.dtype, of_before: bool
) -> None:
    saved, here = Layers("ab"), Layers("ab", dtype)
    learner = saved_of(saved)
    if of_before:
        del learner["layout"]
    Job.restore_learner(job_of(here), learner)
    for one, other in zip(saved.parameters(), here.parameters(), strict=True):
        assert torch.equal(one.to(dtype), other)


def test_of_the_memory_of_a_buffer_only_its_own_part_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"count": torch.zeros(1000)[:1]}
    flat = SimpleNamespace(own_tensors=lambda: own)
    job: Any = SimpleNamespace(learner_state=dict, flat=flat, partition=ALONE)
    monkeypatch.setattr(contents, "gather_weights_only", lambda value: [value])
    ((learner,),) = [group["learners"] for group in gather_learners(job, [], {})]
    assert learner[BUFFERS]["count"].untyped_storage().nbytes() == 4


def test_a_learner_that_had_no_others_goes_on_as_an_island() -> None:
    """What `add_learners` keeps without a job; the checkpoint has the weights."""
    here = Layers("a")
    before = here.get_submodule("a").weight.clone()  # pyright: ignore
    Job.restore_learner(job_of(here), {"states": [], "own": {}})
    assert torch.equal(here.get_submodule("a").weight, before)  # pyright: ignore


@pytest.mark.parametrize(
    ("names", "difference"),
    [
        ("ba", "`b.weight` of shape (2, 2) in torch.float32, and there `a.weight`"),
        ("abc", "`c.weight` of shape (2, 2) in torch.float32, and there none"),
        ("a", "none, and there `b.weight`"),
    ],
)
def test_weights_of_another_order_are_refused_by_name_and_nothing_is_overwritten(
    names: str, difference: str
) -> None:
    here = Layers(names)
    before = [weight.clone() for weight in here.parameters()]
    with pytest.raises(ValueError, match=re.escape(difference)):
        Job.restore_learner(job_of(here), saved_of(Layers("ab")))
    for weight, kept in zip(here.parameters(), before, strict=True):
        assert torch.equal(weight, kept)


def convolution(layout: torch.memory_format) -> nn.Module:
    return nn.Conv2d(2, 3, 2).to(memory_format=layout)  # pyright: ignore


def test_weights_with_channels_last_go_back_to_a_module_that_has_them_last() -> None:
    saved, here = (convolution(torch.channels_last) for _ in range(2))
    Job.restore_learner(job_of(here), saved_of(saved))
    for one, other in zip(saved.parameters(), here.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_are_not_taken_from_another_memory_format() -> None:
    here = convolution(torch.contiguous_format)
    found = "(3, 2, 2, 2) in torch.float32, and there `weight` of shape (3, 2, 2, 2) "
    with pytest.raises(ValueError, match=re.escape(f"{found}with channels last in")):
        Job.restore_learner(job_of(here), saved_of(convolution(torch.channels_last)))
