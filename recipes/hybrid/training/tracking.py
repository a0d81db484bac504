"""One run of Weights & Biases for a training and for what is made of it later.

The training, its score and its report are written by different processes. They share
the identifier in `wandb.id` of the training's folder. Offline, each leaves a part in a
folder of its own, and `wandb sync` joins the parts.
"""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning.pytorch.loggers import WandbLogger

from lightning_adpsgd.asr.frames.store import stored_frames
from lightning_adpsgd.asr.frames.writing import is_stored
from lightning_adpsgd.callbacks.loggers import (
    define_axes,
    is_available,
    make_wandb_logger,
)
from lightning_adpsgd.files import written_whole
from recipes.hybrid.pipeline.crew import ALONE
from recipes.hybrid.pipeline.provenance import provenance
from recipes.hybrid.pipeline.settings import Settings

_ID = "wandb.id"
_FRAMES_PER_HOUR = 360_000
Flat = dict[str, Any]


def make_tracker(settings: Settings, trained: Path, folder: Path) -> WandbLogger | None:
    """A logger that writes to the run of a training.

    Args:
        settings: settings of the experiment; they become the run's configuration.
        trained: folder of the training, which keeps the identifier.
        folder: folder for the files of this part.

    Returns:
        None without the package, or where WANDB_MODE is "disabled".
    """
    if not is_available():
        return None
    return make_wandb_logger(
        folder,
        settings.run,
        id=_identifier(trained),
        group=settings.out.name,
        tags=tags_of(settings),
        config=config_of(settings),
    )


def _identifier(trained: Path) -> str:
    path = trained / _ID
    if not path.exists():
        with written_whole(path) as file:
            file.write(uuid4().hex[:12])
    return path.read_text(encoding="utf-8").strip()


def log_later(settings: Settings, folder: Path, figures: Mapping[str, Any]) -> None:
    """Adds figures, tables or files to the run of the finished training.

    Args:
        settings: settings of the experiment.
        folder: folder for the files of this part.
        figures: what `wandb.Run.log` takes.
    """
    logger = make_tracker(settings, settings.directory("train"), folder)
    if logger is None:
        return
    run: Any = logger.experiment
    define_axes(run)
    run.log(dict(figures))
    run.finish()


def tags_of(settings: Settings) -> list[str]:
    """What runs are filtered by: strategy, kind of states, sources, learners."""
    train = settings.train
    learners = f"{train.all_learners} learners"
    return [train.strategy, learners, settings.states, *settings.sources]


def config_of(settings: Settings) -> Flat:
    """All settings as `group/name`, what the corpus holds, and where it was run."""
    origin = {f"run/{name}": value for name, value in provenance().items()}
    chosen = dataclasses.asdict(dataclasses.replace(settings, crew=ALONE))
    return flattened(chosen) | corpus_facts(settings) | origin


def flattened(values: Mapping[str, Any], prefix: str = "") -> Flat:
    """Groups of settings as one level of plain values."""
    flat: Flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = json.loads(json.dumps(value, default=str))
    return flat


def corpus_facts(settings: Settings) -> Flat:
    """Hours of each split and number of states, of stages that are finished."""
    features, states = settings.directory("features"), settings.directory("states")
    facts: Flat = {
        f"corpus/{split.name}_hours": stored_frames(split) / _FRAMES_PER_HOUR
        for split in sorted(features.glob("*"))
        if is_stored(split)
    }
    if (states / "states.json").exists():
        found = json.loads((states / "states.json").read_text(encoding="utf-8"))
        facts["corpus/states"] = found["num_states"]
    return facts


def offline_runs(folders: Iterable[Path]) -> list[Path]:
    """The offline parts of runs below some folders, the first begun first."""
    found = (run for folder in folders for run in folder.rglob("wandb/offline-run-*"))
    return sorted((run for run in found if run.is_dir()), key=lambda run: run.name)


def sync_line(parts: Iterable[Path]) -> str:
    """The command that sends offline parts to the server."""
    return shlex.join(["wandb", "sync", *map(str, parts)])


def parts_of(settings: Settings) -> list[Path]:
    """The offline parts of the run `settings.run`."""
    stages = ("train", "score")
    return offline_runs(settings.directory(stage) for stage in stages)
