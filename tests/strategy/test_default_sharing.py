"""Which trainings share their epochs if nothing is said, and what they are told."""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from typing_extensions import override

from lightning_adpsgd.callbacks import SaveWithinEpoch
from lightning_adpsgd.strategy import default_sharing
from tests.learners import (
    VALIDATES_BY_TIME,
    Linear,
    Rows,
    gossip,
    learners,
    trainer_of,
    values,
)

HOUR = {"hours": 1}
SHARED, EQUAL = "SharedBatches", "BatchSampler"


class Scheduled(Linear):
    """By steps if its rate changes with them, else by epochs."""

    by_steps = True

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = StepLR(optimizer, 1)
        interval = "step" if self.by_steps else "epoch"
        return [optimizer], [{"scheduler": schedule, "interval": interval}]


class ByEpochs(Scheduled):
    by_steps = False


class ByHand(ByEpochs):
    """Steps its schedule itself, which nobody can know in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def on_train_epoch_end(self) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()


class OneCycle(Linear):
    """Asks how many steps there will be, and raises after one too many."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        num_steps = int(self.trainer.estimated_stepping_batches)
        assert num_steps == 2
        schedule = OneCycleLR(optimizer, 0.1, total_steps=num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class AsksInStep(Linear):
    """Computes its learning rate by itself, from steps that nobody can count."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        done = self.trainer.global_step / self.trainer.estimated_stepping_batches
        assert 0 <= done <= 1
        return super().training_step(batch, batch_idx)


class AsksElsewhere(AsksInStep):
    """Inherits that, and asks in a property too."""

    @property
    def length(self) -> float:
        return float(self.trainer.num_training_batches)

    @override
    def configure_optimizers(self) -> Any:
        def is_last(step: int) -> bool:
            return step == self.trainer.num_training_batches

        assert callable(is_last)
        return super().configure_optimizers()


class AsksInside(Linear):
    @override
    def on_train_start(self) -> None:
        self.rate = lambda step: step / self.trainer.num_training_batches


class AsksForLength(Linear):
    @override
    def on_train_start(self) -> None:
        assert len(self.trainer.train_dataloader) == 2  # pyright: ignore


class Asking(Callback):
    """Schedules by itself, as callbacks that move an average do."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **more: Any) -> None:
        assert 0 < trainer.global_step / trainer.estimated_stepping_batches <= 1


class AsksUnderOtherNames(Callback):
    """Calls the trainer as it likes, as any callback may."""

    @override
    def on_train_start(self, t: pl.Trainer, m: Any) -> None:  # pyright: ignore
        assert t.estimated_stepping_batches > 0


class AsksLater(Callback):
    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rate = lambda step: step / trainer.num_training_batches


class SetsRate(Callback):
    """Decays the rate with the batches of this learner, as callbacks of GPTs do."""

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] / 2


class ScalesRate(Callback):
    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class UpdatesRate(Callback):
    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        trainer.optimizers[0].param_groups[0].update(lr=0.05)


class WarmsUp(Linear):
    """As Lightning's documentation does."""

    @override
    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
        super().optimizer_step(*arguments, **named)


class HasCallback(Linear):
    """A callback that only the module knows, as a moving average of its own is."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Asking()


class ReadsRate(Callback):
    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
        trainer.callback_metrics["rate"] = torch.tensor(0.1)


class KeepsRate(Linear):
    """Keeps a rate in a dictionary of its own."""

    @override
    def on_train_start(self) -> None:
        self.settings = {"lr": 0.1}
        self.settings["lr"] = 0.05


class Thaws(BaseFinetuning):
    """Lowers the rate as it thaws layers, which Lightning does by epochs."""

    @override
    def freeze_before_training(self, pl_module: Any) -> None: ...

    @override
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05


class SetsRateOfEpoch(Callback):
    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.05


class SavesInBatch(Callback):
    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == 9:
            trainer.save_checkpoint("of_nobody.ckpt")


this_module = sys.modules[__name__]


def meet_others() -> None:
    dist.all_reduce(torch.zeros(1))


class MeetsInFunction(Callback):
    """Meets the others in some batches, in a function that a method names."""

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step % 5 == 0:
            meet_others()


class MeetsByModule(Callback):
    """The same, by the name of the module."""

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step % 5 == 0:
            this_module.meet_others()


class Meeting:
    """A part of a callback or of a module."""

    def in_batch(self) -> None:
        dist.all_reduce(torch.zeros(1))


class HasPart(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.part = Meeting()


class MeetsInPart(HasPart):
    """The same, in a method of a part."""

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step % 5 == 0:
            self.part.in_batch()


class MeetingLoss(nn.Module, Meeting):
    pass


class HasMeetingLoss(Linear):
    """The same, in a module that is a part of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = MeetingLoss()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.part.in_batch()


