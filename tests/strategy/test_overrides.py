"""What is replaced of Lightning: put back, by one owner, and all of it in one table."""

import ast
import inspect
import pickle
import re
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.fabric
import lightning.fabric.strategies.ddp as fabric_ddp
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from packaging.version import Version
from torch import Tensor, nn
from typing_extensions import override

import lightning_adpsgd
from lightning_adpsgd.callbacks import allreduce
from lightning_adpsgd.coordination.store import LearnerFailed, LearnerFollows
from lightning_adpsgd.import_names import lightning_version
from lightning_adpsgd.strategy import (
    clocks,
    compatibility,
    default_sharing,
    fabric,
    fast_forward,
    gradients,
    launchers,
    loop_iterators,
    model_parallel,
    module_jobs,
    options,
    run,
    scope,
    signals,
    weight_callbacks,
    work_sharing,
)
from lightning_adpsgd.strategy import trainer as trainer_face
from lightning_adpsgd.strategy.checkpoints import (
    contents,
    file_names,
    io,
    last_good,
    mid_epoch,
    saving,
)
from lightning_adpsgd.strategy.overrides import REPLACED, Names, Overrides
from lightning_adpsgd.virtual import objective
from lightning_adpsgd.virtual import strategy as virtual_strategy
from tests.learners import (
    Linear,
    Sampled,
    gossip,
    learners,
    loader,
    trainer_of,
    values,
)
from tests.strategy.private_names import READ

MODULES = (
    *(
        fast_forward,
        fabric,
        trainer_face,
        work_sharing,
        contents,
        io,
        last_good,
        loop_iterators,
        mid_epoch,
    ),
    *(default_sharing, saving, clocks, compatibility, launchers, module_jobs, options),
    *(file_names, model_parallel, gradients, run, scope, signals, weight_callbacks),
    *(allreduce, objective, virtual_strategy),
)
PACKAGE = Path(str(lightning_adpsgd.__file__)).parent


# --- replace and undo


def replaced_by(target: Any) -> dict[str, Any]:
    names = {name for row in REPLACED for name in row.names.split()}
    return {name: value for name, value in vars(target).items() if name in names}


def test_what_is_replaced_comes_back_last_first() -> None:
    trainer = trainer_of("ddp", 1)
    loop, mine = trainer.fit_loop, Overrides()
    mine.replace(loop, "on_run_end", print)
    mine.replace(loop.epoch_loop, "run", print)
    assert loop.on_run_end is print
    mine.undo()
    mine.undo()
    assert replaced_by(loop) == replaced_by(loop.epoch_loop) == {}
    mine.replace(loop, "on_run_end", len)
    assert loop.on_run_end is len


def test_a_second_owner_is_refused() -> None:
    loop, mine = trainer_of("ddp", 1).fit_loop, Overrides()
    mine.replace(loop, "on_run_end", print)
    with pytest.raises(RuntimeError, match=r"_FitLoop\.on_run_end.*one owner"):
        mine.replace(loop, "on_run_end", len)
    assert loop.on_run_end is print


def objects_of(trainer: pl.Trainer) -> list[Any]:
    connectors = (
        trainer._data_connector,
        trainer._signal_connector,
        trainer._checkpoint_connector,
    )
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore
    loop = trainer.fit_loop
    loops = (loop, loop.epoch_loop, loop.epoch_loop.val_loop, loop._data_source)
    return [*loops, trainer.strategy.launcher, *connectors, *callbacks]


def state_of(trainer: pl.Trainer) -> dict[tuple[str, str], Any]:
    """All replaced attributes of a Trainer's objects, by class and name."""
    return {
        (type(one).__name__, name): value
        for one in objects_of(trainer)
        for name, value in replaced_by(one).items()
    }


