"""What of Lightning is replaced or read although it promises neither: one table.

Read this page first when a version of Lightning changes something. `REPLACED` lists
each attribute of Lightning's objects that another value takes the place of during a
fit. `READ` lists the private names that are read. `Overrides` is the only place where
attributes are replaced: it refuses those that are not in the table, and a second owner.
"""

from typing import Any, NamedTuple, final


class Replaced(NamedTuple):
    """One attribute of Lightning's that is replaced.

    Attributes:
        of: name of the class whose instances have the attribute.
        name: the attribute.
        owners: modules that may replace it, of which one does at a time.
        why: what goes wrong with Lightning's own.
        since: the first version that has it, of those that this package supports.
    """

    of: str
    name: str
    owners: tuple[str, ...]
    why: str
    since: str = "2.5"


class Read(NamedTuple):
    """One private name of Lightning's that is read, or counted on.

    Attributes:
        of: name of the class or module that has it.
        name: the name.
        readers: modules that read it.
        why: what for.
        since: the first version that has it, of those that this package supports.
        gone: the version from which on no object has it; empty: all have.
    """

    of: str
    name: str
    readers: tuple[str, ...]
    why: str
    since: str = "2.5"
    gone: str = ""


REPLACED = (
    Replaced(
        "_FitLoop",
        "on_run_end",
        ("run", "virtual"),
        "training ends in the consensus model before a hook sees its end",
    ),
    Replaced(
        "_TrainingEpochLoop",
        "run",
        ("scope",),
        "inside an epoch, asynchronous learners are at different steps",
    ),
    Replaced(
        "_TrainingEpochLoop",
        "_broadcast_sigterm_tensor",
        ("signals",),
        "it makes all learners wait for one another in each step",
        "2.5.2",
    ),
    Replaced(
        "_TrainingEpochLoop",
        "_should_check_val_fx",
        ("clocks",),
        "the last question of a batch, where a clock may have its way",
    ),
    Replaced(
        "_SignalConnector",
        "_sigterm_notifier_fn",
        ("signals",),
        "it broadcasts, and so hangs when one learner alone gets the signal",
    ),
    Replaced(
        "_DataConnector",
        "_prepare_dataloader",
        ("loaders",),
        "training loaders get another batch sampler",
    ),
    Replaced(
        "_CheckpointConnector",
        "_parse_ckpt_path",
        ("launchers",),
        "it takes the newest file, whole or not",
    ),
    Replaced(
        "Timer",
        "on_train_batch_end",
        ("clocks",),
        "it asks learner 0 for the time after each batch",
    ),
    Replaced(
        "ModelCheckpoint",
        "on_train_batch_end",
        ("clocks",),
        "with `train_time_interval` it asks learner 0 for the time after each batch",
    ),
    Replaced(
        "StochasticWeightAveraging",
        "transfer_weights",
        ("weight_averaging",),
        "it writes into weights that gossip reads at the same time",
    ),
    Replaced(
        "StochasticWeightAveraging",
        "reset_batch_norm_and_save_state",
        ("weight_averaging",),
        "it gives buffers other memory than the vectors that are averaged",
    ),
    Replaced(
        "ModelPruning",
        "_run_pruning",
        ("pruning",),
        "each learner would choose weights of its own",
    ),
)

