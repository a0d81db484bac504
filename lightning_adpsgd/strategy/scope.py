"""Which learners take part in a collective of Lightning or of a user's hook.

Within an epoch, asynchronous learners are at different steps. A collective there is
over the learners of one super-learner, except in evaluations and in hooks of a
checkpoint, to which all learners come. Outside of epochs, a collective is over all
learners. A warning names the first collective of each kind that is over fewer learners
than under `ddp`, because its value alone does not show it.

A metric of torchmetrics begins collectives without the strategy. So within epochs its
method `sync`, which begins them, is replaced. Collectives of `torch.distributed` that a
training step itself begins are not changed: they are noticed by the sequence numbers of
the default process group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import walk_tb
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torchmetrics import Metric

from lightning_adpsgd.strategy.default_sharing import LIBRARIES
from lightning_adpsgd.strategy.job import Job

ALONE = object()
"""The scope of a collective in a super-learner of one."""

_REMEDIES = {
    "reduce": "Log a metric with `self.log(..., on_step=False, on_epoch=True, "
    "sync_dist=True)`: its mean over an epoch is over all learners",
    "all_gather": "Gather in `on_train_epoch_end` or in a validation, to which all "
    "learners come. A contrastive loss sees fewer negatives than under `ddp`: enlarge "
    "the batch or the super-learner",
    "compute": "Compute a metric in `on_train_epoch_end`, or log the object itself "
    'with `self.log("name", metric)`: its value of an epoch is over all learners',
}

_TORCHS = "torch.distributed"
# Packages that explain their collectives, or call them over a super-learner.
_PREPARED = {*LIBRARIES, "lightning_fabric"}
_BETWEEN_TWO = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
_TURNS = (
    "So they take the batches of a shared epoch in turns, and leave out those at its "
    "end that not all would get. If the call is in some steps only, it may hang at the "
    "end of the epoch: `work_sharing=False` gives learners equal shares. "
)


class CollectiveScope:
    """The scope of a collective: all learners, or only those at the same step."""

    def __init__(self, trainer: pl.Trainer, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self._in_epoch = self._of_all = False
        self._told: set[str] = set()

    def __call__(self, group: Any, operation: str) -> Any:
        """The group that takes part: as given, `ALONE`, or None for all learners."""
        if self._of_all or group not in (None, dist.group.WORLD):
            return group
        if self._is_apart():
            self._tell_of_fewer(operation)
            return self._job.groups.gradients or ALONE
        return None

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """A context of a training step, which may call `torch.distributed` itself."""
        before = _num_collectives()
        yield
        if _num_collectives() != before and self._is_apart():
            if self._sharing is not None:
                self._sharing.takes_turns = True
            self._tell_of_waits()

    @contextmanager
    def of_all(self) -> Iterator[None]:
        """A context of collectives to which all learners come, also within an epoch."""
        self._of_all = True
        try:
            yield
        finally:
            self._of_all = False

    def run_epoch(self, run: Any, data_fetcher: Any) -> Any:
        """Runs an epoch of the Trainer's loop, in which learners may be apart."""
        self._in_epoch = True
        try:
            with _metrics_over(self):
                return run(data_fetcher)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) and _is_own(error):
                # The store is gone, of which batches are claimed.
                with self._job.failures.named("a call of the job's store"):
                    raise
            is_apart = self._sharing is not None and self._is_apart()
            if not is_apart or not (caller := _caller_of_torchs(error)):
                raise
            raise RuntimeError(
                f"`torch.distributed`, which {caller} calls, has waited in vain for "
                "other learners. They share an epoch and may make different numbers of "
                "steps (`work_sharing=False` gives them equal shares), or one was "
                f"slower than `timeout` ({error})"
            ) from error
        finally:
            self._in_epoch = False

    def _is_apart(self) -> bool:
        """Whether the learners may be at different steps here."""
        if not (self._in_epoch and self._job.running and self._job.asynchronous):
            return False
        module = self._trainer.lightning_module
        saves = module._current_fx_name == "on_save_checkpoint"
        return self._trainer.training and not saves

    def _tell_of_fewer(self, operation: str) -> None:
        if self._is_to_tell(operation):
            size, world_size = self._job.super_learner_size, self._trainer.world_size
            hook = self._trainer.lightning_module._current_fx_name or "a hook of a step"
            rank_zero_warn(
                f"`{operation}` in `{hook}` is over {size} of the {world_size} "
                "learners, those of one super-learner: the others are at other steps "
                f"and are not waited for. {_REMEDIES[operation]}. This warning appears "
                "once."
            )

    def _tell_of_waits(self) -> None:
        if self._is_to_tell(_TORCHS):
            rank_zero_warn(
                "`training_step` calls `torch.distributed` over all learners, where "
                "they wait for one another in every step. "
                f"{_TURNS if self._sharing is not None else ''}"
                "This warning appears once."
            )

    def _is_to_tell(self, operation: str) -> bool:
        is_of_all = self._job.super_learner_size == self._trainer.world_size
        if operation in self._told or is_of_all:
            return False
        self._told.add(operation)
        return True

    @property
    def _sharing(self) -> Any:
        return getattr(self._trainer.strategy, "work_sharing", None)


