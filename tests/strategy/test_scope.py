"""Who takes part in a collective, whatever the hook is called that asks for it."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from torch import Tensor
from typing_extensions import override

from tests.learners import Linear, gossip, learners, loader, trainer_of, values


class Gathers(Linear):
    """Gathers its rank in a hook that no version of Lightning has."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: dict[str, list[float]] = {}

    def on_a_hook_of_tomorrow(self, where: str) -> None:
        gathered: Any = self.all_gather(torch.tensor([float(self.global_rank)]))
        self.gathered[where] = gathered.flatten().tolist()

    def ask(self, where: str) -> None:
        name = "on_a_hook_of_tomorrow"
        call._call_lightning_module_hook(self.trainer, name, where)

    @override
    def on_train_epoch_start(self) -> None:
        self.ask("start of the epoch")

    @override
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.ask("batch")

    @override
    def on_validation_epoch_end(self) -> None:
        self.ask("validation")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        gathered: Any = self.all_gather(torch.tensor([float(self.global_rank)]))
        self.gathered["checkpoint"] = gathered.flatten().tolist()


class SavesAtStep2(pl.Callback):
    def __init__(self, path: Any) -> None:
        self._path = path

    @override
    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, trainer: pl.Trainer, *arguments: Any
    ) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


def test_a_hook_of_no_list_is_local_inside_an_epoch_and_common_elsewhere(
    tmp_path: Any,
) -> None:
    def program(rank: int) -> Any:
        module = Gathers()
        saves = SavesAtStep2(tmp_path / "a.ckpt")
        trainer = trainer_of(gossip(), 2, callbacks=[saves], val_check_interval=3)
        trainer.fit(module, loader(6), loader(2))
        return module.gathered

    for rank, gathered in enumerate(values(learners(2, program))):
        assert gathered == {
            "start of the epoch": [0.0, 1.0],
            "batch": [float(rank)],
            "validation": [0.0, 1.0],
            "checkpoint": [0.0, 1.0],
        }