_FIT_STATE = "where the training is, and what its next batch does"
_DDP = "what Lightning's own set-up of DDP was given"
READ = (
    Read("Trainer", "_data_connector", ("loaders",), "has `_prepare_dataloader`"),
    Read("Trainer", "_signal_connector", ("signals",), "has the handler of SIGTERM"),
    Read(
        "Trainer",
        "_checkpoint_connector",
        ("launchers", "last_good"),
        "has `_parse_ckpt_path`",
    ),
    Read(
        "Trainer",
        "_accelerator_connector",
        ("compatibility",),
        "keeps `use_distributed_sampler`",
    ),
    Read("Trainer", "_val_check_time_interval", ("clocks",), _FIT_STATE, "2.6.6"),
    Read("Trainer", "_last_val_time", ("clocks",), _FIT_STATE, "2.6.6"),
    Read("LightningModule", "_trainer", ("strategy",), "`trainer` raises without one"),
    Read("LightningModule", "_current_fx_name", ("scope",), "the hook that runs"),
    Read(
        "_CheckpointConnector", "_hpc_resume_path", ("last_good",), "SLURM's checkpoint"
    ),
    Read("_FitLoop", "_combined_loader", ("work_sharing", "mid_epoch"), _FIT_STATE),
    Read("_FitLoop", "_data_fetcher", ("work_sharing",), _FIT_STATE),
    Read("_FitLoop", "_can_stop_early", ("clocks",), _FIT_STATE),
    Read("_TrainingEpochLoop", "_should_check_val_epoch", ("clocks",), _FIT_STATE),
    Read("_TrainingEpochLoop", "_is_training_done", ("clocks",), _FIT_STATE),
    Read("_TrainingEpochLoop", "_batches_that_stepped", ("catching_up",), _FIT_STATE),
    Read("Timer", "_duration", ("clocks",), "whether the timer ends anything"),
    Read("Timer", "_interval", ("clocks",), "whether it asks in each step"),
    Read("Timer", "_verbose", ("clocks",), "whether it says that it stops"),
    Read(
        "ModelCheckpoint",
        "_train_time_interval",
        ("compatibility",),
        "when it saves; read by `save_times` alone",
    ),
    Read("ModelCheckpoint", "_every_n_train_steps", ("compatibility",), "the same"),
    Read("ModelCheckpoint", "_every_n_epochs", ("compatibility",), "the same"),
    Read("ModelCheckpoint", "_last_time_checked", ("clocks",), "when it saved last"),
    Read(
        "ModelCheckpoint",
        "_should_skip_saving_checkpoint",
        ("clocks",),
        "whether it has saved at this step",
    ),
    Read(
        "ModelCheckpoint",
        "_find_last_checkpoints",
        ("last_good",),
        "the files that `last` may mean",
    ),
    Read(
        "StochasticWeightAveraging",
        "_average_model",
        ("weight_averaging",),
        "the average that it keeps; `WeightAveraging` keeps its own under this name",
    ),
    Read("ParallelStrategy", "_layer_sync", ("strategy", "compatibility"), _DDP),
    Read("DDPStrategy", "_ddp_kwargs", ("strategy", "fabric", "options"), _DDP),
    Read("DDPStrategy", "_ddp_comm_hook", ("compatibility",), _DDP),
    Read("DDPStrategy", "_ddp_comm_wrapper", ("compatibility",), _DDP),
    Read("DDPStrategy", "_model_averaging_period", ("compatibility",), _DDP),
    Read("DDPStrategy", "_setup_model", ("strategy",), "wraps the module with DDP"),
    Read("DDPStrategy", "_start_method", ("strategy", "fabric"), "which launcher"),
    Read("DDPStrategy", "_determine_ddp_device_ids", ("fabric",), _DDP),
    Read("DDPStrategy", "_backward_sync_control", ("fabric",), "skips the allreduce"),
    Read("Strategy", "_launcher", ("strategy", "fabric"), "runs the program"),
    Read("Strategy", "_checkpoint_io", ("strategy", "fabric"), "has another default"),
    Read("WandbLogger", "_log_model", ("saving",), "whether it uploads checkpoints"),
    Read(
        "NeptuneLogger",
        "_log_model_checkpoints",
        ("saving",),
        "whether it uploads checkpoints",
        gone="2.6.6",
    ),
)


class _Undo(NamedTuple):
    owner: str
    target: Any
    attribute: str


@final
class Overrides:
    """Every replaced attribute of Lightning's objects, until `undo`."""

    def __init__(self) -> None:
        self._done: list[_Undo] = []

    def replace(self, owner: str, target: Any, attribute: str, value: Any) -> None:
        """Puts a value in the place of an attribute, in this one object.

        Args:
            owner: module that replaces it; the table names it.
            target: object of Lightning's.
            attribute: name of the attribute.
            value: what takes its place; a function of a module or a method and not a
                lambda, because a Trainer may be pickled.

        Raises:
            LookupError: The table does not have it.
            RuntimeError: It has been replaced; names both owners.
        """
        kind = type(target).__name__
        if not any(_fits(row, owner, target, attribute) for row in REPLACED):
            raise LookupError(
                f"`{kind}.{attribute}` must be in the table of overrides.py to be "
                f"replaced by {owner!r}"
            )
        for other in self._done:
            if other.target is target and other.attribute == attribute:
                raise RuntimeError(
                    f"`{kind}.{attribute}` must have one owner, got {owner!r} after "
                    f"{other.owner!r}: let one of the two call the other"
                )
        vars(target)[attribute] = value
        self._done.append(_Undo(owner, target, attribute))

    def undo(self) -> None:
        """Brings Lightning's own back, the last first; can be called twice."""
        while self._done:
            done = self._done.pop()
            vars(done.target).pop(done.attribute, None)


def _fits(row: Replaced, owner: str, target: Any, attribute: str) -> bool:
    kinds = {kind.__name__ for kind in type(target).__mro__}
    return row.name == attribute and owner in row.owners and row.of in kinds
