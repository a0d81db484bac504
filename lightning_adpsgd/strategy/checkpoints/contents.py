"""The parts of a checkpoint about learners and epochs that Lightning does not keep."""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adpsgd.coordination.gather import gather_weights_only
from lightning_adpsgd.epochs.ranges import count
from lightning_adpsgd.epochs.work_units import EpochState
from lightning_adpsgd.strategy.checkpoints.mid_epoch import PlaceInEpoch
from lightning_adpsgd.strategy.checkpoints.saving import snapshot_of
from lightning_adpsgd.strategy.job import BUFFERS, NAMESPACE, Job
from lightning_adpsgd.topology.partition import Partition

EPOCH = f"{NAMESPACE}/epoch"
"""The key of the rest of a shared epoch."""

_SAMPLES = f"{NAMESPACE}/samples"
"""The key of the number of samples that all learners together have trained on."""

WITHOUT_MEAN = f"{NAMESPACE}/without_mean"
"""The key of the names of what is not averaged, because its values had no mean."""

# Learners may have made different numbers of steps.
_OF_EACH_LEARNER = ("loops", "lr_schedulers")


class Resumed(NamedTuple):
    """The parts of the resumed checkpoint that concern this learner.

    Attributes:
        learner: state of this learner; None: it starts from the consensus model.
        epoch: `EpochState` of a shared epoch, as a dict; None: it was not shared.
        num_samples: number of samples that all learners together have trained on.
        is_within_epoch: whether the job that saved had batches left in its epoch.
        without_mean: names of what the job that saved did not average.
    """

    learner: Mapping[str, Any] | None = None
    epoch: Mapping[str, Any] | None = None
    num_samples: int = 0
    is_within_epoch: bool = False
    without_mean: Sequence[str] = ()

    @property
    def place(self) -> Mapping[str, Any] | None:
        """The learner's place in its epoch, and the number of that epoch."""
        own = self.learner["own"] if self.learner else {}
        if "place" not in own:
            return None
        loops = own["lightning"]["loops"]
        epoch, is_last = _epochs(loops)["current"], _batches(loops).get("is_last_batch")
        # Lightning counts an epoch after the hooks of its last batch, which may save.
        ends = bool(is_last) and epoch["processed"] < epoch["started"]
        return {**own["place"], "epoch": epoch["processed"] + ends}


def resumed_from(
    checkpoint: dict[str, Any], rank: int, partition: Partition
) -> Resumed:
    """Reads a checkpoint, and gives Lightning this learner's own state to restore."""
    # The state of learner 0, which all learners read; below, each takes its own.
    is_within_epoch = _is_within_epoch(checkpoint.get("loops", {}))
    saved = checkpoint.get(NAMESPACE)
    learner = learner_of(saved, rank, partition) if saved else None
    if learner is not None:
        checkpoint["optimizer_states"] = learner["states"]
        checkpoint.update(learner["own"].get("lightning", {}))
        has_rest = learner["own"].get("place", {}).get("num_batches")
        epochs = _epochs(checkpoint["loops"]) if has_rest else {}
        if epochs and epochs["current"]["processed"] >= epochs["current"]["started"]:
            # Lightning counts an epoch as processed before its end's hooks, even one
            # that `max_steps`, a clock or a callback cut: samplers would draw the next.
            for counts in epochs.values():  # of this run, and of all
                counts["processed"] -= 1
                counts["completed"] = min(counts["completed"], counts["processed"])
    batches = _batches(checkpoint.get("loops", {}))
    if _is_within_batch(batches):
        # Lightning would end the epoch at its last batch, which was under way.
        batches["is_last_batch"] = False
    epoch, num_samples = checkpoint.get(EPOCH), checkpoint.get(_SAMPLES, 0)
    without_mean = checkpoint.get(WITHOUT_MEAN, ())
    return Resumed(learner, epoch, num_samples, is_within_epoch, without_mean)


