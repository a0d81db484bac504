"""Saving beside the training: what is written, in what order, and where errors go."""

import collections
import dataclasses
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.saving import (
    BackgroundCheckpointIO,
    must_wait,
    only_warns,
    snapshot_of,
)
from tests.helpers import PATIENCE_S, until
from tests.learners import Linear, gossip, learners, loader, trainer_of, values


class Gate(TorchCheckpointIO):
    """A write that begins, and ends when it is let."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.written: list[Any] = []
        self.removed: list[Any] = []

    @override
    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        self.written.append(checkpoint)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        return self.written[-1]

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(path)


class FullDisk(TorchCheckpointIO):
    @override
    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        raise OSError(28, "No space left on device", str(path))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        raise AssertionError("nothing was saved")


# --- the snapshot


def test_a_snapshot_shares_nothing_with_what_it_is_of() -> None:
    weights = torch.zeros(3)
    value = {"w": weights, "nested": [{"w": weights[:2]}, (1, "a")], "names": ["x"]}
    snapshot = snapshot_of(value)
    weights.add_(1)
    value["names"].append("y")
    assert snapshot["w"].tolist() == [0, 0, 0]
    assert snapshot["nested"][0]["w"].tolist() == [0, 0]
    assert snapshot["nested"][1] == (1, "a")
    assert snapshot["names"] == ["x"]


def test_tied_tensors_stay_tied_and_views_are_not_taken_for_the_whole() -> None:
    weights = torch.arange(6.0)
    square = weights.view(2, 3)
    snapshot = snapshot_of(
        {"a": weights, "b": weights, "rows": square, "columns": square.t()}
    )
    assert snapshot["a"] is snapshot["b"]
    assert snapshot["rows"].tolist() == square.tolist()
    assert snapshot["columns"].tolist() == square.t().tolist()
    scale = torch.ones(1)
    tied = snapshot_of({"a": scale, "b": scale})
    assert tied["a"] is tied["b"]


def test_a_conjugate_is_not_taken_for_what_it_is_computed_from() -> None:
    wave = torch.tensor([1 + 2j])
    values = [wave, wave.conj(), wave.imag, wave.conj().imag]
    for copied, value in zip(snapshot_of(values), values, strict=True):
        assert torch.equal(copied, value)


def test_a_snapshot_of_a_modules_state_has_the_versions_of_its_layers() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    copy = snapshot_of({"state_dict": state})["state_dict"]
    assert type(copy) is collections.OrderedDict
    assert copy._metadata == state._metadata  # pyright: ignore
    assert [*copy] == [*state]


def test_a_snapshot_may_stay_on_the_device_of_its_tensors() -> None:
    weights = torch.zeros(2, device="meta")
    copy = snapshot_of({"w": weights}, on_host=False)["w"]
    assert copy.device == weights.device
    assert copy is not weights


@dataclasses.dataclass(frozen=True)
class Frozen:
    weights: torch.Tensor
    width: int = 4


class Pair(tuple[int, int]):
    def __new__(cls, first: int, second: int) -> "Pair":
        return super().__new__(cls, (first, second))

    def __getnewargs__(self) -> tuple[int, int]:
        return self[0], self[1]


ORDINARY = {
    "range": range(3),
    "tuple": Pair(1, 2),
    "deque": collections.deque([1, 2], maxlen=2),
    "default": collections.defaultdict(list, a=[1]),
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=[1], a=2),
    "size": torch.Size([2, 3]),
    "set": {1, 2},
    "path": Path("a"),
    "class": Frozen,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_hyper_parameters_of_any_kind_are_copied_as_what_they_are(name: str) -> None:
    value = ORDINARY[name]
    copy = snapshot_of({"hyper_parameters": [value]})["hyper_parameters"][0]
    assert copy == value
    assert type(copy) is type(value)
    assert getattr(copy, "maxlen", None) == getattr(value, "maxlen", None)


def test_objects_are_copied_with_all_that_can_change_in_them() -> None:
    weights, array, counts = torch.zeros(2), numpy.zeros(2), collections.Counter("a")
    layer = torch.nn.Linear(1, 1, dtype=torch.float64)
    tied = torch.nn.ModuleList([layer, layer])
    values = {"object": Frozen(weights), "array": array, "counts": counts, "net": tied}
    copy = snapshot_of({**values, "weights": weights})
    before = layer.weight.item()
    weights.add_(1)
    array += 1
    counts["a"] = 5
    with torch.no_grad():
        layer.weight.add_(1)
    assert copy["object"].weights.tolist() == copy["weights"].tolist() == [0, 0]
    assert copy["array"].tolist() == [0, 0]
    assert copy["counts"] == {"a": 1}
    weight, bias = copy["net"].parameters()
    assert weight.item() == before
    assert weight.requires_grad
    assert bias is copy["net"][1].bias


def test_a_copy_needs_a_gradient_where_its_original_does() -> None:
    """As what `torch.save` would write."""
    weights = torch.zeros(2, requires_grad=True)
    copy = snapshot_of({"w": weights, "object": Frozen(weights.detach())})
    assert copy["w"].requires_grad
    assert not copy["object"].weights.requires_grad


class MakesTensors:
    """Its state is tensors that nobody else holds."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getstate__(self) -> dict[str, Any]:
        return {"value": torch.full((1000,), self.value)}


