"""The papers' recipes as a command, from discs to the table of Hub5-2000."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_adpsgd.asr.corpora.corpus import Skipped, read_utterances
from lightning_adpsgd.asr.corpora.hub5 import read_stm
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.streams import Streams
from lightning_adpsgd.asr.hmm.states import read_topology
from recipes.swb300.__main__ import main as swb300
from recipes.swb2000.__main__ import main as swb2000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# What the papers do, of a size for one minute of speech and one core.
SMALL = {
    "prepare.dev_utterances": 6,
    "align.num_iterations": 2,
    "align.num_gaussians": 150,
    "triphone.num_iterations": 1,
    "triphone.num_gaussians": 200,
    "triphone.min_frames": 30,
    "adapt.num_gaussians": 4,
    "adapt.ivector_iterations": 1,
    "adapt.passes": 1,
    "adapt.rounds": 1,
    "adapt.decodings": 1,
    "train.accelerator": "cpu",
    "train.num_workers": 0,
    "train.epochs": 1,
    "train.warmup_epochs": 1,
    "train.num_layers": 1,
    "train.hidden_size": 8,
    "train.bottleneck_size": 8,
    "train.batch_size": 16,
    "decode.max_dev_utterances": 3,
    "decode.beam": 5,
    "decode.lattice_beam": 2,
    "decode.max_active": 200,
    "decode.nbest": 3,
    "decode.acoustic_scales": 0.1,
    "decode.gmm_acoustic_scales": 0.1,
}


def _arguments(discs: Path, out: Path, *more: str) -> list[str]:
    sizes = [f"--set={name}={value}" for name, value in SMALL.items()]
    return ["--corpus", str(discs), "--out", str(out), "--cores", "1", *sizes, *more]


def _is_scored(discs: Path, out: Path, run: str) -> None:
    """Every word of the reference counts, in its part of the test."""
    report = json.loads((out / f"exp/score/{run}/score.json").read_text())
    (stm,) = discs.rglob("*.stm")
    words = {"SWB": 0, "CH": 0}
    for segment in read_stm(stm, Skipped()):
        part = "SWB" if segment.recording.startswith("sw_") else "CH"
        words[part] += len(segment.text.split()) - 1  # but for the labels
    found = {part: figures["num_words"] for part, figures in report["parts"].items()}
    assert found == {**words, "total": sum(words.values())}


@pytest.fixture(scope="module")
def finished(discs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SWB-2000, with copies at another speed, by two learners that gossip."""
    out = tmp_path_factory.mktemp("swb2000")
    learners = ("--learners", "2", "--super-learners", "2", "--run", "hadpsgd")
    copies = ("--set", "features.speeds=0.9")
    assert swb2000(_arguments(discs, out, *learners, *copies)) == 0
    return out


def test_swb2000_goes_from_the_discs_of_all_sources_to_the_table(
    discs: Path, finished: Path
):
    train = read_utterances(finished / "exp/prepare/train.jsonl")
    assert {u.id[:2] for u in train} == {"sw", "fe", "en"}
    _is_scored(discs, finished, "hadpsgd")


def test_triphones_are_trained_on_260_inputs_of_recordings_and_copies(finished: Path):
    labels = finished / "exp/triphone/train/labels.npy"
    store = FrameStore(finished / "exp/features/train", labels)
    train = [u.id for u in read_utterances(finished / "exp/prepare/train.jsonl")]
    assert store.ids.tolist() == [*train, *(f"sp0.9-{name}" for name in train)]
    assert store.labelled.mean() > 0.8
    assert 3 * 40 + Streams(finished / "exp/adapt/train", store).dims == 260
    tree = read_topology(finished / "exp/triphone/tree.json")
    assert 3 * len(tree.phones) <= np.load(labels).max() < tree.num_states
    with np.load(finished / "exp/adapt/train/transforms.npz") as adapted:
        is_copy = [name.endswith(" sp0.9") for name in adapted["sides"]]
    assert 2 * sum(is_copy) == len(is_copy)


def test_the_papers_baseline_is_trained_on_the_alignment_of_another_run(
    discs: Path, finished: Path
):
    before = (finished / "exp/triphone/.done").read_text()
    more = ("--run", "single", "--set", "features.speeds=0.9", "--to", "train")
    assert swb2000(_arguments(discs, finished, *more)) == 0
    assert (finished / "exp/triphone/.done").read_text() == before
    summary = json.loads((finished / "exp/train/single/summary.json").read_text())
    assert summary["num_learners"] == 1
    assert summary["steps"] > 0


def test_swb300_takes_switchboard_alone(discs: Path, tmp_path: Path):
    assert swb300(_arguments(discs, tmp_path, "--to", "lm")) == 0
    train = read_utterances(tmp_path / "exp/prepare/train.jsonl")
    assert {u.id[:2] for u in train} == {"sw"}
    assert (tmp_path / "exp/lm/lm.arpa").exists()
