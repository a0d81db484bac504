"""Whether learners share their epochs if `work_sharing` is left at its default.

In the asynchronous modes they share wherever Lightning would put its own
`DistributedSampler` into the training loader, unless something counts the batches or
steps of one learner. Each training logs the decision and its reason once.
"""

import dis
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_adpsgd.dials import Dials
from lightning_adpsgd.epochs.work_units import WholeOrder
from lightning_adpsgd.strategy.checkpoints.contents import Resumed
from lightning_adpsgd.strategy.checkpoints.mid_epoch import reads_out_of_order
from lightning_adpsgd.strategy.compatibility import (
    callbacks_of,
    problems_with_work_sharing,
)

_SHARED = (
    "Learners share their epochs: each takes the next batch when it is free. "
    "`trainer.num_training_batches` is infinite and "
    "`trainer.estimated_stepping_batches` is -1: let what you schedule follow "
    "`trainer.current_epoch`. `work_sharing=False` gives equal shares."
)
_EQUAL = (
    "Learners get equal shares of an epoch, which lasts as long as the slowest one "
    "needs. By default they would share it, but %s. With `work_sharing=False` they get "
    "equal shares without this message."
)
_TOTALS = (
    {"estimated_stepping_batches"},
    {"num_training_batches"},
    {"len", "train_dataloader"},
)
# What follows a key that is set, or (to `COPY` it is to use it twice) scaled.
_SETS = {"STORE_SUBSCR", "COPY"}
# Calls to which all learners come, whatever they wait for there.
_MEETINGS = {"all_reduce", "barrier", "save_checkpoint"}
_OF_TORCH = {"all_gather", "all_gather_object", "broadcast", "broadcast_object_list"}
# Methods, by their names, that all learners call equally often.
_OF_ALL = re.compile(
    "epoch|validation|sanity|test|predict|fit|set_?up|teardown|train_(start|end)|"
    "exception|checkpoint|configure"
)
# Packages whose callbacks and modules expect that there is no total.
_PREPARED = {"lightning", "pytorch_lightning", "lightning_adpsgd"}
_METHODS = FunctionType, property, classmethod, staticmethod, cached_property
# Packages whose functions are no part of the program.
LIBRARIES = {*_PREPARED, "torch", "torchmetrics", "lightning_utilities"}


def shares_work(trainer: pl.Trainer, dials: Dials) -> bool | None:
    """Whether the learners share their epochs; None: the loader decides."""
    # A `fast_dev_run` is a fixed number of batches for each learner.
    if getattr(trainer, "fast_dev_run", False):
        return False
    if dials.work_sharing:
        refuse_for(problems_with_work_sharing(trainer))
    if dials.work_sharing is not None:
        return dials.work_sharing
    are_apart = dials.islands is not None or dials.has_sizes
    if dials.in_lockstep or are_apart or dials.tensor_parallel_size > 1:
        return False
    # Without this option, the program deals the samples, and not Lightning.
    return None if trainer._accelerator_connector.use_distributed_sampler else False


def refuse_for(problems: Iterator[str]) -> None:
    """Raises a ValueError for the first problem with `work_sharing=True`, if any."""
    for problem in problems:
        raise ValueError(f"{problem}. `work_sharing=False` allows it")


def problem_of(trainer: pl.Trainer, dials: Dials, resumed: Resumed) -> str:
    """The reason to keep equal shares whatever the loader is; empty if there is none.

    Learners may differ, because a program may give a callback to only one of them.
    """
    if dials.save_learners:
        return "`save_learners` keeps the place of each learner in its own share"
    if resumed.epoch is None and resumed.is_within_epoch:
        return "the checkpoint is within an epoch of equal shares"
    if problem := next(problems_with_work_sharing(trainer), ""):
        return f"the settings of this training do not allow it: {problem}"
    if name := _method_that(_asks_trainer, trainer):
        problem = (
            f"`{name}` asks how many steps or batches there will be, which no learner "
            "would know (`trainer.current_epoch` is the same in all learners)"
        )
    if not problem and (name := _method_that(_sets_rate, trainer)):
        problem = f"`{name}` sets a learning rate, which may follow batches"
    if not problem and (name := _method_that(_meets, trainer)):
        problem = f"`{name}` meets all learners or saves, which may follow batches"
    return problem