class MeetsInPartAtEnds(HasPart):
    """Names the part in batches, and its method where all come."""

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        assert self.part

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.part.in_batch()


class Forward(nn.Module):
    @override
    def forward(self, batch: Tensor) -> Tensor:
        dist.all_reduce(batch)
        return batch


class CallsPart(Linear):
    """Names a part, and a method of its own; the part has another, which meets."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Forward()

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert self.part
        assert self.forward


class Odd:
    """A part of which little can be asked."""

    __module__ = property(lambda self: "odd")  # type: ignore[assignment]
    go = SimpleNamespace(__code__=3, func=None)


class HasOddParts(Callback):
    """Attributes with names that modules use, and of odd types."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = ["encoder"]
        self.part = Odd()

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        assert self.part.go


class MeetsAtEnds(Callback):
    """Meets the others where all come."""

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        meet_others()


class MeetsInBatch(Linear):
    """Meets the others in a hook in which nothing sees it, and not in each batch."""

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            dist.all_reduce(torch.zeros(1))


class GathersInBatch(Linear):
    @override
    def on_after_backward(self) -> None:
        dist.all_gather_object([None, None], 0)


class GathersByLightning(Linear):
    """Gathers over its super-learner alone, and meets the others where all come."""

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.all_gather(torch.zeros(1))

    @override
    def on_train_epoch_end(self) -> None:
        dist.barrier()


class HasItsOwn(Linear):
    """An attribute of the module has the name of one of the Trainer's."""

    num_training_batches = 4

    @override
    def on_train_start(self) -> None:
        assert self.num_training_batches == 4


class Pairs(Linear):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


class Stream(IterableDataset[Tensor]):
    @override
    def __iter__(self) -> Any:
        return iter(Rows(8).rows)


def rows(length: int = 8, **arguments: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(length), **{"batch_size": 2, **arguments})


class Counts(DataLoader[Tensor]):
    """Takes as many batches as it has, as loaders that keep their workers do."""

    @override
    def __iter__(self) -> Any:
        batches = super().__iter__()
        for _ in range(len(self)):
            yield next(batches)


class KeepsItsPlace(DataLoader[Tensor]):
    """As torchdata's `StatefulDataLoader`, whose place Lightning saves and restores."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Would skip batches that no learner of a shared epoch has claimed."""


class Case:
    """A training: its module, its loader by rank, and what it is told."""

    def __init__(
        self,
        expected: str,
        told: str,
        loader: Callable[[int], Any] = lambda rank: rows(shuffle=True),
        module: type[Linear] = Linear,
        dials: dict[str, Any] | None = None,
        arguments_of: Callable[[int], dict[str, Any]] = lambda rank: {},
        **arguments: Any,
    ) -> None:
        self.expected, self.told = expected, told
        self.loader, self.module = loader, module
        self.dials, self.arguments = dials or {}, arguments
        self.arguments_of = arguments_of

    def fit(self, rank: int, ckpt_path: Any = None) -> tuple[str, list[str], Any]:
        told: list[str] = []

        def say(text: str, *parts: str) -> None:
            told.append(text % parts if parts else text)

        default_sharing.rank_zero_info = say  # pyright: ignore
        strategy = gossip(**self.dials)
        arguments = {"use_distributed_sampler": True, **self.arguments}
        arguments |= self.arguments_of(rank)
        trainer = trainer_of(strategy, 2, **arguments)
        trainer.fit(self.module(), self.loader(rank), ckpt_path=ckpt_path)
        loaders: Any = trainer.train_dataloader
        one = loaders["a"] if isinstance(loaders, dict) else loaders
        return type(one.batch_sampler).__name__, told, trainer


def weighted() -> DataLoader[Tensor]:
    return rows(sampler=WeightedRandomSampler([1.0] * 8, 8))


def out_of_order() -> DataLoader[Tensor]:
    """Set afterwards, because torch before 2.7 has no such argument."""
    loader: Any = rows(24, num_workers=1)
    loader.in_order = False
    return loader


