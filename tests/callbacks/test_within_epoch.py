"""When `SaveWithinEpoch` saves, with the claims of an epoch told by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_adpsgd.callbacks import SaveWithinEpoch


class Shared:
    """A trainer whose learners share an epoch of 11 batches, and agree to go on."""

    def __init__(self, epoch: int = 0) -> None:
        self.num_claimed, self.saved = 0, list[int]()
        under_way = SimpleNamespace(number=epoch, units=range(11), last_claim=self)
        sharing = SimpleNamespace(under_way=under_way, all_go_on=lambda at_last: True)
        self.strategy = SimpleNamespace(work_sharing=sharing, super_learner_size=1)
        progress = SimpleNamespace(is_last_batch=False)
        epoch_loop = SimpleNamespace(batch_progress=progress)
        self.fit_loop = SimpleNamespace(epoch_loop=epoch_loop)

    def save_checkpoint(self, path: Any) -> None:
        self.saved.append(self.num_claimed)
        self.path = path

    def fit(self, callback: SaveWithinEpoch) -> list[int]:
        """Trains the epoch; returns after how many batches it was saved."""
        trainer: Any = self
        callback.on_train_start(trainer, None)  # pyright: ignore
        for self.num_claimed in range(1, 12):
            callback.on_train_batch_end(trainer)
        return self.saved


def test_an_epoch_is_saved_after_every_n_batches_but_the_last() -> None:
    assert Shared().fit(SaveWithinEpoch("a.ckpt", 4)) == [4, 8]


def test_it_is_saved_where_the_program_says() -> None:
    trainer, url = Shared(), "s3://bucket/a.ckpt"
    trainer.fit(SaveWithinEpoch(url, 4))
    assert str(trainer.path) == url


def test_a_second_training_saves_as_the_first_did() -> None:
    callback = SaveWithinEpoch("a.ckpt", 4)
    assert Shared().fit(callback) == Shared().fit(callback) == [4, 8]


@pytest.mark.parametrize(
    "strategy", [SimpleNamespace(), SimpleNamespace(work_sharing=None)]
)
def test_where_learners_get_equal_shares_a_training_is_told_that_nothing_is_written(
    strategy: SimpleNamespace,
) -> None:
    callback, trainer = SaveWithinEpoch("a.ckpt", 4), Shared()
    trainer.strategy = strategy
    with pytest.warns(UserWarning, match="writes nothing here") as told:
        assert trainer.fit(callback) == []
    assert len(told) == 1
    assert "ModelCheckpoint(every_n_train_steps=...)" in str(told[0].message)


@pytest.mark.filterwarnings("error")
def test_where_they_share_epochs_it_is_not() -> None:
    Shared().fit(SaveWithinEpoch("a.ckpt", 4))