def _method_that(does: Callable[[CodeType], bool], trainer: pl.Trainer) -> str:
    """The name of a method of the module or of a callback that does something.

    Empty if none does. During training a total would be inf, -1 or an error, and a
    rate by batches unlike in all learners. Nothing would tell the user.
    `configure_optimizers` is left out: it asks before sharing is decided.
    """
    module = trainer.lightning_module
    own = [one for one in vars(module).values() if isinstance(one, Callback)]
    for owner in (module, *own, *callbacks_of(trainer, Callback)):
        for kind in type(owner).__mro__:
            if _package_of(kind) in _PREPARED:
                continue
            for name, value in vars(kind).items():
                is_early = name == "configure_optimizers"
                codes = [*_code_of(value), *_code_named_by(owner, name, value)]
                if not is_early and any(map(does, codes)):
                    return f"{type(owner).__name__}.{name}"
    return ""


def _asks_trainer(code: CodeType) -> bool:
    # Without a trainer, it is an attribute of the module itself.
    variables = {*code.co_varnames, *code.co_freevars, *code.co_names}
    has_trainer = "trainer" in variables or _is_hook_of_callback(code)
    return has_trainer and any(map(variables.issuperset, _TOTALS))


def _is_hook_of_callback(code: CodeType) -> bool:
    """Whether it is a callback's hook, which gets the trainer under any name."""
    hook = getattr(getattr(Callback, code.co_name, None), "__code__", None)
    if hook is None or "trainer" not in hook.co_varnames:
        return False
    return hook.co_argcount == code.co_argcount


def _sets_rate(code: CodeType) -> bool:
    """Whether it sets or scales `["lr"]` of a parameter group; hooks of epochs may."""
    is_of_epoch = "epoch" in code.co_name or code.co_name == "finetune_function"
    if is_of_epoch or "param_groups" not in code.co_names:
        return False  # others set a hyperparameter, or what is logged
    by_key = any(
        key.argval == "lr" and step.opname in _SETS
        for key, step in pairwise(dis.get_instructions(code))
    )
    return by_key or ("update" in code.co_names and ("lr",) in code.co_consts)


def _meets(code: CodeType) -> bool:
    """Whether it saves a checkpoint or calls a collective, perhaps in some batches."""
    if _OF_ALL.search(code.co_name):
        return False
    names = {*code.co_names}
    of_torch = _OF_TORCH if names & {"dist", "distributed"} else set[str]()
    return bool(names & (_MEETINGS | of_torch))


def _code_of(value: Any) -> Iterator[CodeType]:
    """The code of a function or property, and of the functions inside it."""
    code = getattr(_function_of(value), "__code__", value)
    if isinstance(code, CodeType):
        yield code
        for inner in code.co_consts:
            yield from _code_of(inner)


def _code_named_by(owner: Any, method: str, value: Any) -> Iterator[CodeType]:
    """The code of the program's functions that a method of an owner names.

    It names them directly, by their module, or by a part of the owner. A method that
    all learners call equally often may call what it likes.
    """
    if _OF_ALL.search(method):
        return
    near, codes = getattr(_function_of(value), "__globals__", {}), [*_code_of(value)]
    names = {name for code in codes for name in code.co_names}
    modules = [one for one in map(near.get, names) if isinstance(one, ModuleType)]
    for place in (near, *map(vars, modules)):
        for found in map(place.get, names):
            is_function = isinstance(found, FunctionType)
            if is_function and _package_of(found) not in LIBRARIES:
                yield from _code_of(found)
    submodules = owner.named_children() if isinstance(owner, nn.Module) else ()
    parts = {**vars(owner), **dict(submodules)}
    for part, name in {two for code in codes for two in _in_turn(code)}:
        for kind in type(parts.get(part)).__mro__:
            found = vars(kind).get(name)
            if isinstance(found, _METHODS) and _package_of(kind) not in LIBRARIES:
                yield from _code_of(found)


def _in_turn(code: CodeType) -> Iterator[tuple[str, str]]:
    """The pairs of attributes that code looks up one after the other, as in `.a.b`."""
    for one, two in pairwise(dis.get_instructions(code)):
        if all(step.opname in {"LOAD_ATTR", "LOAD_METHOD"} for step in (one, two)):
            yield one.argval, two.argval


def _function_of(value: Any) -> Any:
    """The function behind a method, a property or a decorator."""
    function = getattr(value, "fget", None) or getattr(value, "func", None) or value
    return inspect.unwrap(function)


