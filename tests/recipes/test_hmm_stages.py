import dataclasses
import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_adpsgd.asr.corpora.corpus import Utterance, write_utterances
from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.frames.store import IGNORE, FrameStore
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import Topology, read_topology, write_topology
from lightning_adpsgd.asr.language.lexicon import write_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from recipes.hybrid.pipeline.groups import (
    AlignSettings,
    DecodeSettings,
    LmSettings,
    RealignSettings,
    TriphoneSettings,
)
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition.scorers import mixtures
from recipes.hybrid.stages import decode as decode_stage
from recipes.hybrid.stages import realign as realign_stage
from recipes.hybrid.stages import triphone as triphone_stage
from recipes.hybrid.stages.align import align
from recipes.hybrid.stages.baseline import baseline
from recipes.hybrid.stages.decode import decode
from recipes.hybrid.stages.export import export
from recipes.hybrid.stages.graph import graph
from recipes.hybrid.stages.realign import realign
from recipes.hybrid.stages.score import score
from recipes.hybrid.stages.triphone import triphone
from tests.asr import digits
from tests.recipes.experiments import (
    by_two_machines,
    digits_and_noises,
    run_stage,
    write_frames,
)
from tests.recipes.references import write_reference

_STATES = ("tree.json", "states.json", "gmm.npz", "train/labels.npy", "dev/labels.npy")
SPLITS = {"train": 60, "dev": 6, "swb": 5, "ch": 4}


def _write_split(
    settings: Settings, split: str, speaker: digits.Speaker, num: int
) -> None:
    utterances, frames = [], []
    for number in range(num):
        words = speaker.sentence(4)
        frames.append(speaker.frames(speaker.states(words)))
        utterances.append(
            Utterance(
                id=f"sw_{split}-A_{number:06d}",
                recording=Path(f"{'en' if split == 'ch' else 'sw'}_{split}.sph"),
                channel=0,
                start_s=10.0 * number,
                end_s=10.0 * number + len(frames[-1]) / 100,
                words=tuple(words),
                speaker=split,
                source=f"{split}.text:{number + 1}",
            )
        )
    write_utterances(settings.directory("prepare") / f"{split}.jsonl", utterances)
    names = [utterance.id for utterance in utterances]
    folder = settings.directory("features") / split
    write_frames(folder, dict(zip(names, frames, strict=True)))


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    """An experiment of spoken digits, done up to the search graph."""
    settings = Settings(
        corpus=Path("corpus"),
        out=tmp_path_factory.mktemp("digits"),
        cores=1,  # forks take longer than so little speech
        align=AlignSettings(num_iterations=5, num_gaussians=100),
        decode=DecodeSettings(
            acoustic_scales=(0.3, 1.0), gmm_acoustic_scales=(0.1, 0.3)
        ),
    )
    for stage in ("prepare", "lexicon", "lm", "features"):
        settings.directory(stage).mkdir(parents=True)
    lexicon = digits_and_noises()
    speaker = digits.Speaker(lexicon, noise=0.3)
    speaker.lexicon = digits.lexicon()  # says digits only
    write_lexicon(settings.directory("lexicon"), lexicon)
    digits.loop_arpa(settings.directory("lm") / "lm.arpa", list(digits.SPELLED))
    for split, num in SPLITS.items():
        _write_split(settings, split, speaker, num)
    write_reference(settings)
    run_stage(align, settings, "align")
    run_stage(graph, settings, "graph")
    return settings


def test_every_frame_gets_a_state_of_the_table(settings):
    states = json.loads((settings.directory("align") / "states.json").read_text())
    for split in ("train", "dev"):
        labels = np.load(settings.directory("align") / split / "labels.npy")
        store = FrameStore(settings.directory("features") / split)
        assert len(labels) == store.num_frames
        assert labels.min() >= 0
        assert labels.max() < states["num_states"] == len(states["names"])


def test_state_counts_are_those_of_the_training_labels(settings):
    folder = settings.directory("align")
    states = json.loads((folder / "states.json").read_text())
    labels = np.load(folder / "train" / "labels.npy")
    counts = np.bincount(labels, minlength=states["num_states"])
    assert states["counts"] == counts.tolist()