class Looks(Sampled):
    """Notes in the middle of training what is replaced; fails if it is told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.seen = fails, set[Any]()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = set(state_of(self.trainer))
        if self.fails:
            dist.barrier()  # or the slower one might be stopped before it has looked
            raise ValueError("of the training")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back_after_training_and_after_an_exception(
    fails: bool, tmp_path: Path
) -> None:
    def fit(*callbacks: Any, **dials: Any) -> tuple[set[Any], set[Any]]:
        trainer = trainer_of(
            gossip(**dials),
            2,
            use_distributed_sampler=not dials,
            enable_checkpointing=True,
            default_root_dir=tmp_path,
            callbacks=list(callbacks),
        )
        module = Looks(fails)
        # Whoever is slower may be told of the other's error before its own.
        errors = (ValueError, LearnerFailed, LearnerFollows)
        with pytest.raises(errors, match=r"of the|^1$") if fails else nullcontext():
            trainer.fit(module)
        return module.seen, set(state_of(trainer))

    def program(rank: int) -> Any:
        hour = timedelta(hours=1)
        saves = ModelCheckpoint(train_time_interval=hour, save_top_k=0)
        prunes = ModelPruning("l1_unstructured", parameter_names=["weight"])
        # SWA does not copy weights that are pruned.
        counts = (Timer(hour), saves, StochasticWeightAveraging(0.1))
        return fit(*counts, save_learners=True), fit(prunes)

    # A launcher belongs to its strategy, and keeps what runs there.
    launcher = {("_SubprocessScriptLauncher", "launch")}
    in_table = {(row.of, name) for row in REPLACED for name in row.names.split()}
    of_islands = {("_TrainingEpochLoop", "_save_loggers_on_train_batch_end")}
    in_table = in_table - {("_Launcher", "launch")} - of_islands | launcher
    # What clips is replaced with tensor parallelism alone.
    in_table -= {("Precision", f"clip_grad_by_{kind}") for kind in ("norm", "value")}
    for (first, after), (second, after_second) in values(learners(2, program)):
        assert first | second == in_table
        assert after == after_second == launcher


def test_a_place_and_shared_epochs_compose() -> None:
    """The shared epoch prepares the loader, whoever came first."""

    def program(rank: int) -> Any:
        trainer = trainer_of(
            gossip(work_sharing=True, save_learners=True),
            2,
            use_distributed_sampler=True,
        )
        trainer.fit(Linear(), loader(8))
        assert trainer.train_dataloader is not None
        return type(trainer.train_dataloader.batch_sampler).__name__

    assert [o.value for o in learners(2, program)] == ["SharedBatches"] * 2


def test_what_takes_a_place_travels_with_the_trainer() -> None:
    trainer = trainer_of("ddp", 1)
    signals.handle_signals(trainer, None, Overrides())
    for value in state_of(trainer).values():
        assert isinstance(pickle.dumps(value.func), bytes)


# --- the table


def attributes(module: ModuleType) -> Iterator[ast.Attribute]:
    tree = ast.parse(inspect.getsource(module))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def lightnings_own() -> set[str]:
    """Private names that our strategies have from Lightning's."""
    bases = (DDPStrategy(), fabric_ddp.DDPStrategy(), SingleDeviceStrategy("cpu"))
    return {name for base in bases for name in dir(base) if is_private(name)}


OWN = ("self", "cls", "super()")


def private_names(module: ModuleType) -> set[str]:
    """Those of other objects, and those that a class has from Lightning's."""
    of_others = {
        node.attr
        for node in attributes(module)
        if is_private(node.attr) and ast.unparse(node.value) not in OWN
    }
    inherited = {node.attr for node in attributes(module)} & lightnings_own()
    is_strategy = module in (trainer_face, fabric, options, virtual_strategy)
    return {*of_others, *(inherited if is_strategy else ())}


# Of torch and of the data loaders that are copied.
OF_TORCH = {"_get_default_store", "_get_sequence_number_for_group", "_iterator"}
OF_TORCH |= {"_parent", "_asdict", "_version"}


