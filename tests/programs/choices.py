"""The draw of a program by its seed.

A table of names has the choices of a dimension, and its first choice is the plain one.
A new choice is a line of its table, and a new dimension a line of `DIMENSIONS`; either
changes what seeds draw.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.programs import (
    callbacks,
    faults,
    learner,
    loaders,
    models,
    modules,
    trainers,
)
from tests.programs.program import Fault, Program

# Drawn for each program; of the others, some.
ALWAYS: dict[str, Mapping[str, Any]] = {
    "learners": {"2": 2, "3": 3, "4": 4},
    "algorithm": trainers.STRATEGY["algorithm"],
    "rows": loaders.ROWS,
    "batch": loaders.LOADER["batch"],
}
DIMENSIONS: dict[str, Mapping[str, Any]] = {
    **ALWAYS,
    **trainers.STRATEGY,
    **trainers.TRAINER,
    **loaders.LOADER,
    **loaders.ORDER,
    "model": models.MODELS,
    "optimizer": modules.OPTIMIZERS,
    "schedule": modules.SCHEDULES,
    "logged": modules.LOGGED,
    "metrics": modules.METRICS,
    "returned": modules.RETURNED,
    "slow": modules.SLOW,
    "hook": modules.NETS,
    "data": loaders.DATA,
    "held-out loaders": loaders.HELD_OUT,
    "callback": callbacks.CALLBACKS,
    "second callback": callbacks.CALLBACKS,
    "checkpoints": callbacks.CHECKPOINTS,
    "logger": trainers.LOGGERS,
    "after": learner.AFTER,
}
FEWEST, MOST = 4, 14


class Excludes(NamedTuple):
    """With one of these choices of a dimension, others stay plain."""

    dimension: str
    choices: tuple[str, ...]
    others: tuple[str, ...]


EXCLUDED = (
    Excludes("optimizer", modules.BY_HAND, ("accumulate", "clipping", "returned")),
    Excludes("optimizer", ("lbfgs",), ("accumulate", "clipping", "returned")),
    Excludes("algorithm", ("sdpsgd", "d1psgd"), ("wire", "sharing", "staleness")),
    Excludes("algorithm", ("rdpsgd", "hadpsgd"), ("staleness",)),
    Excludes("callback", ("accumulation",), ("accumulate", "second callback")),
    Excludes("second callback", ("accumulation",), ("accumulate",)),
    Excludes("extra", ("barebones",), ("checkpoints", "logger", "sanity")),
)
# Algorithms that mean nothing to another number of learners.
LEARNERS = {"super-learners of two": "4", "super-learners of two and one": "3"}
# A training that is still under way when a signal comes.
LONG = {"epochs": "3", "rows": "47"}


def draw(seed: int, fault: str = "none") -> Program:
    """The program of a seed; its faults are "none", "raise" or "kill"."""
    rng = random.Random(seed)
    choices = _choices(rng)
    if fault != "none":
        choices.pop("returned", None)  # steps without a loss fail by themselves
    if fault == "kill":
        choices.update(LONG)
    program = Program(seed, choices)
    return Program(seed, choices, FAULTS[fault](rng, program.num_learners))


def _choices(rng: random.Random) -> dict[str, str]:
    others = [name for name in DIMENSIONS if name not in ALWAYS]
    varied = [*ALWAYS, *rng.sample(others, rng.randint(FEWEST, MOST))]
    drawn = {name: rng.choice(list(DIMENSIONS[name])) for name in varied}
    drawn["learners"] = LEARNERS.get(drawn["algorithm"], drawn["learners"])
    for one in EXCLUDED:
        if drawn.get(one.dimension) in one.choices:
            drawn = {name: drawn[name] for name in drawn if name not in one.others}
    return {name: choice for name, choice in drawn.items() if choice != plain(name)}


def plain(dimension: str) -> str:
    """The choice of programs that do not vary this dimension."""
    return next(iter(DIMENSIONS[dimension]))


def _no_fault(rng: random.Random, num_learners: int) -> None:
    return None


def _exception(rng: random.Random, num_learners: int) -> Fault:
    hook, call = rng.choice(faults.HOOKS), rng.choice((0, 0, 1, 2, 3))
    return Fault("raise", rng.randrange(num_learners), hook, call)


def _signal(rng: random.Random, num_learners: int) -> Fault:
    kind, rank = rng.choice(list(faults.SIGNALS)), rng.randrange(num_learners)
    return Fault(kind, rank, seconds=rng.uniform(0, 1.4))


FAULTS: dict[str, Callable[[random.Random, int], Fault | None]] = {
    "none": _no_fault,
    "raise": _exception,
    "kill": _signal,
}
