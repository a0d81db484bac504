"""Speakers whose frames are distorted: adaptation undoes it, in unseen words too."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from lightning_adpsgd.asr.corpora.corpus import Utterance, write_utterances
from lightning_adpsgd.asr.export import KaldiStates, Parts, write_files
from lightning_adpsgd.asr.frames.cepstra import cepstra
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.streams import RowStore, Streams
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.language.lexicon import (
    read_lexicon,
    write_lexicon,
)
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.recogniser import Recogniser
from lightning_adpsgd.asr.search.decoding import Decoder, SearchOptions
from lightning_adpsgd.asr.sound.features import log_mel, normalise_side
from lightning_adpsgd.asr.sound.segments import find_segments
from lightning_adpsgd.asr.speakers.adaptation import Adapter, silent_states
from recipes.hybrid.data.inputs import Inputs, StoredInputs
from recipes.hybrid.pipeline.groups import (
    AdaptSettings,
    AlignSettings,
    DecodeSettings,
    RealignSettings,
    TrainSettings,
)
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.planning import __main__ as planning
from recipes.hybrid.planning import costs, rates
from recipes.hybrid.recognition.decoder import make_decoder
from recipes.hybrid.recognition.scorers import network
from recipes.hybrid.stages import realign as realign_stage
from recipes.hybrid.stages.adapt import adapt
from recipes.hybrid.stages.adapted_align import adapted_align
from recipes.hybrid.stages.adapted_baseline import adapted_baseline
from recipes.hybrid.stages.align import align
from recipes.hybrid.stages.baseline import baseline
from recipes.hybrid.stages.decode import decode
from recipes.hybrid.stages.export import adaptation_of, export
from recipes.hybrid.stages.graph import graph
from recipes.hybrid.stages.realign import realign
from recipes.hybrid.stages.score import score
from recipes.hybrid.stages.train import train
from tests.asr import digits
from tests.recipes.experiments import (
    by_two_machines,
    digits_and_noises,
    run_stage,
    write_frames,
)
from tests.recipes.references import write_reference

Run = Callable[[Settings, Path], None]
SIDES = {"train": 6, "dev": 1, "swb": 2, "ch": 1}
UTTERANCES = 10
ADAPT = AdaptSettings(
    streams="both",
    acoustic_scale=0.3,
    num_gaussians=8,
    ivector_dims=5,
    ivector_iterations=4,
)


class _Distorted:
    """A voice that stretches and shifts the frames of a digits speaker."""

    def __init__(self, speaker: digits.Speaker, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._speaker = speaker
        self._stretch = 1 + 0.15 * random.standard_normal(40)
        self._shift = 0.5 * random.standard_normal(40)

    def frames(self, states: np.ndarray) -> np.ndarray:
        return self._speaker.frames(states) * self._stretch + self._shift


def _write_split(settings: Settings, split: str, speaker: digits.Speaker) -> None:
    spoken, frames, states = [], [], []
    for side in range(SIDES[split]):
        voice = _Distorted(speaker, seed=len(split) + 100 * side)
        for number in range(UTTERANCES):
            words = speaker.sentence(4)
            states.append(speaker.states(words))
            frames.append(voice.frames(states[-1]))
            start = 10.0 * number
            end = start + len(frames[-1]) / 100
            name, recording = f"{split}{side}-A_{number:06d}", f"sw_{split}{side}"
            spoken.append(
                Utterance(
                    name, Path(f"{recording}.sph"), 0, start, end, tuple(words), name
                )
            )
    write_utterances(settings.directory("prepare") / f"{split}.jsonl", spoken)
    ids = [utterance.id for utterance in spoken]
    by_id = dict(zip(ids, frames, strict=True))
    write_frames(settings.directory("features") / split, by_id)
    np.save(settings.out / f"{split}.said.npy", np.concatenate(states))


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    """An experiment of distorted digits, done up to the streams."""
    settings = Settings(
        corpus=Path("corpus"),
        out=tmp_path_factory.mktemp("distorted"),
        cores=1,
        adapt=ADAPT,
        align=AlignSettings(num_iterations=5, num_gaussians=100),
        decode=DecodeSettings(acoustic_scales=(0.3,), gmm_acoustic_scales=(0.3,)),
        train=TrainSettings(
            strategy="ddp",
            num_learners=1,
            epochs=1,
            warmup_epochs=1,
            num_layers=1,
            hidden_size=8,
            bottleneck_size=8,
            max_warp=0,
        ),
    )
    for stage in ("prepare", "lexicon", "lm", "features"):
        settings.directory(stage).mkdir(parents=True)
    write_lexicon(settings.directory("lexicon"), digits_and_noises())
    digits.loop_arpa(settings.directory("lm") / "lm.arpa", list(digits.SPELLED))
    speaker = digits.Speaker(digits_and_noises(), noise=0.5)
    speaker.lexicon = digits.lexicon()  # says digits only
    for split in SIDES:
        _write_split(settings, split, speaker)
    write_reference(settings)
    run_stage(align, settings, "align")
    run_stage(graph, settings, "graph")
    run_stage(adapt, settings, "adapt")
    return settings


def _report(settings: Settings) -> dict:
    return json.loads((settings.directory("adapt") / "report.json").read_text())


def _copied(settings: Settings, tmp_path: Path) -> Settings:
    shutil.copytree(settings.out, tmp_path, dirs_exist_ok=True)
    return dataclasses.replace(settings, out=tmp_path)


def _bytes(settings: Settings, split: str) -> list[bytes]:
    files = ("fmllr/frames.npy", "ivector/rows.npy", "ivector/first.npy")
    folder = settings.directory("adapt") / split
    return [(folder / file).read_bytes() for file in files]


def test_every_split_gets_streams_for_all_its_frames(settings):
    for split, sides in SIDES.items():
        store = FrameStore(settings.directory("features") / split)
        folder = settings.directory("adapt") / split
        streams = Streams(folder, store)
        assert streams.dims == 39 + 5
        beside = streams.utterance(len(store) - 1)
        assert len(beside.fmllr) == len(store.frames(len(store) - 1))
        assert len(np.load(folder / "ivector/rows.npy")) == sides


def test_adapted_frames_are_likelier_for_unseen_speakers_too(settings):
    report = _report(settings)["fmllr"]
    for split, sides in SIDES.items():
        figures = report[split]
        assert figures["kinds"] == {"full": sides}
        assert figures["after"] > figures["before"] + 1
    rounds = report["rounds"]
    assert len(rounds) == 2
    assert rounds[1]["after"] > rounds[0]["after"] > rounds[0]["before"]


def test_a_map_is_what_its_sides_frames_were_moved_by(settings):
    folder = settings.directory("adapt") / "swb"
    with np.load(folder / "transforms.npz") as arrays:
        transform = arrays["transforms"][1]
        assert arrays["sides"].tolist() == ["sw_swb0.sph A", "sw_swb1.sph A"]
    inputs = StoredInputs(settings, "swb")(UTTERANCES)  # the first of the second side
    plain = cepstra(inputs.log_mel.numpy())
    expected = plain @ transform[:, :-1].T + transform[:, -1]
    np.testing.assert_allclose(inputs.fmllr.numpy(), expected, rtol=0.01, atol=0.01)


def test_the_words_of_development_and_test_are_not_looked_at(settings, tmp_path):
    other = _copied(settings, tmp_path)
    for split in ("dev", "swb", "ch"):
        path = other.directory("prepare") / f"{split}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for values in lines:
            values["words"] = ["nine"]
        path.write_text("".join(json.dumps(values) + "\n" for values in lines))
    # nor the labels of dev, made from its words
    (other.directory("align") / "dev/labels.npy").unlink()
    for split in ("dev", "swb", "ch"):
        shutil.rmtree(other.directory("adapt") / split)
    adapt(other, other.directory("adapt"))
    for split in SIDES:
        assert _bytes(other, split) == _bytes(settings, split)


def test_two_machines_write_the_streams_of_one(settings, tmp_path):
    output = tmp_path / "adapt"
    output.mkdir()
    by_two_machines(adapt, settings, output)
    alone = settings.directory("adapt")
    names = {p.relative_to(alone) for p in alone.rglob("*") if p.is_file()}
    found = {p.relative_to(output) for p in output.rglob("*.[nj]*")}
    assert found == names
    assert not [*output.rglob(".*.npy"), *output.rglob("laid")]
    for name in names:
        assert (output / name).read_bytes() == (alone / name).read_bytes()
    shares = (output / ".parts").glob("fmllr-swb-?-of-2.pickle")
    assert len(list(shares)) == 2  # each machine has adapted to some sides


def test_an_interrupted_stage_makes_what_is_missing_and_nothing_else(
    settings, tmp_path
):
    other = _copied(settings, tmp_path)
    folder = other.directory("adapt")
    (folder / "swb/fmllr/frames.npy").unlink()
    (folder / "ch/ivector/rows.npy").unlink()
    kept = [folder / "mixtures.npz", folder / "train/fmllr/frames.npy"]
    before = [path.stat().st_mtime_ns for path in kept]
    adapt(other, folder)
    assert [path.stat().st_mtime_ns for path in kept] == before
    for split in SIDES:
        assert _bytes(other, split) == _bytes(settings, split)


def test_a_network_is_trained_and_decoded_with_the_streams(settings, tmp_path):
    other = _copied(settings, tmp_path)
    run_stage(train, other, "train")
    run_stage(decode, other, "decode")
    report = json.loads((run_stage(score, other, "score") / "score.json").read_text())
    assert report["parts"]["total"]["num_words"] == 4 * UTTERANCES * 3
    call = tmp_path / "call.wav"
    loudness = np.repeat([0.001, 0.2, 0.001, 0.2, 0.001], 16_000)
    sound = loudness * np.random.default_rng(0).standard_normal(80_000)
    soundfile.write(str(call), sound.clip(-1, 1), 8000, subtype="FLOAT")
    recogniser = Recogniser(run_stage(export, other, "export"))
    found = [(said.word, said.start_s) for said in recogniser.transcribe(call)]
    assert found == _words_by_hand(other, recogniser, call)
    assert found


def _words_by_hand(
    settings: Settings, recogniser: Recogniser, call: Path
) -> list[tuple[str, float]]:
    """What the parts of a run say of the only channel of a file."""
    samples, _ = soundfile.read(str(call), dtype="float32")
    frames = log_mel(samples)
    segments = find_segments(frames.mean(1).numpy())
    spoken = normalise_side([frames[first:last] for first, last in segments])
    adapter, decoder = recogniser._adapter, make_decoder(settings)
    assert adapter is not None
    voice = adapter.adapt_to(lambda: (own.numpy() for own in spoken))
    scorer = network(settings.directory("train") / "model.ckpt")
    report = json.loads((settings.directory("decode") / "decode.json").read_text())
    words = []
    for (first, _), own in zip(segments, spoken, strict=True):
        matrix = scorer(Inputs(own, *voice.streams(own.numpy())))
        heard = decoder.decode(matrix, report["acoustic_scale"])
        words += [(one.word, one.start_s + first / 100) for one in heard.words]
    return words


def test_the_adapted_mixtures_make_fewer_errors(settings, tmp_path):
    reports = []
    for stage in (baseline, adapted_baseline):
        stage(settings, tmp_path)
        reports.append(json.loads((tmp_path / "score.json").read_text()))
    plain, adapted = reports
    assert adapted["name"] == "monophone GMM, fMLLR"
    assert adapted["frame_accuracy"] > plain["frame_accuracy"]
    assert adapted["parts"]["total"]["wer"] <= plain["parts"]["total"]["wer"]


def test_online_ivectors_begin_with_the_average_speaker(settings, tmp_path):
    chosen = dataclasses.replace(ADAPT, streams="ivectors", ivector_period=10)
    other = dataclasses.replace(_copied(settings, tmp_path), adapt=chosen)
    shutil.rmtree(other.directory("adapt"))
    folder = run_stage(adapt, other, "adapt")
    together = tmp_path / "together"
    together.mkdir()
    by_two_machines(adapt, other, together)
    for split in SIDES:
        file = f"{split}/ivector/rows.npy"
        assert (together / file).read_bytes() == (folder / file).read_bytes()
    rows = RowStore(folder / "swb/ivector")
    store = FrameStore(other.directory("features") / "swb")
    for side in range(SIDES["swb"]):
        first = rows.along(side * UTTERANCES, len(store.frames(side * UTTERANCES)))
        second = rows.along(side * UTTERANCES + 1, 1)
        assert not first[:10].any()
        assert first[10:].any()
        assert second.any()  # what the first utterance told is kept
    assert not (folder / "swb/fmllr").exists()
    _check_found_again(other, tmp_path / "known", "swb")


def _check_found_again(settings: Settings, folder: Path, split: str) -> None:
    """That a call's streams, found from its sound, are those that the stage wrote."""
    adaptation = adaptation_of(settings)
    assert adaptation is not None
    store = FrameStore(settings.directory("features") / split)
    streams = Streams(settings.directory("adapt") / split, store)
    assert adaptation.write(folder) == streams.dims
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = read_topology(settings.directory("align") / "tree.json")
    decoder, silent = make_decoder(settings), silent_states(lexicon, topology)
    assert isinstance(decoder, Decoder)
    adapter = Adapter.load(folder, adaptation.options, decoder, silent)
    for side in range(SIDES[split]):
        positions = range(side * UTTERANCES, (side + 1) * UTTERANCES)
        spoken = [store.frames(position).numpy() for position in positions]
        voice = adapter.adapt_to(partial(iter, spoken))
        for position, own in zip(positions, spoken, strict=True):
            expected = streams.utterance(position)
            fmllr, ivectors = voice.streams(own)
            # those that are stored have half precision
            torch.testing.assert_close(
                fmllr, expected.fmllr.float(), atol=0.02, rtol=2e-3
            )
            torch.testing.assert_close(
                ivectors, expected.ivector.float(), atol=1e-3, rtol=1e-3
            )


