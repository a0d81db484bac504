"""Names of a `ModelCheckpoint`'s files: the same in all learners, and not in use.

Lightning's name of a file has the learner's own number of steps, in which learners
differ that share epochs. Only learner 0 writes, so its values make all names. A name is
free if no file has it; a file that is still being written in the background counts.
"""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.compatibility import callbacks_of
from lightning_adpsgd.strategy.overrides import Overrides


def keep_files_apart(trainer: pl.Trainer, overrides: Overrides) -> None:
    """Keeps a Trainer's callbacks from taking the name of a file under way."""
    for saver in callbacks_of(trainer, ModelCheckpoint):
        overrides.wrap(saver, "file_exists", partial(_exists, saver))


def agree_on_names(trainer: pl.Trainer, overrides: Overrides) -> None:
    """Lets learner 0's metrics, steps and epochs decide what a callback keeps.

    Learners then hold the same paths, such as `best_model_path`. That includes metrics
    that are not reduced over learners.
    """
    for saver in callbacks_of(trainer, ModelCheckpoint):
        best, last = partial(_save_best, saver), partial(_save_last, saver)
        overrides.wrap(saver, "_save_topk_checkpoint", best)
        overrides.wrap(saver, "_save_last_checkpoint", last)


def _exists(saver: ModelCheckpoint, own: Any, path: Any, trainer: pl.Trainer) -> bool:
    if trainer.interrupted:  # the other learners can no longer be asked
        return saver._fs.exists(path)
    files = trainer.strategy.checkpoint_io
    if isinstance(files, BackgroundCheckpointIO):
        files.wait_for(path)
    return own(path, trainer)


def _save_best(
    saver: ModelCheckpoint, own: Any, trainer: pl.Trainer, monitor_candidates: Any
) -> None:
    # Lightning saves nothing while the metric is missing, and some learners may come
    # to that more often than others.
    if saver.save_top_k and saver.monitor in (None, *monitor_candidates):
        monitor_candidates = _of_learner_0(trainer, monitor_candidates)
    own(trainer, monitor_candidates)


def _save_last(
    saver: ModelCheckpoint, own: Any, trainer: pl.Trainer, monitor_candidates: Any
) -> None:
    if saver.save_last:
        monitor_candidates = _of_learner_0(trainer, monitor_candidates)
    own(trainer, monitor_candidates)


def _of_learner_0(trainer: pl.Trainer, candidates: dict[str, Any]) -> dict[str, Any]:
    """The values of learner 0; a collective, unless the training is interrupted."""
    if trainer.interrupted:
        return candidates
    # As numbers: a tensor of another learner's GPU would arrive on that GPU.
    numbers = {name: _as_number(value) for name, value in candidates.items()}
    told, device = trainer.strategy.broadcast(numbers), trainer.strategy.root_device
    return {name: _as_candidate(*number, device) for name, number in told.items()}


def _as_number(value: Any) -> tuple[Any, torch.dtype | None]:
    return (value.tolist(), value.dtype) if isinstance(value, Tensor) else (value, None)


def _as_candidate(value: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    return value if dtype is None else torch.tensor(value, dtype=dtype, device=device)