def test_tensors_that_are_made_to_be_pickled_are_told_apart() -> None:
    copies = snapshot_of([MakesTensors(float(n)) for n in range(5)])
    assert [copy.value[0].item() for copy in copies] == [0, 1, 2, 3, 4]


# --- the thread


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    gate = Gate()
    beside = BackgroundCheckpointIO(gate)
    weights = torch.zeros(1)
    beside.save_in_background({"w": weights}, "a.ckpt")
    assert gate.begun.wait(PATIENCE_S)
    weights.add_(1)  # the next step
    assert gate.written == []
    gate.may_end.set()
    beside.teardown()
    assert gate.written[0]["w"].item() == 0


def test_what_cannot_be_copied_is_left_to_a_write_at_once(tmp_path: Path) -> None:
    """Nothing that the training changes is read beside it."""
    function = lambda: 0  # noqa: E731
    gate = Gate()
    gate.may_end.set()
    BackgroundCheckpointIO(gate).save_in_background({"f": function}, "a.ckpt")
    assert gate.written == [{"f": function}]
    beside = BackgroundCheckpointIO(WholeCheckpointIO())
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        beside.save_in_background({"f": function}, tmp_path / "a.ckpt")
    assert not saving_threads()


@pytest.mark.parametrize("meet", ["save", "load"])
def test_one_checkpoint_at_most_is_on_its_way(meet: str) -> None:
    gate = Gate()
    beside = BackgroundCheckpointIO(gate)
    beside.save_in_background({"n": 1}, "a.ckpt")
    again: dict[str, Callable[[], Any]] = {
        "save": lambda: beside.save_in_background({"n": 2}, "b.ckpt"),
        "load": lambda: beside.load_checkpoint("a.ckpt"),
    }
    second = threading.Thread(target=again[meet])
    second.start()
    assert gate.begun.wait(PATIENCE_S)
    assert second.is_alive()
    gate.may_end.set()
    second.join(PATIENCE_S)
    beside.teardown()
    assert gate.written == [{"n": 1}, {"n": 2}][: 2 if meet == "save" else 1]


@pytest.mark.parametrize("meet", ["save", "wait", "teardown"])
def test_an_error_reaches_the_training_once_with_file_and_cause(meet: str) -> None:
    beside = BackgroundCheckpointIO(FullDisk())
    beside.save_in_background({}, "folder/a.ckpt")
    again: dict[str, Callable[[], None]] = {
        "save": lambda: beside.save_in_background({}, "b.ckpt"),
        "wait": beside.wait,
        "teardown": beside.teardown,
    }
    with pytest.raises(OSError, match=r"No space left.*folder/a\.ckpt"):
        again[meet]()
    beside.teardown()
    assert not saving_threads()


def test_a_save_that_nobody_has_put_in_the_background_is_there_at_once(
    tmp_path: Path,
) -> None:
    """As of Lightning's launcher, whose process ends right after its save."""
    beside = BackgroundCheckpointIO(WholeCheckpointIO())
    beside.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True) == {"n": 1}
    assert not saving_threads()


