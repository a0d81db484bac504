"""Stage `train` on several machines: it is begun, ended by SIGTERM, and goes on."""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.frames.store import FrameStore, write_labels
from lightning_adpsgd.files import write_json
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from tests import warm
from tests.helpers import free_port, until
from tests.recipes.experiments import write_frames

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_NODES, BATCH, FRAMES, UTTERANCES = 2, 4, 210, 40
PROGRAM = """
import json, sys
from pathlib import Path
from dataclasses import replace
from recipes.hybrid.pipeline.crew import environment_crew
from recipes.hybrid.stages.train import train
from tests.recipes.test_many_machines import settings_in
out, epochs, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = replace(settings_in(out, epochs, every), crew=environment_crew(2))
train(settings, out / "trained")
"""


def settings_in(out: Path, epochs: int, validate_every: int) -> Settings:
    """Two machines with a learner each, that gossip."""
    return override(
        Settings(corpus=out, out=out, run="adpsgd"),
        *("train.strategy=adpsgd", "train.num_learners=1", f"train.epochs={epochs}"),
        *(f"train.num_nodes={NUM_NODES}", f"train.batch_size={BATCH}"),
        *("train.num_layers=1", "train.hidden_size=8", "train.bottleneck_size=8"),
        *("train.checkpoint_minutes=60", "train.wer_utterances=0"),
        *("train.base_rate=0.01", f"train.validate_every={validate_every}"),
    )


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Frames of noise in ten states."""
    dice = np.random.default_rng(0)
    settings = settings_in(tmp_path, 1, 1)
    features, states = settings.directory("features"), settings.directory("states")
    for split in ("train", "dev"):
        frames = {
            f"{split}{number}": dice.standard_normal((FRAMES, 40), np.float32)
            for number in range(UTTERANCES)
        }
        write_frames(features / split, frames)
        (states / split).mkdir(parents=True)
        labels = ((name, dice.integers(10, size=FRAMES)) for name in frames)
        store = FrameStore(features / split)
        write_labels(states / split / "labels.npy", store, labels)
    write_json(states / "states.json", {"num_states": 10, "counts": [1] * 10})
    return tmp_path


def begin(out: Path, epochs: int, every: int) -> list[subprocess.Popen[str]]:
    """Both machines; the environment is that of torchrun."""
    (out / "trained").mkdir(exist_ok=True)  # as the leader has claimed the stage
    common = {
        **os.environ,
        "WANDB_MODE": "disabled",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(NUM_NODES),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [warm.python(), "-c", PROGRAM, str(out), str(epochs), str(every)]
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_NODES)
    ]


def end(learners: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [learner.communicate(timeout=120)[0] for learner in learners]
    finally:
        for learner in learners:
            learner.kill()


def steps_in(out: Path) -> int:
    curves = sorted((out / "trained/logs").glob("attempt_*/metrics.csv"))
    return sum(path.read_text().count("\n") for path in curves)


def test_two_machines_are_preempted_within_an_epoch_and_go_on(experiment):
    learners = begin(experiment, epochs=10_000, every=1)

    def are_due() -> bool:
        """Also if one has ended by itself: what both have printed says why."""
        has_ended = any(learner.poll() is not None for learner in learners)
        return has_ended or steps_in(experiment) >= 3

    try:
        until(are_due, "steps of both", every_s=0.2)
    finally:
        for learner in learners:
            learner.send_signal(signal.SIGTERM)
    told = end(learners), [learner.returncode for learner in learners]
    # Neither dies of the signal, nor of anything else.
    assert min(told[1]) >= 0, told
    assert any("SIGTERM: saved; the same command goes on" in o for o in told[0]), told
    last = experiment / "trained/checkpoints/last.ckpt"
    saved = torch.load(last, weights_only=True)
    assert saved["global_step"] > 0
    epoch = saved["epoch"]

    learners = begin(experiment, epochs=epoch + 1, every=1)
    outputs = end(learners)
    assert [learner.returncode for learner in learners] == [0, 0], outputs
    summary = json.loads((experiment / "trained/summary.json").read_text())
    chunks = UTTERANCES * FRAMES // 21
    assert summary["best_epoch"] == epoch + 1
    # Each sample once an epoch: what was trained on before SIGTERM is left out.
    trained = torch.load(experiment / "trained/model.ckpt", weights_only=True)
    assert trained["lightning_adpsgd/samples"] == (epoch + 1) * chunks
    assert {"model.ckpt", "best.ckpt"} <= {
        path.name for path in (experiment / "trained").iterdir()
    }
