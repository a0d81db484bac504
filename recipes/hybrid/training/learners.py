"""The learners of stage `train`: strategy, model, Trainer and callbacks."""

import json
import logging
import math
import multiprocessing
import os
import threading
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from tqdm import tqdm
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.asr.frames.data import SpeechData
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.streams import Streams
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.callbacks import (
    AllreduceWait,
    ConvergenceMonitor,
    GossipMonitor,
    Timeline,
    TrainingCurve,
)
from lightning_adpsgd.callbacks.loggers import WandbRun
from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from recipes.hybrid.pipeline.groups import TrainSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.training.metrics import attempts
from recipes.hybrid.training.saving import last_checkpoint, make_savers
from recipes.hybrid.training.timed import timed_callbacks, trainer_options
from recipes.hybrid.training.tracking import make_tracker
from recipes.hybrid.training.word_errors import NAME, announced, word_error_monitor

_StartMethod = Literal["popen", "fork", "spawn"]


def make_strategy(train: TrainSettings) -> Strategy:
    """The strategy of that name, for learners of this machine.

    Raises:
        ValueError: There is no such name.
    """
    start_method = _start_method(train)
    if train.strategy == "ddp":
        return _ddp(train, start_method)
    if train.strategy not in NAMES:
        names = ", ".join(["ddp", *NAMES])
        raise ValueError(f"`strategy` must be one of {names}, got {train.strategy!r}")
    options: dict[str, Any] = {
        **NAMES[train.strategy],
        "order": train.order,
        "mixing_gain": train.mixing_gain,
        "cpu_share": train.cpu_share,
        # A resume within an epoch then leaves out what was trained on.
        "save_learners": train.checkpoint_minutes > 0,
    }
    if options["super_learner_size"] == "node":
        options["super_learner_size"] = train.super_learner_size
    return HADPSGDStrategy(**options, start_method=start_method)


def _ddp(train: TrainSettings, start_method: _StartMethod) -> Strategy:
    """Lightning's DDP, or one super-learner of all, which is the same gradients.

    Lightning's resumes within an epoch with its first batches. A super-learner keeps
    its place.
    """
    if not train.checkpoint_minutes or train.all_learners == 1:
        # Lightning's own moves a file from the folder of temporary files: from another
        # disk that is a copy, and a kill meanwhile takes the last checkpoint as well.
        whole = WholeCheckpointIO()
        return DDPStrategy(start_method=start_method, checkpoint_io=whole)
    return HADPSGDStrategy(
        "ring",
        "sync",
        super_learner_size=train.all_learners,
        save_learners=True,
        start_method=start_method,
    )


def _start_method(train: TrainSettings) -> _StartMethod:
    if train.num_nodes > 1:
        return "popen"  # which leaves it to torchrun or srun that have begun them
    # Learners on GPUs must not be forked, and "popen" would start this recipe again.
    return "fork" if train.accelerator == "cpu" else "spawn"


def make_model(settings: Settings, corpus_chunks: int) -> AcousticModel:
    """The model at its start: the same for every run of one seed."""
    seed_everything(settings.seed, workers=True, verbose=False)
    train, labels = settings.train, settings.directory("states")
    states = json.loads((labels / "states.json").read_text())
    model = AcousticModel(
        states["num_states"],
        input_size=3 * settings.features.num_mels + _streamed(settings),
        num_layers=train.num_layers,
        hidden_size=train.hidden_size,
        bottleneck_size=train.bottleneck_size,
        dropout=train.dropout,
        max_warp=train.max_warp,
        max_stretch=train.max_stretch,
        mask_bands=train.mask_bands,
        mask_frames=train.mask_frames,
        global_batch=train.batch_size * train.all_learners,
        corpus_chunks=corpus_chunks,
        base_rate=train.base_rate,
        base_batch=train.base_batch,
        warmup_epochs=train.warmup_epochs,
        decay=train.decay,
        momentum=train.momentum,
        window=train.chunk,
        hop=math.ceil(train.chunk / 3),
    )
    model.set_priors(torch.tensor(states["counts"]))
    return model


