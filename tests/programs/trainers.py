"""Arguments of the Trainer and of the strategy, by the names of choices."""

import os
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.strategy.names import NAMES
from lightning_adpsgd.topology.named import TOPOLOGIES
from tests.programs.callbacks import CALLBACKS, CHECKPOINTS
from tests.programs.program import Arguments, Program

# Of a learner that waits for a dead or stopped one.
TIMEOUT_S, SHORT_TIMEOUT_S = 20.0, 6.0
TRAINER: dict[str, dict[str, Arguments]] = {
    "epochs": {str(number): {"max_epochs": number} for number in (2, 1, 3)},
    "accumulate": {str(n): {"accumulate_grad_batches": n} for n in (1, 2, 3)},
    "clipping": {
        "none": {},
        "norm": {"gradient_clip_val": 1.0},
        "value": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    },
    "precision": {
        name: {"precision": name}
        for name in ("32-true", "bf16-mixed", "bf16-true", "64-true")
    },
    "validation": {
        "each epoch": {},
        "none": {"limit_val_batches": 0},
        "half epochs": {"val_check_interval": 0.5},
        "two batches": {"val_check_interval": 2, "check_val_every_n_epoch": None},
        "second epochs": {"check_val_every_n_epoch": 2},
        "one batch": {"limit_val_batches": 1},
    },
    "sanity": {"none": {"num_sanity_val_steps": 0}, "2": {"num_sanity_val_steps": 2}},
    "limit": {
        "none": {},
        "steps": {"max_steps": 4},
        "steps alone": {"max_steps": 4, "max_epochs": -1},
        "batches": {"limit_train_batches": 2},
        "part of batches": {"limit_train_batches": 0.6},
        "time": {"max_time": "00:00:10:00"},
        "fewest steps": {"min_steps": 3},
        "overfit": {"overfit_batches": 2},
    },
    "reload": {"never": {}, "each epoch": {"reload_dataloaders_every_n_epochs": 1}},
    "extra": {
        "none": {},
        "anomalies": {"detect_anomaly": True},
        "profiler": {"profiler": "simple"},
        "deterministic": {"deterministic": True},
        "synchronised batch norm": {"sync_batchnorm": True},
        "no sampler": {"use_distributed_sampler": False},
        "fast run": {"fast_dev_run": 2},
        "no inference mode": {"inference_mode": False},
        "barebones": {"barebones": True, "limit_val_batches": 0},
    },
}
LOGGERS: dict[str, Callable[[], Arguments]] = {
    "none": lambda: {"logger": False},
    "one": lambda: _logging("logs"),
    "two": lambda: _logging("first", "second"),
}
# Inside large super-learners, DDP must know that a module may have unused weights.
_UNUSED: Arguments = {"find_unused_parameters": True}
_LARGE: Arguments = {**NAMES["adpsgd"], **_UNUSED}
STRATEGY: dict[str, dict[str, Arguments]] = {
    "algorithm": {
        **{"adpsgd": NAMES["adpsgd"], **NAMES},
        "hadpsgd": {**NAMES["hadpsgd"], **_UNUSED},
        "super-learners of two": {**_LARGE, "super_learner_size": 2},
        "super-learners of two and one": {**_LARGE, "super_learner_size": (2, 1)},
    },
    "topology": {
        "of the algorithm": {},
        **{name: {"topology": name} for name in TOPOLOGIES},
    },
    "gossip": {"each step": {}, "each third step": {"gossip_every": 3}},
    "wire": {
        "default": {},
        **{name: {"wire_dtype": name} for name in ("auto", "int8", "int4")},
        "bfloat16": {"wire_dtype": torch.bfloat16},
    },
    "sharing": {
        "default": {},
        "off": {"work_sharing": False},
        "on": {"work_sharing": True},
    },
    "after evaluations": {"restore": {}, "adopt": {"after_evaluation": "adopt"}},
    "saved": {"mean": {}, "learners": {"save_learners": True}},
    "staleness": {"any": {}, "2": {"max_staleness": 2}},
}


def _logging(*names: str) -> Arguments:
    loggers = [CSVLogger(os.getcwd(), name) for name in names]
    return {"logger": loggers, "log_every_n_steps": 2}


def strategy_of(program: Program) -> HADPSGDStrategy:
    """This package's strategy; it waits less long where a learner may die."""
    is_deadly = program.fault is not None and program.fault.kind != "raise"
    timeout = SHORT_TIMEOUT_S if is_deadly else TIMEOUT_S
    return HADPSGDStrategy(timeout=timeout, **program.merged(STRATEGY))


def trainer_of(program: Program, is_ddp: bool, more_epochs: int = 0) -> pl.Trainer:
    """The program's Trainer, with some epochs more."""
    arguments = program.merged(TRAINER)
    if arguments["max_epochs"] > 0:
        arguments["max_epochs"] += more_epochs
    ddp = "ddp_find_unused_parameters_true"
    return pl.Trainer(
        accelerator="cpu",
        devices=program.num_learners,
        strategy=ddp if is_ddp else strategy_of(program),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
        **program.pick("logger", LOGGERS)(),
        **_callbacks(program),
        **arguments,
    )


def _callbacks(program: Program) -> Arguments:
    checkpoint = program.pick("checkpoints", CHECKPOINTS)
    names = ("callback", "second callback")
    makers = dict.fromkeys(program.pick(name, CALLBACKS) for name in names)
    callbacks = [make() for make in (*makers, *filter(None, [checkpoint]))]
    return {"callbacks": callbacks, "enable_checkpointing": checkpoint is not None}