def warn_of_lost_rest(resumed: Resumed) -> None:
    """Warns that this job shares no epochs, and cannot continue the rest of one."""
    state = EpochState(**resumed.epoch) if resumed.epoch else None
    if state is None or not state.remaining:
        return
    rank_zero_warn(
        f"The checkpoint is within epoch {state.epoch}, which learners shared, and "
        f"{count(state.remaining)} of its {state.num_samples} samples were left. This "
        "job trains on others: resume with `work_sharing=True` and several "
        "super-learners, or from a checkpoint of the end of an epoch."
    )


def _is_within_epoch(loops: Mapping[str, Any]) -> bool:
    batches = _batches(loops)
    if _is_within_batch(batches):
        return True
    begun = batches.get("current", {}).get("ready", 0)
    return begun > 0 and not batches.get("is_last_batch", True)


def _is_within_batch(batches: Mapping[str, Any]) -> bool:
    current = batches.get("current", {})
    return current.get("ready", 0) > current.get("processed", math.inf)


def _batches(loops: Mapping[str, Any]) -> dict[str, Any]:
    return loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {})


def _epochs(loops: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return loops["fit_loop"]["epoch_progress"]


def learner_of(
    saved: list[Any], rank: int, partition: Partition
) -> dict[str, Any] | None:
    """The state of one learner, from what `gather_learners` kept.

    It is None, which is logged, if the job that saved had a different S or N, or a
    version before 0.2.
    """
    sizes = [len(group.get("learners") or ()) for group in saved]
    if sizes != [*partition.sizes]:
        rank_zero_info(
            f"The checkpoint holds super-learners of {sizes} learners (0: before 0.2) "
            f"and this job has some of {[*partition.sizes]}: all start from their mean."
        )
        return None
    group = saved[partition.super_learner(rank)]
    return {**group, "own": group["learners"][partition.place(rank)]}


def gather_learners(
    job: Job | None, states: list[Any], own: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The states of all super-learners and learners, in learner 0; a collective.

    The optimizer states are equal within a super-learner; `own` is this learner's.
    Without a job, all learners are one super-learner.
    """
    shared = {"states": states} if job is None else job.learner_state(states)
    if job is not None:
        # Copies, because a file holds the whole storage of which a buffer is a part.
        own = {**own, BUFFERS: snapshot_of(job.flat.own_tensors(), on_host=False)}
    if (learners := gather_weights_only((own, shared))) is None:
        return []
    partition = Partition((len(learners),)) if job is None else job.partition
    return [
        {**learners[ranks[0]][1], "learners": [learners[rank][0] for rank in ranks]}
        for ranks in partition.all_ranks
    ]


def place_in_epoch(trainer: pl.Trainer, resumed: Resumed) -> PlaceInEpoch:
    """The place of a learner in its epoch, from where a checkpoint left it."""
    # With other learners, learner 0 continues from the sum over those that saved.
    of_others = resumed.learner is None and trainer.is_global_zero
    num_samples = resumed.num_samples if of_others else 0
    device = trainer.strategy.root_device
    return PlaceInEpoch(trainer, device, resumed.place, num_samples)


def plain(value: Any) -> Any:
    """The same with Python's numbers for NumPy's, which a resume would refuse."""
    kind = type(value)
    if kind in (dict, Counter):
        return kind({plain(key): plain(one) for key, one in value.items()})
    if kind in (list, tuple):
        return kind(map(plain, value))
    generic = getattr(sys.modules.get("numpy"), "generic", ())
    return value.item() if isinstance(value, generic) else value


def add_learners(
    checkpoint: dict[str, Any], place: PlaceInEpoch, strategy: Strategy, job: Job | None
) -> None:
    """Adds the state of each learner to a checkpoint; a collective over all."""
    names = (*_OF_EACH_LEARNER, type(strategy.precision_plugin).__qualname__)
    lightning = {name: checkpoint[name] for name in names if name in checkpoint}
    own = {"lightning": lightning, "place": place.state()}
    learners = gather_learners(job, checkpoint["optimizer_states"], own)
    checkpoint[NAMESPACE] = learners
    all_own = (one for group in learners for one in group["learners"])
    checkpoint[_SAMPLES] = sum(one["place"]["num_samples"] for one in all_own)
