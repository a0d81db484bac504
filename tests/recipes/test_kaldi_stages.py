"""The recipe with the labels and the graph of a Kaldi experiment."""

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import kaldi_native_io as kio
import numpy as np
import pytest
import soundfile
import torch
from lightning.pytorch import Trainer

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance, write_utterances
from lightning_adpsgd.asr.export import Parts, export
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.streams import Streams
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.recogniser import Recogniser
from lightning_adpsgd.asr.search.decoding import SearchOptions
from lightning_adpsgd.asr.sound.features import log_mel, normalise_side
from recipes.hybrid.adaptation import kaldi as kaldi_streams
from recipes.hybrid.data.inputs import Inputs
from recipes.hybrid.data.kaldi import find_kaldi
from recipes.hybrid.pipeline.groups import (
    AdaptSettings,
    DecodeSettings,
    KaldiSettings,
    LmSettings,
)
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition.kaldi import decoder
from recipes.hybrid.stages import STAGES
from recipes.hybrid.stages import decode as decode_stage
from recipes.hybrid.stages.adapt import adapt
from recipes.hybrid.stages.export import states_of
from recipes.hybrid.stages.graph import graph
from recipes.hybrid.stages.kaldi import kaldi as labels
from recipes.hybrid.stages.score import score
from tests.asr import digits
from tests.asr.kaldi_files import (
    NUM_PDFS,
    PDFS,
    write_alignments,
    write_experiment,
)
from tests.recipes.experiments import run_stage, write_frames

SENTENCES = {
    "train": {"sw1-A_1": [2, 1, 4, 3, 6, 8, 7, 10, 9, 2], "sw1-A_2": [4, 3, 6, 2, 1]},
    "dev": {"sw2-A_1": [2, 1, 8, 7, 7, 10, 2, 1]},
    "swb": {"sw_3-A_1": [2, 1, 4, 3, 6, 5, 8, 7, 10, 2]},
}
SAID = {"sw1-A_1": "ab", "sw1-A_2": "a", "sw2-A_1": "b", "sw_3-A_1": "ab"}


def write_split(settings: Settings, split: str) -> None:
    """Frames whose first value is the pdf, so that a scorer can read it off."""
    utterances, frames = [], {}
    for name, ids in SENTENCES[split].items():
        frames[name] = np.zeros((len(ids), 40), np.float32)
        frames[name][:, 0] = [PDFS[i - 1] for i in ids]
        recording = Path(f"{name.split('-')[0]}.sph")
        words, end_s = tuple(SAID[name]), len(ids) / 100
        utterances.append(Utterance(name, recording, 0, 0.0, end_s, words, name))
    write_frames(settings.directory("features") / split, frames)
    write_utterances(settings.directory("prepare") / f"{split}.jsonl", utterances)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    experiment = tmp_path / "exp" / "tri4_ali"
    write_experiment(experiment, {**SENTENCES["train"], **SENTENCES["dev"]})
    settings = Settings(
        corpus=tmp_path / "corpus",
        out=tmp_path / "out",
        cores=1,
        kaldi=KaldiSettings(experiment=experiment, least_coverage=0.5),
        decode=DecodeSettings(
            acoustic_scales=(1.0,), export_likelihoods=True, export_lattices=True
        ),
    )
    settings.directory("prepare").mkdir(parents=True)
    for split in SENTENCES:
        write_split(settings, split)
    stm = "sw_3 A s 0.00 0.10 <O> A B\n"
    (settings.directory("prepare") / "eval.stm").write_text(stm)
    return settings


def test_labels_are_kaldis_pdfs(settings, capsys):
    folder = run_stage(labels, settings, "kaldi")
    assert settings.directory("states") == settings.directory("mixtures") == folder
    store = FrameStore(settings.directory("features") / "train")
    found = np.load(folder / "train" / "labels.npy")
    assert found.tolist() == store.frame_range(0, 15)[:, 0].int().tolist()
    states = json.loads((folder / "states.json").read_text())
    assert states["num_states"] == NUM_PDFS
    assert states["counts"] == np.bincount(found, minlength=NUM_PDFS).tolist()
    said = capsys.readouterr().out
    assert "4 pdfs, 10 transition-ids; 2 files" in said
    assert "train: 15 frames labelled, 2 of 2 utterances (100.0%) have labels" in said


