"""The private names of Lightning that this package reads, with why and since when.

Read it with `lightning_adpsgd.strategy.overrides` when a new version of Lightning
changes something. `test_overrides` holds it complete.
"""

from lightning_adpsgd.strategy.overrides import _CHECKPOINTS, _EPOCH, _SAVER, _SWA, _of

_STATE, _GIVEN = "where the training is", "what Lightning's set-up of DDP was given"
READ = (
    _of("Trainer", "_data_connector", "work_sharing default_sharing", "samplers"),
    _of("Trainer", "_signal_connector", "signals", "has the handler of SIGTERM"),
    _of("Trainer", "_checkpoint_connector", "launchers last_good run", "has the file"),
    _of("Trainer", "_accelerator_connector", "compatibility default_sharing", "who"),
    _of("Trainer", "_val_check_time_interval", "clocks compatibility", _STATE, "2.6.6"),
    _of("Trainer", "_last_val_time", "clocks", _STATE, "2.6.6"),
    _of("LightningModule", "_trainer", "trainer", "`trainer` raises without one"),
    _of("LightningModule", "_device_mesh", "model_parallel", "`configure_model` asks"),
    _of("LightningOptimizer", "_optimizer", "model_parallel", "what it wraps"),
    _of("LightningModule", "_current_fx_name", "scope", "the hook that runs"),
    _of(_CHECKPOINTS, "_hpc_resume_path", "last_good", "SLURM's checkpoint"),
    _of(_CHECKPOINTS, "_loaded_checkpoint", "run", "what the training resumes from"),
    _of("_FitLoop", "_combined_loader", "mid_epoch", _STATE),
    _of("_FitLoop", "_data_source", "work_sharing", "asks for the loaders"),
    _of("_DataConnector", "_requires_distributed_sampler", "default_sharing", "deals"),
    _of("_FitLoop", "_data_fetcher", "compatibility", _STATE),
    _of("_DataFetcher", "_combined_loader", "compatibility", "asked for its length"),
    _of("CombinedLoader", "_iterator", "compatibility", "there is none, if it failed"),
    _of("_FitLoop", "_can_stop_early", "clocks", _STATE),
    _of(_EPOCH, "_should_check_val_epoch _is_training_done", "clocks", _STATE),
    _of(_EPOCH, "_batches_that_stepped", "fast_forward", _STATE),
    _of("Timer", "_duration _interval", "compatibility", "what the timer does"),
    _of("Timer", "_verbose", "clocks", "whether it says what it does"),
    _of(_SAVER, "_every_n_train_steps", "compatibility", "by `save_period`"),
    _of(_SAVER, "_every_n_epochs", "compatibility", "by `save_period`"),
    _of(_SAVER, "_train_time_interval", "compatibility", "by `save_period`"),
    _of(_SAVER, "_last_time_checked", "clocks", "when it saved last"),
    _of(_SAVER, "_last_global_step_saved", "work_sharing", "when it saved last"),
    _of(_SAVER, "_should_skip_saving_checkpoint", "clocks", "whether it has saved"),
    _of(_SAVER, "_find_last_checkpoints", "last_good", "files that `last` may mean"),
    _of(_SAVER, "__resolve_ckpt_dir", "last_good", "where it will save"),
    _of(_SAVER, "_fs", "file_names last_good", "has the files"),
    _of(_SWA, "_average_model", "weight_callbacks", "its average; also of EMA"),
    _of("ParallelStrategy", "_layer_sync", "trainer compatibility", _GIVEN),
    _of("DDPStrategy", "_ddp_kwargs", "compatibility options", _GIVEN),
    _of("DDPStrategy", "_ddp_comm_hook", "compatibility allreduce", _GIVEN),
    _of("DDPStrategy", "_ddp_comm_wrapper", "compatibility", _GIVEN),
    _of("DDPStrategy", "_model_averaging_period", "compatibility", _GIVEN),
    _of("DDPStrategy", "_setup_model", "trainer", "wraps a module with DDP"),
    _of("DDPStrategy", "_determine_ddp_device_ids", "fabric", _GIVEN),
    _of("DDPStrategy", "_backward_sync_control", "fabric", "skips the allreduce"),
    _of("DDPStrategy", "_set_world_ranks", "fabric", "before the check of the launch"),
    _of("Strategy", "_launcher", "trainer fabric", "runs the program"),
    _of("Strategy", "_configure_launcher", "trainer fabric", "makes it"),
    _of("Strategy", "_checkpoint_io", "options", "has another default"),
    _of("WandbLogger", "_log_model", "saving", "whether it uploads checkpoints"),
    _of("NeptuneLogger", "_log_model_checkpoints", "saving", "the same", gone="2.6.6"),
)