CASES = {
    "nothing is said": Case(SHARED, "Learners share their epochs"),
    "ready pairs": Case(
        SHARED, "Learners share", dials={"communication": "ready_pairs"}
    ),
    "in order": Case(SHARED, "Learners share", lambda rank: rows()),
    "rate by epochs": Case(SHARED, "Learners share", module=ByEpochs),
    "equal shares": Case(EQUAL, "", dials={"work_sharing": False}),
    "asked": Case(SHARED, "", dials={"work_sharing": True}),
    "synchronous": Case(EQUAL, "", dials={"communication": "sync"}),
    "dealt by the program": Case(EQUAL, "", use_distributed_sampler=False),
    "a few batches": Case(EQUAL, "", fast_dev_run=2),
    "steps": Case(EQUAL, "`max_steps` must be -1", max_steps=2),
    "time": Case(EQUAL, "`max_time` must not be set", max_time=HOUR),
    "validation by time": Case(
        EQUAL, "`val_check_interval` must not be set", val_check_interval="00:01:00:00"
    ),
    "validation of each batch": Case(
        EQUAL, "`val_check_interval` must be 1.0", val_check_interval=1
    ),
    "something of one learner": Case(
        EQUAL, "`min_steps`", arguments_of=lambda r: {"min_steps": 1} if not r else {}
    ),
    "something of another learner": Case(
        EQUAL,
        "differ in loaders or",
        arguments_of=lambda r: {"min_steps": 1} if r else {},
    ),
    "averages": Case(
        EQUAL, "`StochasticWeight", callbacks=[StochasticWeightAveraging(0.1)]
    ),
    "places": Case(
        "PlacedBatches", "`save_learners` keeps", dials={"save_learners": True}
    ),
    "rate by steps": Case(EQUAL, "scheduled by steps", module=Scheduled),
    "rate by hand": Case(EQUAL, "manual optimization", module=ByHand),
    "steps are asked for": Case(EQUAL, "asks how many steps", module=OneCycle),
    "a step asks": Case(
        EQUAL, "`AsksInStep.training_step` asks how many", module=AsksInStep
    ),
    "a property asks": Case(
        EQUAL, "`AsksElsewhere.length` asks how many", module=AsksElsewhere
    ),
    "a function in a hook asks": Case(
        EQUAL, "`AsksInside.on_train_start` asks how many", module=AsksInside
    ),
    "a length is asked for": Case(
        EQUAL, "`AsksForLength.on_train_start` asks how many", module=AsksForLength
    ),
    "a callback asks": Case(
        EQUAL, "`Asking.on_train_batch_end` asks how many", callbacks=[Asking()]
    ),
    "a callback asks a trainer of another name": Case(
        EQUAL,
        "`AsksUnderOtherNames.on_train_start` asks how many",
        callbacks=[AsksUnderOtherNames()],
    ),
    "a function in a callback asks": Case(
        EQUAL, "`AsksLater.on_train_start` asks how many", callbacks=[AsksLater()]
    ),
    "a callback of Lightning asks": Case(
        SHARED,
        "Learners share",
        callbacks=[TQDMProgressBar()],
        enable_progress_bar=True,
    ),
    "a callback sets the rate": Case(
        EQUAL, "`SetsRate.on_train_batch_end` sets a", callbacks=[SetsRate()]
    ),
    "a callback scales the rate": Case(
        EQUAL, "`ScalesRate.on_train_batch_end` sets a", callbacks=[ScalesRate()]
    ),
    "a callback updates the rate": Case(
        EQUAL, "`UpdatesRate.on_train_batch_end` sets a", callbacks=[UpdatesRate()]
    ),
    "a module warms up": Case(EQUAL, "`WarmsUp.optimizer_step` sets a", module=WarmsUp),
    "a callback of the module asks": Case(
        EQUAL, "`Asking.on_train_batch_end` asks how many", module=HasCallback
    ),
    "a rate of its own": Case(SHARED, "Learners share", module=KeepsRate),
    "layers are thawed": Case(SHARED, "Learners share", callbacks=[Thaws()]),
    "a callback reads the rate": Case(
        SHARED, "Learners share", callbacks=[ReadsRate()]
    ),
    "a callback sets the rate of an epoch": Case(
        SHARED, "Learners share", callbacks=[SetsRateOfEpoch()]
    ),
    "a callback saves in batches": Case(
        EQUAL, "`SavesInBatch.on_train_batch_end` meets", callbacks=[SavesInBatch()]
    ),
    "a function of a hook of a batch meets": Case(
        EQUAL,
        "`MeetsInFunction.on_train_batch_end` meets",
        callbacks=[MeetsInFunction()],
    ),
    "a function of a module meets": Case(
        EQUAL, "`MeetsByModule.on_train_batch_end` meets", callbacks=[MeetsByModule()]
    ),
    "a part of a callback meets": Case(
        EQUAL, "`MeetsInPart.on_train_batch_end` meets", callbacks=[MeetsInPart()]
    ),
    "a part of the module meets": Case(
        EQUAL, "`HasMeetingLoss.on_train_batch_end` meets", module=HasMeetingLoss
    ),
    "a part has another method of that name": Case(
        SHARED, "Learners share", module=CallsPart
    ),
    "parts are odd": Case(SHARED, "Learners share", callbacks=[HasOddParts()]),
    "a part meets where all come": Case(
        SHARED, "Learners share", callbacks=[MeetsInPartAtEnds()]
    ),
    "a function of a hook of an epoch meets": Case(
        SHARED, "Learners share", callbacks=[MeetsAtEnds()]
    ),
    "a hook of a batch meets": Case(
        EQUAL, "`MeetsInBatch.on_train_batch_end` meets", module=MeetsInBatch
    ),
    "a hook of a batch gathers": Case(
        EQUAL, "`GathersInBatch.on_after_backward` meets", module=GathersInBatch
    ),
    "hooks meet where all come": Case(
        SHARED, "Learners share", module=GathersByLightning
    ),
    "a name of its own": Case(SHARED, "Learners share", module=HasItsOwn),
    "two loaders": Case(
        EQUAL,
        "a single training",
        lambda rank: {"a": rows(), "b": rows()},
        module=Pairs,
    ),
    "own sampler": Case(EQUAL, "a sampler of its own", lambda rank: weighted()),
    "short": Case(EQUAL, "few batches", lambda rank: rows(batch_size=3)),
    "held ahead": Case(EQUAL, "few batches", lambda rank: rows(num_workers=1)),
    "out of order": Case(
        EQUAL, "`in_order` of the training", lambda rank: out_of_order()
    ),
    "unlike": Case(EQUAL, "learners differ in loaders", lambda r: rows(8 + 2 * r)),
    "a place of its own": Case(
        EQUAL,
        "keeps no place of its own",
        lambda rank: KeepsItsPlace(Rows(8), batch_size=2, shuffle=True),
    ),
    "a loader that counts": Case(
        EQUAL,
        "iterates in a way of its own",
        lambda rank: Counts(Rows(8), batch_size=2, shuffle=True),
    ),
    "a stream": Case(EQUAL, "", lambda rank: DataLoader(Stream(), batch_size=2)),
}
if not VALIDATES_BY_TIME:
    del CASES["validation by time"]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[str, list[str]]]]:
    """What each learner's trainings were like: its batch sampler, what it was told."""

    def program(rank: int) -> Any:
        return {name: case.fit(rank)[:2] for name, case in CASES.items()}

    return values(learners(2, program))