def test_rates_are_measured_on_a_finished_run(settings, monkeypatch, tmp_path):
    smaller = {
        "GAUSSIANS": 8,
        "IVECTOR": 5,
        "STATES": 12,
        "INPUTS": 165,
        "_NETWORK_FRAMES": 10,
    }
    for name, size in smaller.items():
        monkeypatch.setattr(rates, name, size)
    kept = tmp_path / "costs.json"
    shutil.copy(costs.KEPT, kept)
    before = json.loads(kept.read_text())["costs"]
    monkeypatch.setattr(costs, "KEPT", kept)
    monkeypatch.setattr(planning, "_as_the_papers", lambda _: settings)
    assert planning.main(["--rates", str(settings.out), "--machine", "a test"]) == 0
    told = json.loads(kept.read_text())
    assert told["from"].endswith("; a test")
    assert told["costs"].keys() == before.keys()
    changed = {name for name in before if told["costs"][name] != before[name]}
    parts = [name for name in before if ": " in name]
    assert changed == {*parts} - {costs.STATISTICS, costs.LEAVES_GROWN, costs.LANGUAGE}
    assert all(told["costs"][name][1] > 0 for name in changed)


def test_streams_of_ones_own_do_not_go_with_a_graph_of_kaldi(settings, tmp_path):
    model = AcousticModel(
        4, input_size=164, num_layers=1, hidden_size=4, bottleneck_size=4
    )
    parts = Parts(
        model=model,
        num_mels=40,
        acoustic_scale=0.3,
        search=SearchOptions(),
        states=KaldiStates(transitions=tmp_path / "transitions.npz", graph=tmp_path),
        graph=tmp_path,
        adaptation=adaptation_of(settings),
    )
    with pytest.raises(ValueError, match="must be None with a graph of Kaldi"):
        write_files(parts, tmp_path)


