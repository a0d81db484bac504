"""A logger for Weights & Biases that never interrupts a training.

It is offline unless the user is logged in, and never prompts. It needs neither the
package nor a network.
"""

import importlib.util
import multiprocessing
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from typing_extensions import override

PROJECT = "lightning-adpsgd"
AXES = {
    "curve": ("global_samples", "hours"),
    "convergence": ("global_samples", "epochs", "hours"),
    "learners": ("global_samples",),
    "wer": ("global_samples", "epochs"),
}
"""The x axes of each group of figures; the first one is the default.

`gossip` has the axis of `learners`, and the figure `wer` has that of the group `wer`.
"""


def make_wandb_logger(
    folder: str | Path, name: str, project: str = PROJECT, **init: Any
) -> WandbLogger | None:
    """Makes a logger for Weights & Biases, online if the user is logged in.

    Args:
        folder: Folder that gets a subfolder `wandb/` with its files; made if missing.
        name: Name of the run.
        project: Name of the project.
        init: Further arguments of `wandb.init`: `id`, `group`, `tags`, `config` ...

    Returns:
        The logger; None without the package, or if WANDB_MODE is "disabled".
    """
    if not is_available():
        rank_zero_info(
            "Weights & Biases is not installed or is disabled; nothing is logged there"
        )
        return None
    import wandb

    Path(folder).mkdir(parents=True, exist_ok=True)
    offline = not _is_logged_in()
    if "id" in init and not offline:
        init["resume"] = "allow"
    logger = WandbLogger(
        name=name,
        project=project,
        save_dir=folder,
        offline=offline,
        settings=wandb.Settings(
            # Lightning sets the mode in the environment, but `wandb.login` has already
            # read that.
            mode="offline" if offline else "online",
            silent=True,
            console="off",
            init_timeout=20,
        ),
        **init,
    )
    # Lightning always passes `anonymous`; recent versions warn that it has no effect.
    getattr(logger, "_wandb_init", {}).pop("anonymous", None)
    return logger


def is_available() -> bool:
    """Whether the package is installed and WANDB_MODE is not "disabled"."""
    is_off = os.environ.get("WANDB_MODE") == "disabled"
    return not is_off and importlib.util.find_spec("wandb") is not None


def _is_logged_in() -> bool:
    import wandb

    if os.environ.get("WANDB_MODE") == "offline":
        return False
    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # an old version has no `prompt`; a broken key raises
        return False


def define_axes(run: Any) -> None:
    """Sets the x axes of the figures of a run of Weights & Biases."""
    for group, axes in AXES.items():
        for axis in axes:
            run.define_metric(f"{group}/{axis}")
        run.define_metric(f"{group}/*", step_metric=f"{group}/{axes[0]}")
    run.define_metric("gossip/*", step_metric=f"learners/{AXES['learners'][0]}")
    run.define_metric("wer", step_metric=f"wer/{AXES['wer'][0]}", summary="last,min")


class WandbRun(Callback):
    """Sets the x axes and settings of a run of Weights & Biases, and finishes it.

    Without it, a forked learner leaves the run open. A further `fit` or evaluation with
    the same logger continues the run, as with Lightning's logger alone. The settings
    are the options of the strategy, as `strategy/<name>`.
    """

    @override
    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in _wandb_loggers(trainer):
            define_axes(logger.experiment)
            options = _strategy_options(trainer)
            logger.experiment.config.update(options, allow_val_change=True)

    @override
    @rank_zero_only
    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        loggers = _wandb_loggers(trainer)
        begun = [one for one in loggers if getattr(one, "_experiment", None)]
        for logger in begun:
            _finish(logger)
        if begun and multiprocessing.parent_process() is not None:
            import wandb

            # Its service writes the last part of a run after `finish` has returned, and
            # dies with the process that began it. `multiprocessing` skips the `atexit`
            # hook that would wait for it.
            wandb.teardown()


def _finish(logger: Any) -> None:
    """Finishes a logger's run; what it logs next opens the run again, by its id."""
    run, logger._experiment = logger._experiment, None
    run.finish()
    logger._id = logger._wandb_init["id"] = run.id


def _wandb_loggers(trainer: Trainer) -> list[Any]:
    return [one for one in trainer.loggers if isinstance(one, WandbLogger)]


def _strategy_options(trainer: Trainer) -> dict[str, Any]:
    dials = getattr(trainer.strategy, "dials", None)
    options = {} if dials is None else vars(dials)
    named = {"class": type(trainer.strategy).__name__, **options}
    plain = int | float | None
    return {
        f"strategy/{name}": value if isinstance(value, plain) else str(value)
        for name, value in named.items()
    }