def least(settings: Settings, share: float) -> Settings:
    kaldi = dataclasses.replace(settings.kaldi, least_coverage=share)
    return dataclasses.replace(settings, kaldi=kaldi)


def test_too_few_labels_stop_the_stage_and_say_whose_are_missing(settings):
    for path in settings.kaldi.folder.glob("ali.*"):
        path.unlink()
    some = {"sw1-A_1": SENTENCES["train"]["sw1-A_1"], **SENTENCES["dev"]}
    write_alignments(settings.kaldi.folder / "ali.1.gz", some)
    (settings.kaldi.folder / "num_jobs").write_text("1\n")
    with pytest.raises(StageError, match=r"train: 1 of 2 utterances.*missing: sw1-A_2"):
        run_stage(labels, least(settings, 0.95), "kaldi")


def sharp(inputs: Inputs) -> np.ndarray:
    """Log-likelihoods that name the pdf that the frames carry."""
    return named(inputs.log_mel.numpy())


def named(frames: np.ndarray) -> np.ndarray:
    matrix = np.full((len(frames), NUM_PDFS), -20.0, np.float32)
    matrix[np.arange(len(frames)), frames[:, 0].astype(int)] = 0.0
    return matrix


def test_kaldis_graph_is_decoded_scored_and_exported(settings, monkeypatch, capsys):
    run_stage(labels, settings, "kaldi")
    run_stage(graph, settings, "graph")
    monkeypatch.setattr(decode_stage, "network", lambda _: sharp)
    monkeypatch.setattr(decode_stage, "_check_outputs", lambda _: None)
    monkeypatch.setattr(decode_stage, "best_is_another", lambda _: True)
    decoded = run_stage(decode_stage.decode, settings, "decode")
    report = json.loads((decoded / "decode.json").read_text())
    assert report["frame_accuracy"] == 1.0
    assert report["dev_wer"] == {"1.0": 0.0}
    times = (decoded / "swb.ctm").read_text().splitlines()
    assert times == ["sw_3 A 0.02 0.04 a 1.000", "sw_3 A 0.06 0.03 b 1.000"]
    report = json.loads(
        (run_stage(score, settings, "score") / "score.json").read_text()
    )
    assert report["parts"]["total"]["wer"] == 0.0

    lattice = gzip.decompress((decoded / "swb.lat.gz").read_bytes()).decode()
    name, *lines = lattice.splitlines()
    assert name == "sw_3-A_1"
    assert {len(line.split()) for line in lines} == {0, 2, 5}
    read = {int(line.split()[2]) for line in lines if len(line.split()) == 5}
    assert read >= set(SENTENCES["swb"]["sw_3-A_1"])

    archive = decoded / "swb.loglikes.scp"
    for table in (archive, decoded / "best" / archive.name):
        assert f" {table.resolve().with_suffix('.ark')}:" in table.read_text()
    reader = kio.RandomAccessFloatMatrixReader(f"scp:{archive}")
    store = FrameStore(settings.directory("features") / "swb")
    assert np.array_equal(np.array(reader["sw_3-A_1"]), named(store.frames(0).numpy()))
    command = (decoded / "swb.latgen.sh").read_text().splitlines()[1]
    assert command in capsys.readouterr().out
    assert f"scp:{archive.resolve()}" in command
    assert f"{settings.kaldi.experiment}/final.mdl" in command


