"""The command with a Kaldi experiment: alignments, model, graph, fMLLR and i-vectors.

The sound is noise. What is said is told by Kaldi's fMLLR alone, whose rows name the pdf
of their frame: only a recipe that brings labels, rows and frames together in time, and
graph, pdfs and words by their numbers, finds all words.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import kaldi_native_io as kio
import numpy as np
import pytest

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from lightning_adpsgd.asr.frames.store import FrameStore
from recipes.switchboard.__main__ import main
from tests.asr.kaldi_files import NUM_PDFS, PDFS, write_experiment
from tests.asr.tiny import write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPLITS = ("train", "dev", "swb", "ch")
# Of each HMM state the transition-id that enters it and that of its loop.
SILENCE = (2, 1)
WORDS = {"yes": ((4, 3), (6, 5)), "no": ((8, 7), (10, 9))}
SMALL = {
    "train.strategy": "ddp",
    "train.num_learners": 1,
    "train.batch_size": 4,
    "train.epochs": 10,
    "train.base_batch": 8,
    "train.warmup_epochs": 1,
    "train.num_layers": 1,
    "train.hidden_size": 16,
    "train.bottleneck_size": 8,
    "train.max_warp": 0,
    "decode.acoustic_scales": "0.5,1.0",
    "decode.export_likelihoods": "true",
    "adapt.streams": "both",
}


def _transitions(words: Sequence[str], num_frames: int) -> list[int]:
    """Silence, the words and silence, in equal parts."""
    states = [SILENCE, *(s for word in words for s in WORDS[word]), SILENCE]
    parts = np.array_split(np.arange(num_frames), len(states))
    return [
        transition
        for (enter, loop), part in zip(states, parts, strict=True)
        for transition in (enter, *[loop] * (len(part) - 1))
    ]


def _paths(exp: Path) -> dict[str, list[int]]:
    """The transition-ids of every utterance."""
    paths = {}
    for split in SPLITS:
        store = FrameStore(exp / "features" / split)
        for utterance in read_utterances(exp / "prepare" / f"{split}.jsonl"):
            start, end = store.spans[store.position(utterance.id)]
            words = [word for word in utterance.words if word in WORDS]
            paths[utterance.id] = _transitions(words, int(end - start))
    return paths


def _write_table(path: Path, matrices: dict[str, np.ndarray]) -> Path:
    target = f"ark,scp:{path.with_suffix('.ark')},{path}"
    with kio.FloatMatrixWriter(target) as writer:
        for name, values in matrices.items():
            writer.write(name, values.astype(np.float32))
    return path


def _write_kaldi(folder: Path, paths: dict[str, list[int]]) -> None:
    """An experiment, fMLLR whose rows name their pdf, and i-vectors of nobody."""
    write_experiment(folder, paths)
    words = "<eps> 0\nyes 1\nno 2\n#0 3\n"
    (folder / "graph/words.txt").write_text(words)
    pdfs = {name: np.array(PDFS)[np.array(ids) - 1] for name, ids in paths.items()}
    rows = {name: 3 * np.eye(NUM_PDFS)[found] for name, found in pdfs.items()}
    _write_table(folder / "fmllr.scp", rows)
    nobody = {name: np.zeros((-(-len(ids) // 10), 2)) for name, ids in paths.items()}
    _write_table(folder / "ivectors.scp", nobody)


def test_an_experiment_of_kaldi_leads_to_the_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    corpus, out, kaldi = (tmp_path / name for name in ("corpus", "out", "kaldi"))
    write_corpus(corpus)
    command = ["--corpus", str(corpus), "--out", str(out), "--cores", "1"]
    assert main([*command, "--to", "features"]) == 0  # the lengths of utterances
    _write_kaldi(kaldi, _paths(out / "exp"))
    files = {
        "kaldi.experiment": kaldi,
        "kaldi.fmllr": kaldi / "fmllr.scp",
        "kaldi.ivectors": kaldi / "ivectors.scp",
    }
    chosen = [f"--set={name}={value}" for name, value in {**files, **SMALL}.items()]
    assert main([*command, "--run", "kaldi", *chosen]) == 0
    report = json.loads((out / "exp/score/kaldi/score.json").read_text())
    assert {part: e["num_words"] for part, e in report["parts"].items()} == {
        **{"SWB": 2, "CH": 2, "total": 4}
    }
    assert report["parts"]["total"]["wer"] == 0
    said = capfd.readouterr().out
    for stage in ("align", "triphone", "baseline", "export"):
        assert f"] {stage}: not asked for, skipped" in said
    assert "latgen-faster-mapped" in said