@pytest.fixture(scope="module")
def recognised(settings) -> Path:
    """What the alignment's mixtures have recognised."""
    return run_stage(baseline, settings, "baseline")


def test_the_alignments_mixtures_recognise_the_digits(recognised):
    report = json.loads((recognised / "score.json").read_text())
    assert set(report["parts"]) == {"SWB", "CH", "total"}
    assert report["parts"]["total"]["num_words"] == 4 * (SPLITS["swb"] + SPLITS["ch"])
    assert report["parts"]["total"]["wer"] < 0.2
    assert report["frame_accuracy"] > 0.7
    assert str(report["acoustic_scale"]) in report["dev_wer"]


def test_words_are_written_with_confidence_and_speed_is_told(recognised):
    report = json.loads((recognised / "decode.json").read_text())
    decoded = report["decoded"]["swb"]
    assert decoded["utterances"] == SPLITS["swb"]
    assert 0.5 < decoded["confidence"] <= 1
    assert decoded["real_time_factor"] > 0
    assert report["least_fit"] < 0
    lines = (recognised / "swb.words.jsonl").read_text().splitlines()
    words = [word for line in lines for word in json.loads(line)["words"]]
    mean = sum(word["confidence"] for word in words) / len(words)
    assert mean == pytest.approx(decoded["confidence"], abs=1e-4)


def test_lists_that_the_mixtures_do_not_rescore_are_not_called_short(
    settings, recognised, tmp_path, capsys
):
    other = override(settings, "lm.large_order=4", "decode.nbest=5")
    baseline(other, tmp_path)
    assert "shorter than decode.nbest" not in capsys.readouterr().out
    reports = (folder / "decode.json" for folder in (recognised, tmp_path))
    told = [json.loads(path.read_text())["decoded"]["swb"] for path in reports]
    assert told[0]["short_lists"] == told[1]["short_lists"] == 0


def test_word_times_lie_within_their_utterances(recognised):
    lines = (recognised / "swb.ctm").read_text().splitlines()
    assert len(lines) > 0
    for line in lines:
        recording, channel, start, duration, _, confidence = line.split()
        assert 0 <= float(confidence) <= 1
        assert (recording, channel) == ("sw_swb", "A")
        assert float(start) % 10 + float(duration) < 10


@pytest.fixture(scope="module")
def triphones(settings, tmp_path_factory) -> Settings:
    """The same experiment with a tree, from the labels of `settings` on."""
    out = tmp_path_factory.mktemp("triphones")
    (out / "exp").symlink_to(settings.out / "exp")
    chosen = TriphoneSettings(
        num_leaves=90,
        min_frames=40,
        num_gaussians=150,
        frames_per_gaussian=20,
        num_iterations=3,
        lda_dimension=20,
    )
    others = dataclasses.replace(settings, out=out, states="triphone", triphone=chosen)
    several = dataclasses.replace(others, cores=2)
    run_stage(triphone, several, "triphone")
    return others