def _streamed(settings: Settings) -> int:
    """Inputs that come from streams."""
    if settings.streams is None:
        return 0
    store = FrameStore(settings.directory("features") / "train")
    return Streams(settings.streams / "train", store).dims


def run_learners(settings: Settings, output: Path) -> None:
    """Trains the run, from its last checkpoint if there is one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _keep_quiet()
    train = settings.train
    data = SpeechData(
        settings.directory("features"),
        settings.directory("states"),
        batch_size=train.batch_size,
        chunk=train.chunk,
        seed=settings.seed,
        num_workers=train.num_workers,
        pin_memory=train.accelerator != "cpu",
        streams=settings.streams,
    )
    model = make_model(settings, corpus_chunks=len(data.dataset("train")))
    if train.wer_utterances and settings.crew.leads:
        print(f"  {announced(settings)}", flush=True)
    checkpoint = last_checkpoint(output)
    _make_trainer(settings, output).fit(
        model, data, ckpt_path=checkpoint if checkpoint.exists() else None
    )


def _end_with_parent() -> None:
    """Ends the learners, and this process that joins them, when the recipe is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    for learner in multiprocessing.active_children():
        learner.kill()
    os._exit(1)


def _make_trainer(settings: Settings, output: Path) -> Trainer:
    train = settings.train
    attempt = output / "logs" / f"attempt_{len(attempts(output))}"
    return Trainer(
        accelerator=train.accelerator,
        devices=train.num_learners,
        num_nodes=train.num_nodes,
        strategy=make_strategy(train),
        **trainer_options(settings),
        precision=train.chosen_precision,  # pyright: ignore[reportArgumentType]
        gradient_clip_val=train.clip or None,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=make_loggers(settings, output, attempt),
        callbacks=_callbacks(settings, output),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_loggers(settings: Settings, output: Path, folder: Path) -> list[Logger]:
    """A CSV logger that writes `folder/metrics.csv`, and one for Weights & Biases.

    Args:
        settings: settings of the experiment.
        output: folder of the training.
        folder: folder, made with the first figure; must not hold figures already,
            the CSV logger would delete them.
    """
    csv_logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=20)
    tracker = make_tracker(settings, output, folder) if settings.crew.leads else None
    return [csv_logger] if tracker is None else [csv_logger, tracker]


def _callbacks(settings: Settings, output: Path) -> list[Callback]:
    listening = word_error_monitor(settings)
    convergence = ConvergenceMonitor(
        runs=output,
        name=settings.run,
        algorithm=settings.train.strategy,
        seed=settings.seed,
        wer=NAME if listening else None,
    )
    # Before the monitor that writes down what it has logged.
    before = [listening] if listening else []
    timeline = Timeline(output / "timeline")
    figures = [AllreduceWait(), TrainingCurve(), GossipMonitor(), timeline]
    monitors = [LearningRateMonitor(), *figures, *before, convergence]
    saving = make_savers(settings.train, output / "checkpoints")
    timed = timed_callbacks(settings, output)
    return [*monitors, *saving, _Progress(settings.run), WandbRun(), *timed]


def _keep_quiet() -> None:
    """Silences Lightning's hints, which are for users of its API, not of a recipe."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*treespec, LeafSpec.*",
        ".*is smaller than the logging interval.*",
        ".*exists and is not empty.*",
        # What `TimedSchedule` asks for.
        "`reduce` in `on_train_batch_start` is over.*",
    ):
        warnings.filterwarnings("ignore", message)


class _Progress(Callback):
    """A bar over the steps of learner 0, with the last held-out figures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: tqdm | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            steps = trainer.estimated_stepping_batches
            self._bar = tqdm(
                total=int(steps) if 0 < steps < math.inf else None,
                initial=trainer.global_step,
                desc=f"train {self._name}",
                unit="step",
            )

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._bar is not None:
            self._bar.update()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            metrics = trainer.callback_metrics
            self._bar.set_postfix_str(
                f"held out: loss {metrics['val_loss']:.3f}, "
                f"frames right {metrics['val_accuracy']:.1%}"
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()
