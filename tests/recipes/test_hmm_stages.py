import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_adpsgd.asr.corpus import Utterance, read_utterances, write_utterances
from lightning_adpsgd.asr.lexicon import SPECIAL_WORDS, Lexicon, write_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.store import IGNORE, FrameStore, FrameWriter
from recipes.switchboard.decode_stages import baseline, decode
from recipes.switchboard.hmm_stages import align, graph
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.score_stage import score
from recipes.switchboard.settings import AlignSettings, DecodeSettings, Settings
from tests.asr import digits

SPLITS = {"train": 60, "dev": 6, "swb": 5, "ch": 4}


def _lexicon() -> Lexicon:
    plain = digits.lexicon()
    special = {word: ((phone,),) for word, phone in SPECIAL_WORDS.items()}
    return Lexicon(
        {**special, **plain.pronunciations},
        ("sil", "spn", "nsn", "lau"),
        plain.nonsilence_phones,
    )


def _write_split(
    settings: Settings, split: str, speaker: digits.Speaker, num: int
) -> None:
    utterances, frames = [], []
    for number in range(num):
        words = speaker.sentence(4)
        frames.append(speaker.frames(speaker.states(words)))
        utterances.append(
            Utterance(
                id=f"{split}-A_{number:06d}",
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
    writer = FrameWriter(
        settings.directory("features") / split,
        [utterance.id for utterance in utterances],
        [len(frame) for frame in frames],
        40,
    )
    writer.create()
    for position, frame in enumerate(frames):
        writer.put(position, frame)
    writer.finish()


def _write_reference(settings: Settings) -> None:
    prepared = settings.directory("prepare")
    lines = [
        " ".join(
            (u.recording.stem, "A", "x", f"{u.start_s} {u.end_s}", "<O>", *u.words)
        )
        for split in ("swb", "ch")
        for u in read_utterances(prepared / f"{split}.jsonl")
    ]
    (prepared / "eval.stm").write_text("".join(f"{line}\n" for line in lines))


def _run(stage, settings: Settings, name: str) -> Path:
    output = settings.directory(name)
    output.mkdir(parents=True)
    stage(settings, output)
    return output


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    """An experiment of spoken digits, done up to the search graph."""
    settings = Settings(
        corpus=Path("corpus"),
        out=tmp_path_factory.mktemp("digits"),
        align=AlignSettings(num_iterations=5, num_gaussians=100),
        decode=DecodeSettings(
            acoustic_scales=(0.3, 1.0), gmm_acoustic_scales=(0.1, 0.3)
        ),
    )
    for stage in ("prepare", "lexicon", "lm", "features"):
        settings.directory(stage).mkdir(parents=True)
    lexicon = _lexicon()
    speaker = digits.Speaker(lexicon, noise=0.3)
    speaker.lexicon = digits.lexicon()  # says digits only
    write_lexicon(settings.directory("lexicon"), lexicon)
    digits.loop_arpa(settings.directory("lm") / "lm.arpa", list(digits.SPELLED))
    for split, num in SPLITS.items():
        _write_split(settings, split, speaker, num)
    _write_reference(settings)
    _run(align, settings, "align")
    _run(graph, settings, "graph")
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


def test_the_alignments_mixtures_recognise_the_digits(settings):
    output = _run(baseline, settings, "baseline")
    report = json.loads((output / "score.json").read_text())
    assert set(report["parts"]) == {"SWB", "CH", "total"}
    assert report["parts"]["total"]["num_words"] == 4 * (SPLITS["swb"] + SPLITS["ch"])
    assert report["parts"]["total"]["wer"] < 0.2
    assert report["frame_accuracy"] > 0.7
    assert report["acoustic_scale"] in (0.1, 0.3)


def test_word_times_lie_within_their_utterances(settings, tmp_path):
    baseline(settings, tmp_path)
    lines = (tmp_path / "swb.ctm").read_text().splitlines()
    assert len(lines) > 0
    for line in lines:
        recording, channel, start, duration, _ = line.split()
        assert (recording, channel) == ("sw_swb", "A")
        assert float(start) % 10 + float(duration) < 10


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
    _run(decode, settings, "decode")
    output = _run(score, settings, "score")
    report = json.loads((output / "score.json").read_text())
    assert report["name"] == settings.run
    assert report["parts"]["total"]["wer"] > 0.5
    lines = (settings.directory("decode") / "swb.txt").read_text().splitlines()
    assert len(lines) == SPLITS["swb"]


def test_decoding_without_training_says_what_to_do(settings, tmp_path):
    untrained = dataclasses.replace(settings, run="never")
    with pytest.raises(StageError, match="train first"):
        decode(untrained, tmp_path)


def test_an_utterance_that_cannot_be_aligned_is_left_out_and_named(
    settings, tmp_path, capsys
):
    other = dataclasses.replace(settings, out=tmp_path)
    for stage in ("prepare", "lexicon", "features"):
        other.directory(stage).mkdir(parents=True)
    write_lexicon(other.directory("lexicon"), _lexicon())
    speaker = digits.Speaker(_lexicon(), noise=0.3)
    speaker.lexicon = digits.lexicon()
    for split in ("train", "dev"):
        _write_split(other, split, speaker, 12)
    path = other.directory("prepare") / "train.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    first["words"] = ["seven"] * 99  # more than fit into its frames
    path.write_text("\n".join([json.dumps(first), *lines[1:], ""]))
    output = _run(align, other, "align")
    labels = np.load(output / "train" / "labels.npy")
    store = FrameStore(other.directory("features") / "train")
    assert (labels == IGNORE).sum() == len(store.frames(0))
    assert "train.text:1" in capsys.readouterr().out