def test_every_private_name_that_is_read_is_in_the_table() -> None:
    listed = {name for row in (*READ, *REPLACED) for name in row.names.split()}
    read = {name for module in MODULES for name in private_names(module)}
    read |= strings_that_are_names(MODULES)
    assert read - listed - OF_TORCH == set()
    no_longer = {name for row in READ for name in row.names.split()} - read
    assert no_longer == set()


def replaced_in(module: ModuleType) -> set[str]:
    """The attributes that a module replaces."""
    calls = re.compile(r"(overrides|Overrides\(\))\.(replace|wrap)$")
    return {
        ast.literal_eval(node.args[1])
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and calls.search(ast.unparse(node.func))
    }


def test_the_table_says_which_module_replaces_what() -> None:
    found = {name: replaced_in(module) for name, module in by_name().items()}
    found["virtual"] = found.pop("strategy")
    listed = {
        (by, name)
        for row in REPLACED
        for by in row.by.split()
        for name in row.names.split()
    }
    assert listed == {(by, name) for by, names in found.items() for name in names}


def strings_that_are_names(modules: tuple[ModuleType, ...]) -> set[str]:
    """Names that are read by `getattr` or in `vars(...)`, whose owner may lack them."""
    listed = {name for row in READ for name in row.names.split()}
    found = {
        node.value
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {*found, *(f"_{name}" for name in found)} & listed


def is_there(row: Names) -> bool:
    """Whether the Lightning of this environment has the names of a row."""
    here = Version(lightning_version())
    is_gone = bool(row.gone) and here >= Version(row.gone)
    return here >= Version(row.since) and not is_gone


def test_each_name_is_one_of_lightnings() -> None:
    roots = [Path(str(module.__file__)).parent for module in (pl, lightning.fabric)]
    files = [path for root in roots for path in root.rglob("*.py")]
    text = "\n".join(path.read_text("utf-8") for path in files)
    for row in (*READ, *REPLACED):
        assert {
            name for name in row.names.split() if (name in text) != is_there(row)
        } == set()


def by_name() -> dict[str, ModuleType]:
    return {module.__name__.rpartition(".")[2]: module for module in MODULES}


def test_each_row_names_the_modules_that_need_it() -> None:
    for row in READ:
        for reader in row.by.split():
            source = inspect.getsource(by_name()[reader])
            # `save_period` writes the underscore itself.
            if reader != "compatibility":
                assert [name for name in row.names.split() if name not in source] == []


def test_a_checkpoint_callback_may_lack_lightnings_attributes() -> None:
    class Own(ModelCheckpoint):
        def __init__(self) -> None:
            """Makes none of the attributes that Lightning's own has."""

    assert compatibility.save_period(Own(), "train_time_interval") is None
    given = ModelCheckpoint(every_n_epochs=3)
    assert compatibility.save_period(given, "every_n_epochs") == 3


# `clocks` changes a time of the Trainer's within one call, `mid_epoch` and
# `loop_iterators` change copies of torch's loaders, the others modules of the user's.
WRITES = {"clocks", "objective", "weight_callbacks", "mid_epoch", "loop_iterators"}


def written_to(path: Path) -> Iterator[str]:
    """Code that sets or drops an attribute by its name."""
    by_call = re.compile(r"(vars\(.*\)\.(pop|update)|(set|del)attr)\(")
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if (source := ast.unparse(node)).startswith("vars("):
                yield source
        elif isinstance(node, ast.Call) and by_call.match(source := ast.unparse(node)):
            yield source


def test_nothing_is_replaced_but_by_overrides() -> None:
    allowed = {"overrides", *WRITES, fast_forward.__name__.rpartition(".")[2]}
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in allowed and "asr" not in path.parts:
            # Own values, whose attributes are named by a variable.
            found = [one for one in written_to(path) if "tally" not in one]
            assert found == [], path
