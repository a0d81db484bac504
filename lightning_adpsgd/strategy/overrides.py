"""One table of the Lightning internals that this package replaces.

Read this module first when a new version of Lightning changes something. `REPLACED`
lists each attribute of Lightning's objects that is replaced during a fit; a test
compares it with the code. Only `Overrides` replaces attributes, and it refuses to
replace one twice. `tests/strategy/private_names.py` lists the private names that are
read, or set to another value of the same kind.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final


class Names(NamedTuple):
    """Names of Lightning's that are needed for one reason, separated by spaces.

    Attributes:
        of: name of Lightning's class.
        by: modules that need the names; no process has two that replace the same one.
        why: purpose, or the fault of Lightning's own version.
        since: first supported version of Lightning that has the names.
        gone: first version that lacks the names; empty: no version does.
    """

    of: str
    names: str
    by: str
    why: str
    since: str = "2.5"
    gone: str = ""


_of = Names

_EPOCH, _SAVER = "_TrainingEpochLoop", "ModelCheckpoint"
_SWA, _CHECKPOINTS = "StochasticWeightAveraging", "_CheckpointConnector"
_EVERY_STEP = "it asks learner 0 for the time after each batch"
_SIGNAL = "all wait in each step; a signal to a single learner hangs it"
_NAMES = "the name of a file has the learner's own number of steps"
_LEAVE = "learners of an island agree on the step at which they leave"
_SAMPLER = "shared epochs need another sampler"
_ITERATORS = "only iterators of the training loop move a learner on in its epoch"
_LOADERS = "it does not tell how many loaders there are"
REPLACED = (
    _of("_FitLoop", "on_run_end", "run virtual", "the consensus model comes first"),
    _of("_EvaluationLoop", "_on_evaluation_start", "run virtual", "before all hooks"),
    _of(_EPOCH, "run", "run", "inside an epoch, learners are at different steps"),
    _of(_EPOCH, "_broadcast_sigterm_tensor", "signals", _SIGNAL, "2.5.2"),
    _of(_EPOCH, "_save_loggers_on_train_batch_end", "signals", _LEAVE),
    _of("_SignalConnector", "_sigterm_notifier_fn", "signals", _SIGNAL),
    _of(_EPOCH, "_should_check_val_fx", "clocks", "the last call in a batch"),
    _of("Timer", "on_train_batch_end", "clocks", _EVERY_STEP),
    _of(_SAVER, "on_train_batch_end", "clocks", _EVERY_STEP),
    _of(_SAVER, "file_exists", "file_names", "it misses files that are being written"),
    _of(_SAVER, "_save_topk_checkpoint", "file_names", _NAMES),
    _of(_SAVER, "_save_last_checkpoint", "file_names", _NAMES),
    _of("_FitLoop", "setup_data", "loop_iterators", _ITERATORS),
    _of(_EPOCH, "on_run_start", "loop_iterators", _ITERATORS),
    _of("_DataConnector", "_prepare_dataloader", "work_sharing", _SAMPLER),
    _of("_DataLoaderSource", "dataloader", "work_sharing", _LOADERS),
    _of(_CHECKPOINTS, "_parse_ckpt_path", "launchers", "it takes damaged files too"),
    _of("_Launcher", "launch", "trainer fabric", "the first sight of the Trainer"),
    _of("Precision", "clip_grad_by_norm clip_grad_by_value", "gradients", "one mesh"),
    _of(_SWA, "transfer_weights", "weight_callbacks", "exchanges read what it writes"),
    _of(_SWA, "reset_batch_norm_and_save_state", "weight_callbacks", "moves buffers"),
    _of("ModelPruning", "_run_pruning", "weight_callbacks", "learners would differ"),
)


@final
class Overrides:
    """The owner of all replaced attributes of Lightning's objects, until `undo`."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str]] = []

    def replace(self, target: Any, attribute: str, value: Any) -> None:
        """Replaces an attribute of one object.

        Args:
            value: replacement; a module-level function or a method, not a lambda,
                because a Trainer may be pickled.

        Raises:
            RuntimeError: The attribute is replaced already.
        """
        if any(one is target and other == attribute for one, other in self._done):
            name = f"`{type(target).__name__}.{attribute}`"
            raise RuntimeError(f"{name} must have one owner: let one call the other")
        vars(target)[attribute] = value
        self._done.append((target, attribute))

    def wrap(self, target: Any, attribute: str, function: Callable[..., Any]) -> None:
        """Replaces a method by a function of Lightning's own one and the arguments."""
        # Not the bound method: in a copy of a Trainer it would be the replacement.
        own = partial(getattr(type(target), attribute), target)
        self.replace(target, attribute, partial(function, own))

    def undo(self) -> None:
        """Restores Lightning's attributes; can be called twice."""
        while self._done:
            target, attribute = self._done.pop()
            vars(target).pop(attribute, None)