def test_a_call_gets_the_streams_that_the_stage_would_write(settings, tmp_path):
    _check_found_again(settings, tmp_path / "known", "swb")


def test_without_adaptation_there_are_no_streams(settings, tmp_path):
    plain = dataclasses.replace(settings, adapt=AdaptSettings())
    adapt(plain, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert plain.streams is None


def test_too_little_speech_for_the_mixture_is_said(settings, tmp_path):
    chosen = dataclasses.replace(ADAPT, streams="ivectors", num_gaussians=100_000)
    other = dataclasses.replace(settings, adapt=chosen)
    with pytest.raises(StageError, match=r"^`adapt`: .*`num_gaussians`.*got 100000"):
        adapt(other, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"streams": "xvectors"}, "`streams` must be one of none, fmllr"),
        ({"decodings": 0}, "`decodings` must be at least 1, got 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(wrong: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        AdaptSettings(**wrong)


def test_a_second_decoding_is_made_with_the_adapted_mixtures(settings, tmp_path):
    once = dataclasses.replace(ADAPT, streams="fmllr", decodings=1)
    other = dataclasses.replace(_copied(settings, tmp_path), adapt=once)
    shutil.rmtree(other.directory("adapt") / "swb")
    adapt(other, other.directory("adapt"))
    before, after = (_report(which)["fmllr"]["swb"] for which in (other, settings))
    assert after["frames"] != before["frames"] or after["after"] > before["after"]
    assert _bytes(other, "train") == _bytes(settings, "train")


class _Adapted:
    """In place of a network of 120 + 39 + 5 inputs: what the adapted mixtures say."""

    def __init__(self, path: Path) -> None:
        known = GaussianMixtures.load(path)
        self._scorer = known.scorer()
        self.hparams = {"input_size": 164, "num_states": known.num_states}

    def log_likelihoods(self, log_mel, fmllr, ivectors) -> torch.Tensor:
        length = len(log_mel)
        assert log_mel.shape == (length, 40)
        assert ivectors.shape == (length, 5)
        assert ivectors.any()
        return torch.from_numpy(self._scorer(fmllr.numpy()))


def test_a_network_with_streams_labels_as_the_adapted_mixtures_do(
    settings, tmp_path, monkeypatch
):
    mixtures = settings.directory("adapt") / "mixtures.npz"
    monkeypatch.setattr(realign_stage, "read_network", lambda _: _Adapted(mixtures))
    realign(
        dataclasses.replace(settings, realign=RealignSettings(run="first")), tmp_path
    )
    found = np.load(tmp_path / "train/labels.npy")
    known = np.load(settings.directory("align") / "train/labels.npy")
    assert (found >= 0).all()
    assert (found == known).mean() > 0.9


def test_adapted_mixtures_label_more_frames_rightly(settings, tmp_path):
    asked = dataclasses.replace(settings, realign=RealignSettings(adapted=True))
    outputs = [tmp_path / name for name in ("one", "two")]
    for output in outputs:
        output.mkdir()
    adapted_align(asked, outputs[0])
    by_two_machines(adapted_align, asked, outputs[1])
    for split in ("train", "dev"):
        file = f"{split}/labels.npy"
        said = np.load(settings.out / f"{split}.said.npy")
        before = np.load(settings.directory("align") / file)
        found, together = (np.load(output / file) for output in outputs)
        assert (found == said).mean() > (before == said).mean()
        np.testing.assert_array_equal(found, together)


def test_a_network_of_other_streams_does_not_realign(settings, tmp_path, monkeypatch):
    network = _Adapted(settings.directory("adapt") / "mixtures.npz")
    monkeypatch.setattr(realign_stage, "read_network", lambda _: network)
    fewer = dataclasses.replace(ADAPT, streams="none")
    asked = dataclasses.replace(
        settings, adapt=fewer, realign=RealignSettings(run="first")
    )
    with pytest.raises(StageError, match=r"takes 164 inputs.*40 or 120.*and 0 of"):
        realign(asked, tmp_path)