def test_triphones_label_every_frame_by_their_own_table(triphones):
    folder = triphones.directory("states")
    states = json.loads((folder / "states.json").read_text())
    topology = read_topology(folder / "tree.json")
    assert folder.name == "triphone"
    assert states["num_states"] == topology.num_states
    assert 3 * len(topology.phones) < topology.num_states <= 90
    labels = np.load(folder / "train" / "labels.npy")
    counts = np.bincount(labels, minlength=states["num_states"])
    assert states["counts"] == counts.tolist()
    mono = np.load(triphones.directory("align") / "train" / "labels.npy")
    assert (topology.phone_of_state[labels] == mono // 3).mean() > 0.9


@pytest.mark.parametrize(
    ("most", "frames", "seen", "expected"),
    [
        (4000, 350_000, 6000, 1000),  # of little speech
        (400, 350_000, 6000, 400),
        (4000, 350_000, 25, 250),  # a quarter of 100 utterances
    ],
)
def test_every_gaussian_of_triphones_has_its_frames(
    settings, most: int, frames: int, seen: int, expected: int
):
    chosen = dataclasses.replace(
        settings,
        triphone=TriphoneSettings(num_gaussians=most, frames_per_gaussian=350),
        align=AlignSettings(max_training_utterances=seen),
    )
    store = create_autospec(FrameStore, instance=True, num_frames=frames)
    store.__len__.return_value = 100
    assert triphone_stage.num_gaussians(chosen, store) == expected


def test_the_tree_is_made_once_when_its_stage_is_interrupted(
    triphones, tmp_path, monkeypatch
):
    finished = triphones.directory("triphone")
    for name in ("tree.json", "front_end.npz"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    monkeypatch.setattr(triphone_stage, "grow", None)  # would fail if it were called
    triphone(_by_one_process(triphones), tmp_path)
    labels = [np.load(f / "dev" / "labels.npy") for f in (tmp_path, finished)]
    np.testing.assert_array_equal(*labels)


def _by_one_process(triphones: Settings, **changes: Any) -> Settings:
    """Without processes beside: to fork them costs more than they save."""
    chosen = dataclasses.replace(triphones.triphone, **changes)
    return dataclasses.replace(triphones, cores=1, triphone=chosen)


def test_a_second_round_grows_its_tree_on_the_labels_of_the_first(
    triphones, tmp_path, monkeypatch
):
    kept: list[Path] = []
    keeping = SimpleNamespace(rmtree=kept.append)
    monkeypatch.setattr(triphone_stage, "shutil", keeping)
    triphone(_by_one_process(triphones, rounds=2), tmp_path)
    [first] = kept
    once = triphones.directory("triphone")
    for name in _STATES:
        assert (first / name).read_bytes() == (once / name).read_bytes()
    # as if somebody had begun with these labels
    other = tmp_path / "other"
    other.mkdir()
    triphone(_by_one_process(triphones, start=once), other)
    for name in _STATES:
        assert (tmp_path / name).read_bytes() == (other / name).read_bytes()


def test_a_tree_on_the_labels_of_a_network_may_keep_them(triphones, tmp_path):
    """In place of a network's labels: those of the mixtures."""
    start = triphones.directory("triphone")
    triphone(_by_one_process(triphones, start=start, keep_labels=True), tmp_path)
    before, after = (read_topology(f / "tree.json") for f in (start, tmp_path))
    for split in ("train", "dev"):
        old, new = (np.load(f / split / "labels.npy") for f in (start, tmp_path))
        assert len(new) > 0
        for part in ("phone_of_state", "position_of_state"):
            found, expected = getattr(after, part)[new], getattr(before, part)[old]
            np.testing.assert_array_equal(found, expected)
    described = json.loads((tmp_path / "states.json").read_text())
    labels = np.load(tmp_path / "train" / "labels.npy")
    assert described["counts"] == np.bincount(labels).tolist()
    assert len(described["names"]) == after.num_states
    # the mixtures of the leaves are there for a baseline, and fit these states
    gaussians = GaussianMixtures.load(tmp_path / "gmm.npz")
    assert gaussians.num_states == after.num_states


def test_labels_that_do_not_fit_are_refused(triphones, tmp_path):
    gone = dataclasses.replace(triphones.triphone, start=tmp_path / "gone")
    with pytest.raises(StageError, match=r"gone/tree\.json: expected a decision tree"):
        triphone(dataclasses.replace(triphones, triphone=gone), tmp_path)
    other = tmp_path / "other"
    shutil.copytree(triphones.directory("triphone"), other)
    asked = dataclasses.replace(
        triphones, triphone=dataclasses.replace(triphones.triphone, start=other)
    )
    labels = other / "train" / "labels.npy"
    np.save(labels, np.load(labels)[1:])
    with pytest.raises(StageError, match=r"labels\.npy: expected \d+ labels, one per"):
        triphone(asked, tmp_path)
    write_topology(other / "tree.json", Topology(("sil", "ah")))
    with pytest.raises(
        StageError, match=r"expected the \d+ phones of .*found 2 others"
    ):
        triphone(asked, tmp_path)


def test_fewer_leaves_than_phones_have_states_stop_the_stage(triphones, tmp_path):
    few = dataclasses.replace(triphones.triphone, num_leaves=7)
    with pytest.raises(StageError, match="`num_leaves` must be at least"):
        triphone(dataclasses.replace(triphones, triphone=few), tmp_path)


def test_the_triphones_mixtures_recognise_the_digits(triphones, tmp_path):
    others = dataclasses.replace(_by_one_process(triphones), out=tmp_path)
    run_stage(graph, _linked(others, triphones, "graph"), "graph")
    report = json.loads(
        (run_stage(baseline, others, "baseline") / "score.json").read_text()
    )
    assert report["name"] == "triphone GMM"
    assert report["parts"]["total"]["wer"] < 0.2
    assert report["frame_accuracy"] > 0.6


def _linked(settings: Settings, finished: Settings, without: str) -> Settings:
    """`settings`, in whose folder the finished stages lie, but for one."""
    (settings.out / "exp").mkdir()
    for folder in (finished.out / "exp").iterdir():
        if folder.name not in (without, "baseline", "decode", "score"):
            (settings.out / "exp" / folder.name).symlink_to(folder)
    return settings


def test_a_network_that_knows_the_states_labels_as_the_mixtures_do(
    triphones, tmp_path, monkeypatch
):
    gaussians = GaussianMixtures.load(triphones.directory("mixtures") / "gmm.npz")
    front_end = FrontEnd.load(triphones.directory("mixtures") / "front_end.npz")
    scorer = gaussians.scorer()

    class Knows:
        hparams: ClassVar = {"input_size": 120, "num_states": gaussians.num_states}

        def log_likelihoods(self, log_mel, fmllr, ivectors) -> torch.Tensor:
            assert fmllr.shape == ivectors.shape == (len(log_mel), 0)
            return torch.from_numpy(scorer(front_end(log_mel.numpy())))

    # in place of a trained network: what the mixtures say, from the run that is named
    paths = []
    monkeypatch.setattr(
        realign_stage,
        "read_network",
        lambda path: paths.append(path) or Knows(),
    )
    asked = dataclasses.replace(
        _by_one_process(triphones), realign=RealignSettings(run="first")
    )
    assert asked.directory("states").parts[-2:] == ("realign", "first")
    realign(asked, tmp_path)
    assert paths == [triphones.out / "exp" / "train" / "first" / "model.ckpt"]
    for name in ("states.json", "tree.json"):
        found, expected = (
            json.loads((f / name).read_text())
            for f in (tmp_path, triphones.directory("triphone"))
        )
        assert found == expected


def test_a_network_of_other_states_does_not_realign(triphones, tmp_path, monkeypatch):
    monophones = _num_states(triphones.directory("align"))
    tied = _num_states(triphones.directory("triphone"))
    model = AcousticModel(monophones, num_layers=1, hidden_size=2, bottleneck_size=2)
    monkeypatch.setattr(realign_stage, "read_network", lambda _: model)
    asked = dataclasses.replace(triphones, realign=RealignSettings(run="first"))
    with pytest.raises(StageError, match=f"has {monophones} outputs.* {tied} states"):
        realign(asked, tmp_path)


def _num_states(folder: Path) -> int:
    return json.loads((folder / "states.json").read_text())["num_states"]


def _save_untrained_model(settings: Settings) -> None:
    states = json.loads((settings.directory("align") / "states.json").read_text())
    model = AcousticModel(
        states["num_states"], num_layers=1, hidden_size=4, bottleneck_size=4
    )
    model.set_priors(torch.tensor(states["counts"]))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    settings.directory("train").mkdir(parents=True)
    trainer.save_checkpoint(settings.directory("train") / "model.ckpt")


def test_a_network_that_has_learnt_nothing_is_decoded_and_scored(settings):
    _save_untrained_model(settings)
    run_stage(decode, settings, "decode")
    output = run_stage(score, settings, "score")
    report = json.loads((output / "score.json").read_text())
    assert report["name"] == settings.run
    assert report["parts"]["total"]["wer"] > 0.5
    lines = (settings.directory("decode") / "swb.txt").read_text().splitlines()
    assert len(lines) == SPLITS["swb"]


def test_without_a_test_set_nothing_is_scored_and_the_model_is_exported(
    settings, tmp_path, capsys
):
    others = dataclasses.replace(settings, out=tmp_path, run="untested")
    prepared, spoken = others.directory("prepare"), settings.directory("prepare")
    _linked(others, settings, "prepare")
    prepared.mkdir()
    for split in ("train", "dev"):
        (prepared / f"{split}.jsonl").symlink_to(spoken / f"{split}.jsonl")
    _save_untrained_model(others)
    assert not (run_stage(baseline, others, "baseline") / "score.json").exists()
    run_stage(decode, others, "decode")
    assert list(run_stage(score, others, "score").iterdir()) == []
    assert capsys.readouterr().out.count("no test set: nothing is scored") == 2
    exported = run_stage(export, others, "export")
    assert "Not scored" in (exported / "MODEL_CARD.md").read_text()


def test_two_machines_find_the_words_of_one_for_both_networks(
    settings, tmp_path, monkeypatch
):
    asked = dataclasses.replace(
        settings,
        cores=1,
        lm=LmSettings(large_order=3),
        decode=dataclasses.replace(settings.decode, nbest=5, export_lattices=True),
    )
    shutil.copy(asked.directory("lm") / "lm.arpa", asked.directory("lm") / "large.arpa")
    scorer = mixtures(asked.directory("mixtures"))
    monkeypatch.setattr(decode_stage, "network", lambda _: scorer)
    monkeypatch.setattr(decode_stage, "_check_outputs", lambda _: None)
    monkeypatch.setattr(decode_stage, "best_is_another", lambda _: True)
    outputs = [tmp_path / name for name in ("one", "two")]
    for output in outputs:
        output.mkdir()
    decode(asked, outputs[0])
    by_two_machines(decode, asked, outputs[1])
    alone, together = (_written(output) for output in outputs)
    assert alone == together
    assert {"swb.ctm", "ch.lat.gz", "best/swb.txt"} <= alone.keys()
    shares = (outputs[1] / ".parts").glob("swb-?-of-2.pickle")
    assert len(list(shares)) == 2  # each machine has searched some


def _written(output: Path) -> dict[str, Any]:
    """Everything that a decoding has left, but for its speed."""
    found: dict[str, Any] = {}
    for path in output.rglob("*"):
        if path.is_file() and path.suffix != ".pickle":
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            found[str(path.relative_to(output))] = data
    for name in ("decode.json", "best/decode.json"):
        report = json.loads(found[name])
        for split in report["decoded"].values():
            del split["real_time_factor"]
        found[name] = report
    return found


def test_decoding_without_training_says_what_to_do(settings, tmp_path):
    untrained = dataclasses.replace(settings, run="never")
    with pytest.raises(StageError, match="train first"):
        decode(untrained, tmp_path)


def test_an_utterance_that_cannot_be_aligned_is_left_out_and_named(
    settings, tmp_path, capsys
):
    other = dataclasses.replace(settings, out=tmp_path, cores=1)
    for stage in ("prepare", "lexicon", "features"):
        other.directory(stage).mkdir(parents=True)
    write_lexicon(other.directory("lexicon"), digits_and_noises())
    speaker = digits.Speaker(digits_and_noises(), noise=0.3)
    speaker.lexicon = digits.lexicon()
    for split in ("train", "dev"):
        _write_split(other, split, speaker, 12)
    path = other.directory("prepare") / "train.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    first["words"] = ["seven"] * 99  # more than fit into its frames
    path.write_text("\n".join([json.dumps(first), *lines[1:], ""]))
    output = run_stage(align, other, "align")
    labels = np.load(output / "train" / "labels.npy")
    store = FrameStore(other.directory("features") / "train")
    assert (labels == IGNORE).sum() == len(store.frames(0))
    assert "train.text:1" in capsys.readouterr().out