def test_alternatives_of_kaldis_graph_are_weighed_with_a_larger_model(
    settings, monkeypatch, tmp_path
):
    run_stage(labels, settings, "kaldi")
    run_stage(graph, settings, "graph")
    monkeypatch.setattr(decode_stage, "network", lambda _: sharp)
    monkeypatch.setattr(decode_stage, "_check_outputs", lambda _: None)
    folder = settings.directory("lm")
    folder.mkdir()
    small = digits.loop_arpa(tmp_path / "kaldi.arpa", ["a", "b"])
    shutil.copy(small, folder / "large.arpa")
    asked = dataclasses.replace(
        settings,
        kaldi=dataclasses.replace(settings.kaldi, arpa=small),
        lm=LmSettings(large_order=4),
        decode=DecodeSettings(acoustic_scales=(1.0,), nbest=5),
    )
    decoded = run_stage(decode_stage.decode, asked, "decode")
    report = json.loads((decoded / "decode.json").read_text())
    assert report["rescored"]["dev_wer"] == 0.0
    times = (decoded / "swb.ctm").read_text().splitlines()
    assert times == ["sw_3 A 0.02 0.04 a 1.000", "sw_3 A 0.06 0.03 b 1.000"]


def test_a_language_model_that_is_not_there_is_named_before_anything_starts(settings):
    kaldi = dataclasses.replace(settings.kaldi, arpa=settings.corpus / "sw1.arpa")
    with pytest.raises(StageError, match=r"kaldi\.arpa: .*sw1\.arpa is not a file"):
        find_kaldi(dataclasses.replace(settings, kaldi=kaldi))


def test_alternatives_need_the_model_of_kaldis_graph(settings):
    with pytest.raises(ValueError, match=r"name it with `kaldi\.arpa`, or set"):
        override(settings, "decode.nbest=5")


def test_a_model_with_kaldis_graph_is_exported_and_says_the_same(settings, tmp_path):
    run_stage(labels, settings, "kaldi")
    run_stage(graph, settings, "graph")
    torch.manual_seed(0)
    model = AcousticModel(NUM_PDFS, num_layers=1, hidden_size=4, bottleneck_size=4)
    search = SearchOptions()
    parts = Parts(
        model=model.eval(),
        num_mels=40,
        acoustic_scale=1.0,
        search=search,
        states=states_of(settings),
        graph=settings.directory("graph"),
    )
    export(parts, tmp_path / "model")
    call = tmp_path / "call.wav"
    sound = 0.2 * np.random.default_rng(0).standard_normal(16_000)
    soundfile.write(str(call), sound.clip(-1, 1), 8000, subtype="FLOAT")
    found = [said[1:4] for said in Recogniser(tmp_path / "model").transcribe(call)]
    samples, _ = soundfile.read(str(call), dtype="float32")
    [spoken] = normalise_side([log_mel(samples)])  # as loud from end to end
    matrix = model.log_likelihoods(spoken).numpy()
    heard = decoder(settings, search).decode(matrix, 1.0)
    assert [said[0] for said in found] == list(heard.text)
    assert found
    assert found[0][1] == pytest.approx(heard.words[0].start_s)
    states = json.loads((tmp_path / "model" / "states.json").read_text())
    assert states["names"] == ["pdf0", "pdf1", "pdf2", "pdf3"]


def test_a_network_has_as_many_outputs_as_kaldi_has_pdfs(settings):
    run_stage(labels, settings, "kaldi")
    run_stage(graph, settings, "graph")
    model = AcousticModel(NUM_PDFS + 1, num_layers=1, hidden_size=4, bottleneck_size=4)
    model.set_priors(torch.ones(NUM_PDFS + 1))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    settings.directory("train").mkdir(parents=True)
    trainer.save_checkpoint(settings.directory("train") / "model.ckpt")
    with pytest.raises(StageError, match=r"5 outputs, .* 4 states"):
        run_stage(decode_stage.decode, settings, "decode")


def test_missing_files_are_named_before_anything_starts(settings):
    experiment = settings.kaldi.folder
    shutil.rmtree(experiment / "graph")
    (experiment / "ali.1.gz").unlink()
    with pytest.raises(StageError) as caught:
        find_kaldi(settings)
    assert "ali.1.gz" in str(caught.value)
    assert "kaldi.graph=DIR" in str(caught.value)