@pytest.mark.parametrize("name", CASES)
def test_epochs_are_shared_where_lightning_would_deal_them_and_nothing_counts(
    outcomes: Any, name: str
) -> None:
    case, first = CASES[name], outcomes[0][name]
    assert [outcome[name][0] for outcome in outcomes] == [case.expected] * 2
    assert len(first[1]) == bool(case.told)
    assert case.told in "".join(first[1])


@pytest.mark.parametrize("work_sharing", [False, None])
def test_equal_shares_after_a_part_of_a_shared_epoch_say_so(
    tmp_path: Path, work_sharing: bool | None
) -> None:
    path = tmp_path / "within.ckpt"
    saver = {"callbacks": [SaveWithinEpoch(path, 4)], "max_epochs": 1}
    shared = Case(SHARED, "", lambda rank: rows(16), **saver)
    asks = Linear if work_sharing is False else AsksInStep
    dials = {"work_sharing": work_sharing}
    equal = Case(EQUAL, "", lambda rank: rows(16), module=asks, dials=dials)
    cases = equal, shared

    def program(rank: int) -> list[str]:
        shared.fit(rank)
        return [warnings_of(lambda one=one: one.fit(rank, path)) for one in cases]

    first, second = values(learners(2, program))
    told = r"within epoch 0, .* \d+ of its 16 samples were left\. .*`work_sharing=True`"
    assert re.search(told, first[0])
    assert "were left" not in "".join([first[1], *second])


def warnings_of(action: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return "".join(str(one.message) for one in found)


def test_a_resume_within_equal_shares_keeps_them_and_one_at_an_end_shares(
    tmp_path: Path,
) -> None:
    equal = Case(EQUAL, "", max_steps=1, dials={"work_sharing": False})
    default = Case(SHARED, "", max_epochs=2)

    def program(rank: int) -> Any:
        found = []
        for name, case in (("within", equal), ("end", Case(SHARED, ""))):
            path = tmp_path / f"{name}.ckpt"
            case.fit(rank)[2].save_checkpoint(path)
            found.append(default.fit(rank, path)[:2])
        return found

    within, end = values(learners(2, program))[0]
    assert within[0] == EQUAL
    assert "within an epoch of equal shares" in within[1][0]
    assert end[0] == SHARED