def _num_collectives() -> int:
    """How many collectives over all learners this one has begun; 0 if uncounted."""
    everyone: Any = dist.group.WORLD
    with suppress(RuntimeError):  # Gloo and NCCL count
        return everyone._get_sequence_number_for_group()
    return 0


def _caller_of_torchs(error: RuntimeError) -> str:
    """The place of the program that called a collective, which has timed out.

    Empty if the error is another one, if the call names a group of its own, or if this
    package, Lightning or torchmetrics made it.
    """
    frames = [*walk_tb(error.__traceback__)]
    place = max(n for n, (f, _) in enumerate(frames) if _package_of(f) != "torch")
    (frame, line), inner = frames[place], [one for one, _ in frames[place + 1 :]]
    # What waits in C++ alone, as `Work.wait` does, has no frame of torch.
    waits_in_cpp = not inner and "/gloo/" in str(error)
    is_other = "Timed out" not in str(error) or _package_of(frame) in _PREPARED
    if is_other or not (waits_in_cpp or _is_over_all(inner)):
        return ""
    return f"`{frame.f_code.co_name}` ({frame.f_code.co_filename}:{line})"


def _is_own(error: BaseException) -> bool:
    """Whether this package made the call that raised, and not the program."""
    callers = [f for f, _ in walk_tb(error.__traceback__) if _package_of(f) != "torch"]
    return _package_of(callers[-1]) == __name__.partition(".")[0]


def _is_over_all(frames: Sequence[FrameType]) -> bool:
    """Whether frames of torch are those of a collective over all learners."""
    calls = [f for f in frames if f.f_globals["__name__"].startswith(_TORCHS)]
    return bool(calls) and all(
        f.f_locals.get("group") in (None, dist.group.WORLD)
        and f.f_code.co_name not in _BETWEEN_TWO
        for f in calls
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


@contextmanager
def _metrics_over(scope: CollectiveScope) -> Iterator[None]:
    """A context in which metrics are computed over the learners of a scope."""
    own: Callable[..., None] = Metric.sync
    kept: list[Metric] = []

    def sync(
        metric: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        asked = process_group or metric.process_group
        available = distributed_available or metric.distributed_available_fn
        group = scope(asked, "compute") if should_sync and available() else asked
        # Before torchmetrics 1.0 there is no such choice.
        keeps = getattr(metric, "compute_with_cache", False)
        if group not in (None, asked) and keeps:
            # With a cached value, this learner would not join a later collective over
            # all learners, in a validation or at the end of the epoch.
            metric.compute_with_cache = False
            kept.append(metric)
        if group is not ALONE:
            own(metric, dist_sync_fn, group, should_sync, distributed_available)

    Metric.sync = sync  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Metric.sync = own
        for metric in kept:
            metric.compute_with_cache = True