def test_an_archive_that_is_cut_short_stops_the_stage(settings):
    path = settings.kaldi.folder / "ali.2.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(StageError, match=r"ali\.2\.gz: byte \d+"):
        run_stage(labels, settings, "kaldi")


def test_held_out_utterances_without_alignments_say_what_to_do(settings):
    shutil.rmtree(settings.kaldi.folder)
    write_experiment(settings.kaldi.folder, SENTENCES["train"])
    with pytest.raises(StageError, match=r"dev: .*kaldi\.more_alignments=DIR"):
        run_stage(labels, settings, "kaldi")
    more = settings.out / "dev_ali"
    write_experiment(more, SENTENCES["dev"])
    kaldi = dataclasses.replace(settings.kaldi, more_alignments=(more,))
    labels(dataclasses.replace(settings, kaldi=kaldi), settings.directory("kaldi"))
    assert (settings.directory("kaldi") / "dev" / "labels.npy").exists()


def write_archive(path: Path, matrices: dict[str, np.ndarray]) -> str:
    target = f"ark,scp:{path.with_suffix('.ark')},{path}"
    with kio.FloatMatrixWriter(target) as writer:
        for name, values in matrices.items():
            writer.write(name, values.astype(np.float32))
    return str(path)


def with_streams(settings: Settings, fmllr: str, ivectors: str) -> Settings:
    kaldi = dataclasses.replace(
        settings.kaldi, fmllr=(fmllr,), ivectors=(ivectors,), ivector_period=4
    )
    return dataclasses.replace(
        settings, kaldi=kaldi, adapt=AdaptSettings(streams="both")
    )