def test_a_thread_that_cannot_start_is_an_error_of_its_save_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    beside = BackgroundCheckpointIO(TorchCheckpointIO())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            beside.save_in_background({}, "a.ckpt")
    beside.teardown()


def test_an_error_in_the_foreground_is_raised_by_the_save_itself() -> None:
    beside = BackgroundCheckpointIO(FullDisk())
    with pytest.raises(OSError, match=r"No space left.*a\.ckpt"):
        beside.save_checkpoint({}, "a.ckpt")
    beside.teardown()


def test_an_error_of_a_save_does_not_keep_an_interrupted_training_from_the_next() -> (
    None
):
    written: list[str] = []

    class FullOnce(FullDisk):
        @override
        def save_checkpoint(
            self, checkpoint: Any, path: Any, storage_options: Any = None
        ) -> None:
            if path == "a.ckpt":
                super().save_checkpoint(checkpoint, path)
            written.append(path)

    beside = BackgroundCheckpointIO(FullOnce())
    beside.hurry_if(lambda: True)
    beside.save_in_background({}, "a.ckpt")
    with pytest.warns(UserWarning, match="No space left"):
        beside.save_checkpoint({}, "b.ckpt")
    with pytest.warns(UserWarning, match="No space left"), only_warns(lambda: True):
        beside.save_checkpoint({}, "a.ckpt")
    assert written == ["b.ckpt"]


def test_a_thread_ends_with_its_save_though_nobody_waits(tmp_path: Path) -> None:
    beside = BackgroundCheckpointIO(TorchCheckpointIO())
    beside.save_in_background({"n": 1}, tmp_path / "a.ckpt")
    until(lambda: not saving_threads(), "the end of the thread")
    assert beside.load_checkpoint(tmp_path / "a.ckpt") == {"n": 1}


def test_a_snapshot_goes_once_it_is_written_though_nobody_waits() -> None:
    written = list[weakref.ref[Any]]()

    class Notes(TorchCheckpointIO):
        @override
        def save_checkpoint(self, checkpoint: Any, *_: Any, **__: Any) -> None:
            written.append(weakref.ref(checkpoint["w"]))

    beside = BackgroundCheckpointIO(Notes())
    beside.save_in_background({"w": torch.zeros(1)}, "a.ckpt")
    until(lambda: not saving_threads(), "the end of the thread")
    assert [one() for one in written] == [None]
    beside.teardown()


def test_the_end_of_the_plugin_comes_though_a_save_has_failed() -> None:
    ended = list[str]()

    class Ends(FullDisk):
        @override
        def teardown(self) -> None:
            ended.append("ended")

    beside = BackgroundCheckpointIO(Ends())
    beside.save_in_background({}, "a.ckpt")
    with pytest.raises(OSError, match="No space left"):
        beside.teardown()
    assert ended == ["ended"]


def saving_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("adpsgd-save")]


def test_the_old_checkpoint_is_removed_after_the_new_one_is_there() -> None:
    gate = Gate()
    beside = BackgroundCheckpointIO(gate)
    beside.remove_checkpoint("nothing was on its way")
    beside.save_in_background({}, "b.ckpt")
    beside.remove_checkpoint("a.ckpt")
    assert len(gate.removed) == 1
    gate.may_end.set()
    beside.wait()
    assert gate.removed[1:] == ["a.ckpt"]
    beside.teardown()


def test_the_old_checkpoint_stays_if_the_new_one_could_not_be_written() -> None:
    beside = BackgroundCheckpointIO(FullDisk())
    beside.save_in_background({}, "b.ckpt")
    beside.remove_checkpoint("a.ckpt")
    with pytest.raises(OSError, match="No space left"):
        beside.teardown()


class Uploads:
    """As a logger that uploads."""

    _log_model = "all"