def _package_of(value: Any) -> str:
    # A function that was made from text has no module.
    module = getattr(value, "__module__", "")
    return module.partition(".")[0] if isinstance(module, str) else ""


class DefaultSharing:
    """Decides for all learners together, once the training loader exists.

    `problem` is an objection of this learner that is known in advance; empty: none.
    """

    def __init__(self, trainer: pl.Trainer, problem: str) -> None:
        self._trainer, self._problem = trainer, problem
        self._too_early = True

    def look_at_schedules(self) -> None:
        """Objects to schedules by steps; called once optimizers and schedules exist."""
        self._too_early = False
        by_hand = not self._trainer.lightning_module.automatic_optimization
        problem = "a learning rate is scheduled by steps"
        if by_hand:
            problem = "manual optimization may step its schedules by batches"
        for config in self._trainer.strategy.lr_scheduler_configs:
            if by_hand or config.interval == "step":
                self._problem = self._problem or problem

    def allows(self, loader: Any, num_loaders: int) -> bool:
        """Whether to share a loader, one of so many; a collective over all learners."""
        deals = self._trainer._data_connector._requires_distributed_sampler
        is_dealt, strategy = isinstance(loader, DataLoader), self._trainer.strategy
        is_dealt = is_dealt and deals(loader)
        problem = "no sampler of Lightning"
        if is_dealt:
            problem = self._problem_with(loader, num_loaders)
        mine = problem or f"{len(loader.dataset)} samples by {loader.batch_size}"
        same = mine == strategy.broadcast(mine) and not problem
        if strategy.reduce_boolean_decision(same, all=True):
            rank_zero_info(_SHARED)
            return True
        if is_dealt:
            rank_zero_info(_EQUAL, problem or "learners differ in loaders or callbacks")
        return False

    def _problem_with(self, loader: DataLoader[Any], num_loaders: int) -> str:
        if self._problem:
            return self._problem
        if self._too_early:
            return "`configure_optimizers` asks how many steps there will be"
        if problem := next(problems_with_loader(loader, num_loaders), ""):
            return problem
        if type(loader).__iter__ is not DataLoader.__iter__:
            return "the loader iterates in a way of its own, and may count batches"
        if type(loader.batch_sampler) is not BatchSampler or not _is_plain(loader):
            return "the loader has a sampler of its own; `work_sharing=True` shares it"
        # The batches that a learner has claimed, beyond the one that it trains on.
        held = 1 + loader.num_workers * (loader.prefetch_factor or 0)
        if len(loader) < 2 * held * self._trainer.world_size:
            return "an epoch has too few batches for learners that prefetch"
        return ""


def problems_with_loader(loader: Any, num_loaders: int = 1) -> Iterator[str]:
    """Why learners cannot share a training loader, one of so many."""
    kind = type(loader).__name__
    if num_loaders > 1:
        yield (
            f"`work_sharing` needs a single training loader, got {num_loaders}: make "
            "one data set of them, with torch.utils.data.ConcatDataset or StackDataset"
        )
    if not isinstance(loader, DataLoader):
        yield (
            "`work_sharing` needs a torch.utils.data.DataLoader to train from, got "
            f"{kind}"
        )
        return
    if isinstance(loader.dataset, IterableDataset):
        yield (
            "`work_sharing` needs a data set with indices, got the iterable "
            f"{type(loader.dataset).__name__}: give every learner a stream of its own"
        )
    if loader.batch_sampler is None:
        yield (
            "`work_sharing` needs a loader that makes batches, got `batch_size=None`: "
            "pass a `batch_size`, or a `batch_sampler` that yields lists of indices"
        )
    if hasattr(loader, "load_state_dict"):
        yield (
            "`work_sharing` needs a loader that keeps no place of its own, got "
            f"{kind}, which has `load_state_dict`: use torch.utils.data.DataLoader"
        )
    if reads_out_of_order(loader):
        yield (
            "`in_order` of the training loader must be True with `work_sharing`, got "
            "False: no learner would know which of its claims were trained on"
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not isinstance(sampler, WholeOrder):
        yield (
            "`work_sharing` chooses the samples of each learner itself, got a loader "
            "with a DistributedSampler: leave it out"
        )


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is one of torch's defaults, which yield each sample once."""
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        whole = sampler.num_samples == len(loader.dataset)  # pyright: ignore
        return whole and not sampler.replacement
    return type(sampler) is SequentialSampler