def test_streams_are_those_of_kaldis_archives(settings, tmp_path, capsys):
    lengths = {n: len(ids) for part in SENTENCES.values() for n, ids in part.items()}
    rng = np.random.default_rng(0)
    fmllr = {name: rng.normal(size=(n, 3)) for name, n in lengths.items()}
    online = {name: rng.normal(size=(-(-n // 4), 2)) for name, n in lengths.items()}
    fmllr["sw1-A_1"] = fmllr["sw1-A_1"][:-1]  # a frame less than log-mel
    del online["sw1-A_2"]
    chosen = with_streams(
        settings,
        write_archive(tmp_path / "fmllr.scp", fmllr),
        write_archive(tmp_path / "ivectors.scp", online),
    )
    folder = run_stage(adapt, chosen, "adapt")
    store = FrameStore(settings.directory("features") / "train")
    streams = Streams(folder / "train", store)
    frames, rows = streams.utterance(store.position("sw1-A_1"))
    repeated = np.concatenate([fmllr["sw1-A_1"], fmllr["sw1-A_1"][-1:]])
    assert frames.float().numpy() == pytest.approx(repeated, abs=2e-3)
    expected = np.repeat(online["sw1-A_1"], 4, axis=0)[:10]
    assert rows.numpy() == pytest.approx(expected, abs=1e-6)
    _, rows = streams.utterance(store.position("sw1-A_2"))
    assert (rows == 0).all()
    said = capsys.readouterr().out
    assert "train: 1 of 2 utterances (50.0%) have rows of kaldi.ivectors" in said
    assert "train: rows cut or repeated: 1, for example sw1-A_1 (9 for 10)" in said
    assert "train: without rows, zeros in their place: 1 (0.00 h)" in said


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fmllr_of_kaldi_is_stored_in_the_type_of_the_features(
    settings, tmp_path, dtype
):
    lengths = {n: len(ids) for part in SENTENCES.values() for n, ids in part.items()}
    fmllr = {name: np.ones((n, 3)) for name, n in lengths.items()}
    rows = {name: np.ones((-(-n // 4), 2)) for name, n in lengths.items()}
    chosen = with_streams(
        override(settings, f"features.dtype={dtype}"),
        write_archive(tmp_path / "fmllr.scp", fmllr),
        write_archive(tmp_path / "ivectors.scp", rows),
    )
    folder = run_stage(adapt, chosen, "adapt")
    store = FrameStore(folder / "train" / "fmllr")
    assert store.frames(0).dtype == getattr(torch, dtype)


def test_too_few_rows_stop_the_stage(settings, tmp_path):
    one = {"sw1-A_1": np.zeros((10, 3))}
    path = write_archive(tmp_path / "fmllr.scp", one)
    with pytest.raises(StageError, match=r"1 of 2 .* missing: sw1-A_2"):
        run_stage(adapt, least(with_streams(settings, path, path), 0.6), "adapt")


def test_cmvn_beside_the_frames_is_applied(settings, tmp_path, capsys):
    lengths = {n: len(ids) for part in SENTENCES.values() for n, ids in part.items()}
    frames = {name: np.full((n, 3), 5.0) for name, n in lengths.items()}
    path = write_archive(tmp_path / "feats.scp", frames)
    sums = np.array([[6, 8, 10, 2], [0, 0, 0, 0]])
    write_archive(tmp_path / "cmvn.scp", {"s": sums})
    speakers = "".join(f"{name} s\n" for name in lengths)
    (tmp_path / "utt2spk").write_text(speakers)
    kaldi = dataclasses.replace(settings.kaldi, fmllr=(path,))
    chosen = dataclasses.replace(
        settings, kaldi=kaldi, adapt=AdaptSettings(streams="fmllr")
    )
    folder = run_stage(adapt, chosen, "adapt")
    store = FrameStore(folder / "train" / "fmllr")
    assert store.frames(0)[0].tolist() == [2.0, 1.0, 0.0]
    assert "cmvn.scp beside it is applied" in capsys.readouterr().out


def test_archives_of_other_utterances_are_refused(settings, tmp_path):
    path = write_archive(tmp_path / "other.scp", {"other": np.zeros((4, 3))})
    with pytest.raises(StageError, match=r"train: kaldi\.fmllr \(.*other\.scp\)"):
        run_stage(adapt, with_streams(settings, path, path), "adapt")


def test_fmllr_of_ones_own_is_no_matter_of_a_kaldi_experiment(settings):
    with pytest.raises(ValueError, match=r"with `kaldi\.fmllr`"):
        override(settings, "adapt.streams=fmllr")


def test_settings_choose_the_stages(settings, tmp_path):
    plain = Settings(corpus=tmp_path, out=tmp_path)
    wanted = {
        stage.name: (stage.wanted(plain), stage.wanted(settings)) for stage in STAGES
    }
    assert wanted["align"] == (True, False)
    assert wanted["baseline"] == (True, False)
    assert wanted["kaldi"] == (False, True)
    assert wanted["graph"] == (True, True)
    assert wanted["export"] == (True, True)
    [exporting] = [stage for stage in STAGES if stage.name == "export"]
    assert exporting.wanted(override(plain, "adapt.streams=both"))
    taken = override(settings, "kaldi.fmllr=feats.scp")
    assert not exporting.wanted(override(taken, "adapt.streams=fmllr"))
    chosen = override(plain, "kaldi.experiment=exp/tri4_ali")
    chosen = override(chosen, "kaldi.more_alignments=a,b")
    assert chosen.kaldi.more_alignments == (Path("a"), Path("b"))
    with pytest.raises(ValueError, match=r"`least_coverage` must lie in \[0, 1\]"):
        override(chosen, "kaldi.least_coverage=1.5")
    with pytest.raises(ValueError, match=r"needs `kaldi\.experiment`"):
        override(plain, "decode.export_likelihoods=true")
    with pytest.raises(ValueError, match="Kaldi's labels"):
        override(chosen, "realign.run=first")


def test_of_i_vectors_that_are_too_few_the_last_is_repeated():
    found = kaldi_streams._Found("u", 0, 30, np.array([[1.0], [2.0]]))
    rows = kaldi_streams._fit_periods(found, 3, 1, Skipped())
    assert rows is not None
    assert rows.tolist() == [[1.0], [2.0], [2.0]]