@pytest.mark.parametrize(
    ("change", "path", "waits"),
    [
        ({}, "a.ckpt", False),
        ({}, "folder/hpc_ckpt_3.ckpt", True),
        ({}, "hpc_ckpt_3/a.ckpt", False),
        ({"interrupted": True}, "a.ckpt", True),
        ({"fn": TrainerFn.VALIDATING}, "a.ckpt", True),
        ({"status": TrainerStatus.FINISHED}, "a.ckpt", True),
        ({"loggers": [object(), Uploads()]}, "a.ckpt", True),
        ({"loggers": [object()]}, "a.ckpt", False),
    ],
)
def test_a_save_is_waited_for_where_somebody_reads_it_at_once(
    change: dict[str, Any], path: str, waits: bool
) -> None:
    state = {"fn": TrainerFn.FITTING, "status": TrainerStatus.RUNNING}
    known = {"interrupted": False, "loggers": [], **state, **change}
    trainer: Any = SimpleNamespace(**known, state=SimpleNamespace(**known))
    assert must_wait(trainer, path) is waits


def test_without_a_trainer_each_save_is_waited_for() -> None:
    assert must_wait(None, "a.ckpt")


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_error_of_the_last_save_ends_the_training_or_is_a_warning(
    interrupted: bool,
) -> None:
    beside = BackgroundCheckpointIO(FullDisk())
    beside.hurry_if(lambda: interrupted)
    beside.save_in_background({}, "a.ckpt")
    if interrupted:
        with pytest.warns(UserWarning, match="No space left"):
            beside.finish()
    else:
        with pytest.raises(OSError, match="No space left"):
            beside.finish()
    assert not saving_threads()


def test_tensors_of_one_place_are_copied_by_what_they_are() -> None:
    weights = torch.arange(6.0)
    values = {
        "floats": weights,
        "bits": weights.view(torch.int32),
        "first": weights[:3],
        "strided": weights[::2],
        "empty": torch.zeros(0),
        "sparse": weights.to_sparse(),
        "gradient": torch.ones(2, requires_grad=True),
    }
    snapshot = snapshot_of(values)
    for name, value in values.items():
        assert snapshot[name].dtype == value.dtype
        assert torch.equal(snapshot[name].to_dense(), value.detach().to_dense())
        assert snapshot[name].requires_grad == value.requires_grad
    assert snapshot["sparse"].layout == torch.sparse_coo


# --- in a Trainer


class Weights(Callback):
    """The weights at each save, by the number of the step."""

    def __init__(self) -> None:
        self.at: dict[int, torch.Tensor] = {}

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Any
    ) -> None:
        weights = checkpoint["state_dict"]["weight"]
        self.at[trainer.global_step] = weights.clone()


def save_each_step(folder: Path, **arguments: Any) -> Trainer:
    saver = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    return trainer_of(
        gossip(), 1, callbacks=[saver], enable_checkpointing=True, **arguments
    )


@pytest.mark.parametrize("plugins", [[], [WholeCheckpointIO()]])
def test_each_checkpoint_holds_the_weights_of_its_step(
    tmp_path: Path, plugins: list[Any]
) -> None:
    trainer = save_each_step(tmp_path, plugins=plugins)
    weights = Weights()
    trainer.callbacks.append(weights)  # pyright: ignore
    trainer.fit(Linear(), loader(6))
    assert sorted(weights.at) == [1, 2, 3, 4, 5, 6]
    for step, expected in weights.at.items():
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert saved["state_dict"]["weight"].equal(expected)


class Versions(Linear):
    """Its weights are those of the second version; older files are converted."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.weight

    @override
    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, *args, **options
        )


@pytest.mark.parametrize("num_learners", [1, 2])
def test_a_checkpoint_says_the_versions_of_layers_and_holds_tied_weights_once(
    tmp_path: Path, num_learners: int
) -> None:
    path = tmp_path / "a.ckpt"

    def program(rank: int) -> None:
        class Saves(Callback):
            @override
            def on_train_epoch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
                trainer.save_checkpoint(path)

        trainer = trainer_of(gossip(), num_learners, callbacks=[Saves()])
        trainer.fit(Versions(), loader(4))

    values(learners(num_learners, program))
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state["weight"].data_ptr() == state["tied"].data_ptr()
    assert state["weight"].untyped_storage().nbytes() == state["weight"].nbytes
    Versions().load_state_dict(state)


def test_what_is_saved_after_the_training_is_there_at_once(tmp_path: Path) -> None:
    trainer, path = save_each_step(tmp_path), tmp_path / "after.ckpt"
    trainer.fit(Linear(), loader(6))
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["global_step"] == 6
    assert not saving_threads()


@pytest.mark.parametrize("io", [FullDisk(), BackgroundCheckpointIO(FullDisk())])
def test_a_full_disk_ends_the_training_with_file_and_cause(
    tmp_path: Path, io: Any
) -> None:
    trainer = save_each_step(tmp_path, plugins=[io])
    with pytest.raises(OSError, match=r"No space left.*step=\d\.ckpt"):
        trainer.fit(Linear(), loader(6))


def test_an_exception_of_the_training_is_not_hidden_by_one_of_a_save(
    tmp_path: Path,
) -> None:
    class Fails(Linear):
        @override
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("of the training")
            return super().training_step(batch, batch_idx)

    trainer = save_each_step(tmp_path, plugins=[BackgroundCheckpointIO(FullDisk())])
    with (
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(ValueError, match="of the training"),
    ):
        trainer.fit(Fails(), loader(6))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_fit_end"])
def test_what_a_save_after_an_exception_was_to_replace_stays(
    tmp_path: Path, hook: str
) -> None:
    """That save may have failed, which is only a warning."""
    old = tmp_path / "old.ckpt"
    old.touch()

    class FullNow(FullDisk):
        remove_checkpoint = TorchCheckpointIO.remove_checkpoint

    class Replaces(Callback):
        """As `ModelCheckpoint(save_on_exception=True)` with a name of the step."""

        @override
        def on_exception(self, trainer: Trainer, *_: Any, **__: Any) -> None:
            trainer.save_checkpoint(tmp_path / "new.ckpt")
            trainer.strategy.remove_checkpoint(old)

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("of the training")

    setattr(Replaces, hook, fails)
    plugin = BackgroundCheckpointIO(FullNow())
    trainer = trainer_of(gossip(), 1, callbacks=[Replaces()], plugins=[plugin])
    with (
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(ValueError, match="of the training"),
    ):
        trainer.fit(Linear(), loader(2))
    assert old.exists()


def test_what_an_exception_left_goes_when_training_ends_well_after_sigterm(
    tmp_path: Path,
) -> None:
    """The next training would resume from it."""

    saver = OnExceptionCheckpoint(tmp_path)

    class ToldAtTheEnd(Callback):
        @override
        def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
            Path(saver.ckpt_path).touch()
            trainer._signal_connector.received_sigterm = True

    callbacks = [saver, ToldAtTheEnd()]
    trainer = trainer_of(gossip(), 1, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Linear(), loader(2))
    assert trainer.received_sigterm
    assert not [*tmp_path.iterdir()]


def test_the_default_is_replaced_by_what_the_user_gives() -> None:
    assert isinstance(gossip().checkpoint_io, BackgroundCheckpointIO)
    # Lightning's own tests, and callbacks, ask whether it is torch's.
    assert isinstance(gossip().checkpoint_io, TorchCheckpointIO)
    given = TorchCheckpointIO()
    assert trainer_of(gossip(), 1, plugins=[given]).strategy.checkpoint_io is given
    assert gossip(checkpoint_io=given).checkpoint_io is given


class SlowDisk(TorchCheckpointIO):
    """Its writes end long after a learner that waits for none has left `fit`."""

    @override
    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        threading.Event().wait(1.0)
        super().save_checkpoint(*arguments, **options)


class SavesAtTheEnd(Callback):
    """As Lightning's does with `save_last`, when learners gossip no more."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self._path)


@pytest.mark.parametrize("size", [1, 2])
def test_all_learners_find_the_files_when_fit_returns(
    tmp_path: Path, size: int
) -> None:
    def program(rank: int) -> bool:
        strategy = gossip(super_learner_size=size)
        strategy.checkpoint_io = BackgroundCheckpointIO(SlowDisk())
        path = tmp_path / "a.ckpt"
        saves = {"callbacks": [SavesAtTheEnd(path)]}
        trainer_of(strategy, 2, **saves).fit(Linear(), loader(4))
        return path.exists()

    assert values(learners(2, program)) == [True, True]
