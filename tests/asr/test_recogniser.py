"""An exported folder says what the parts said, and all of it is there or nothing."""

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from lightning_adpsgd.asr.__main__ import main, refused_grids
from lightning_adpsgd.asr.export import (
    Adaptation,
    KaldiStates,
    OwnStates,
    Parts,
    export,
    write_files,
    write_onnx,
)
from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.states import Topology, write_topology
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.language.lexicon import write_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.recogniser import Recogniser
from lightning_adpsgd.asr.scoring import ALL_MARKS
from lightning_adpsgd.asr.scoring.segments import parse_ctm
from lightning_adpsgd.asr.search.decoding import Decoder, SearchOptions
from lightning_adpsgd.asr.search.graph_files import write_graph
from lightning_adpsgd.asr.search.graphs import decoding_graph, symbols_of
from lightning_adpsgd.asr.sound.features import log_mel, normalise_side
from lightning_adpsgd.asr.sound.segments import find_segments
from lightning_adpsgd.asr.speakers.adaptation import AdaptationOptions
from tests import warm
from tests.asr import digits
from tests.asr.small_disk import on_a_small_disk
from tests.helpers import PATIENCE_S, without

SCALE = 0.3
SEARCH = SearchOptions(beam=20.0, max_active=500)


def acoustic_model(num_states: int, **changes) -> AcousticModel:
    torch.manual_seed(0)
    sizes = {"input_size": 120, "num_layers": 1, "hidden_size": 8, "bottleneck_size": 6}
    model = AcousticModel(num_states, **(sizes | changes))
    with torch.no_grad():
        model.output.weight.mul_(20)  # decided enough to say something
    model.set_priors(torch.arange(num_states) + 1)
    return model.eval()


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Parts:
    folder = tmp_path_factory.mktemp("parts")
    lexicon = digits.lexicon()
    topology = Topology.of(lexicon)
    write_lexicon(folder, lexicon)
    write_topology(folder / "tree.json", topology)
    arpa = digits.loop_arpa(folder / "lm.arpa", list(digits.SPELLED))
    write_graph(decoding_graph(lexicon, topology, arpa), folder / "HCLG.fst")
    spellings = symbols_of(lexicon, topology).spellings
    (folder / "words.txt").write_text("\n".join(spellings))
    return Parts(
        model=acoustic_model(topology.num_states),
        num_mels=40,
        acoustic_scale=SCALE,
        search=SEARCH,
        states=OwnStates(lexicon=folder, tree=folder / "tree.json"),
        graph=folder,
    )


@pytest.fixture(scope="module")
def exported(parts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    export(parts, folder)
    return folder


@pytest.fixture(scope="module")
def call(tmp_path_factory) -> Path:
    """Two channels; in the first somebody is loud twice, with silence between."""
    dice = np.random.default_rng(0)
    loudness = np.repeat([0.001, 0.2, 0.001, 0.2, 0.001], 8000)[:, None]
    samples = loudness * dice.standard_normal((40_000, 2)) * (1, 0.5)
    path = tmp_path_factory.mktemp("sound") / "call.wav"
    soundfile.write(str(path), samples.clip(-1, 1), 8000, subtype="FLOAT")
    return path


def by_hand(parts: Parts, call: Path, channel: int) -> list[tuple[str, float, float]]:
    samples, _ = soundfile.read(str(call), dtype="float32")
    frames = log_mel(samples[:, channel])
    segments = find_segments(frames.mean(1).numpy())
    spoken = normalise_side([frames[first:last] for first, last in segments])
    decoder = Decoder(
        decoding_graph(digits.lexicon(), _topology(), parts.graph / "lm.arpa"),
        digits.lexicon(),
        _topology(),
        SEARCH,
    )
    words = []
    for (first, _), part in zip(segments, spoken, strict=True):
        matrix = parts.model.log_likelihoods(part).numpy()
        words += [
            (timed.word, timed.start_s + first / 100, timed.duration_s)
            for timed in decoder.decode(matrix, SCALE).words
        ]
    return words


def _topology() -> Topology:
    return Topology.of(digits.lexicon())


def test_words_of_a_file_are_those_of_the_parts(parts, exported, call):
    found = list(Recogniser(exported).transcribe(call))
    for channel in range(2):
        expected = by_hand(parts, call, channel)
        here = [said[1:4] for said in found if said.channel == channel]
        assert len(expected) >= 2
        assert [word for word, *_ in here] == [word for word, *_ in expected]
        np.testing.assert_allclose([x[1:] for x in here], [x[1:] for x in expected])


def test_the_command_prints_words_with_times(exported, call, capsys):
    assert main(["transcribe", str(call), "--model", str(exported)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines} == {"call"}
    assert {line[1] for line in lines} == {"A", "B"}
    for _, _, start, duration, word, confidence in lines:
        assert 0 < float(confidence) <= 1
        assert 0 <= float(start) < float(start) + float(duration) <= 5.0
        assert word in digits.SPELLED


def test_every_word_has_a_confidence_in_json_and_a_textgrid(
    exported, call, tmp_path, capsys
):
    here = shutil.copy(call, tmp_path)
    model = ["--model", str(exported)]
    assert main(["transcribe", str(here), *model, "--format", "json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in told] == ["call A", "call B"]
    assert all(0 < word["confidence"] <= 1 for one in told for word in one["words"])
    assert main(["transcribe", str(here), *model, "--format", "textgrid"]) == 0
    text = (tmp_path / "call.TextGrid").read_text()
    assert 'name = "A"' in text
    assert "xmax = 5.000" in text
    for word in told[0]["words"]:
        assert f'text = "{word["word"]}"' in text


def test_a_textgrid_that_is_there_is_refused_before_anything_is_searched(
    exported, call, tmp_path, capsys
):
    here = shutil.copy(call, tmp_path)
    grid = tmp_path / "call.TextGrid"
    grid.write_text("an annotator's work")
    command = ["transcribe", str(here), "--format", "textgrid", "--model"]
    # No recogniser is there, which would be the first complaint.
    assert main([*command, str(tmp_path / "none")]) == 1
    found = capsys.readouterr()
    assert f"error: {grid} exists, perhaps with annotations" in found.err
    assert "`--overwrite`" in found.err
    assert (found.out, grid.read_text()) == ("", "an annotator's work")
    assert main([*command, str(exported), "--overwrite"]) == 0
    assert 'class = "IntervalTier"' in grid.read_text()


def test_all_textgrids_that_are_there_are_named(tmp_path):
    sounds = [tmp_path / f"{name}.wav" for name in "abc"]
    for sound in sounds[:2]:
        sound.with_suffix(".TextGrid").touch()
    told = refused_grids(sounds, overwrite=False)
    assert told.startswith(f"{tmp_path}/a.TextGrid, {tmp_path}/b.TextGrid exist, ")
    assert refused_grids(sounds, overwrite=True) == ""
    assert refused_grids(sounds[2:], overwrite=False) == ""


def test_a_textgrid_in_a_folder_that_is_read_only_is_refused_first(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    told = refused_grids([tmp_path / "call.wav"], overwrite=False)
    assert told.startswith(f"{tmp_path}/call.TextGrid cannot be written, because its")
    assert refused_grids([tmp_path / "gone" / "call.wav"], overwrite=False) == ""


def test_two_files_with_one_textgrid_are_refused(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    first, second = tmp_path / "call.wav", tmp_path / "other" / ".." / "call.flac"
    command = ["transcribe", str(first), str(second), "--format", "textgrid"]
    assert main([*command, "--overwrite", "--model", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"error: {first} and {second} would both be written to" in told
    elsewhere = tmp_path / "other" / "call.flac"
    assert refused_grids([first, elsewhere], overwrite=False) == ""


def test_a_call_with_a_blank_in_its_name_is_a_ctm_that_can_be_scored(
    exported, call, tmp_path, capsys
):
    sound = tmp_path / "my call.wav"
    shutil.copy(call, sound)
    assert main(["transcribe", str(sound), "--model", str(exported)]) == 0
    told = capsys.readouterr()
    lines = list(enumerate(told.out.splitlines(), 1))
    words = list(parse_ctm(lines, ALL_MARKS, "ctm"))
    assert {word.side[0] for word in words} == {"my_call"}
    assert all(len(line.split()) == 6 for _, line in lines)
    assert "WARNING" not in told.err


@pytest.mark.parametrize("style", ["ctm", "json"])
def test_files_that_cannot_be_told_apart_in_the_output_are_named(
    exported, tmp_path, capsys, style
):
    sounds = [tmp_path / "a" / "my call.wav", tmp_path / "b" / "my_call.flac"]
    for sound in sounds:
        sound.parent.mkdir()
        soundfile.write(sound, np.zeros(8000, np.float32), 8000)
    arguments = ["transcribe", *map(str, sounds), "--model", str(exported)]
    assert main([*arguments, "--format", style]) == 0
    said = f"WARNING: {sounds[0]} and {sounds[1]} are both `my_call` in the output"
    assert said in capsys.readouterr().err


def test_other_forms_do_not_look_for_textgrids(exported, call, tmp_path, capsys):
    here = shutil.copy(call, tmp_path)
    (tmp_path / "call.TextGrid").write_text("an annotator's work")
    assert main(["transcribe", str(here), "--model", str(exported)]) == 0
    assert (tmp_path / "call.TextGrid").read_text() == "an annotator's work"


def test_silence_says_nothing(exported, tmp_path, capsys):
    path = tmp_path / "silence.wav"
    soundfile.write(str(path), np.zeros(80_000), 8000)
    assert list(Recogniser(exported).transcribe(path)) == []
    assert main(["transcribe", str(path), "--model", str(exported)]) == 0
    assert capsys.readouterr().out == ""


def test_speech_between_digital_silence_has_mean_zero_and_deviation_one(
    exported, tmp_path, monkeypatch
):
    loudness = np.repeat([0, 0.2, 0, 0.2, 0], 8000)
    sound = loudness * np.random.default_rng(0).standard_normal(40_000)
    soundfile.write(str(tmp_path / "a.wav"), sound.clip(-1, 1), 8000, subtype="FLOAT")
    given, ask = [], AcousticModel.log_likelihoods

    def spied(model, frames, *streams):
        given.append(frames)
        return ask(model, frames, *streams)

    monkeypatch.setattr(AcousticModel, "log_likelihoods", spied)
    assert list(Recogniser(exported).transcribe(tmp_path / "a.wav"))
    frames = torch.cat(given).double()
    speech = frames[(frames != frames[0]).any(1)]  # the first is of the margin
    assert 200 <= len(speech) <= 208 < len(frames)
    assert speech.mean(0).numpy() == pytest.approx(np.zeros(40), abs=1e-5)
    assert speech.std(0, correction=0).numpy() == pytest.approx(np.ones(40), abs=1e-5)


def test_segments_that_fit_worse_than_on_dev_say_nothing(parts, call, tmp_path):
    everything = dataclasses.replace(parts, least_fit=-1e9)
    export(everything, tmp_path / "all")
    export(dataclasses.replace(parts, least_fit=0.0), tmp_path / "none")
    assert list(Recogniser(tmp_path / "all").transcribe(call))
    assert not list(Recogniser(tmp_path / "none").transcribe(call))
    assert list(Recogniser(tmp_path / "none", least_fit=-1e9).transcribe(call))


def test_words_of_noise_are_kept_where_that_is_asked_for(exported, call, capsys):
    command = ["transcribe", str(call), "--model", str(exported)]
    assert main([*command, "--least-fit", "0"]) == 0
    found = capsys.readouterr()
    assert found.out == ""
    assert "have no words, because they fit the model worse than 0.00" in found.err
    assert main([*command, "--least-fit", "-1000"]) == 0
    assert capsys.readouterr().out


def test_a_file_that_cannot_be_used_does_not_keep_others_back(exported, call, capsys):
    there = ["transcribe", "no.wav", str(call), "--model", str(exported)]
    assert main(there) == 1
    found = capsys.readouterr()
    assert "error: no.wav: the file does not exist" in found.err
    assert "call A" in found.out


def test_a_full_folder_of_temporary_files_is_named(
    exported, call, tmp_path, monkeypatch
):
    recogniser = Recogniser(exported)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = on_a_small_disk(tmp_path, lambda: list(recogniser.transcribe(call)), "4k")
    assert f"No space left on device: '{tmp_path}'" in found.error


def test_a_textgrid_that_cannot_be_written_does_not_keep_others_back(
    exported, call, tmp_path, capsys
):
    sounds = [str(shutil.copy(call, tmp_path / f"{name}.wav")) for name in "ab"]
    (tmp_path / "a.TextGrid").mkdir()
    command = ["transcribe", *sounds, "--model", str(exported), "--overwrite"]
    assert main([*command, "--format", "textgrid"]) == 1
    found = capsys.readouterr()
    assert "error: " in found.err
    assert "a.TextGrid" in found.err
    assert found.out.split() == [f"{tmp_path}/b.TextGrid"]


@pytest.mark.parametrize("style", ["ctm", "json", "textgrid"])
def test_a_name_that_is_no_text_is_escaped(exported, call, tmp_path, capsys, style):
    sound = tmp_path / b"caf\xe9.wav".decode(errors="surrogateescape")
    shutil.copy(call, sound)
    command = ["transcribe", str(sound), "--model", str(exported)]
    assert main([*command, "--format", style]) == 0
    assert "caf\\udce9" in capsys.readouterr().out.replace("\\\\", "\\")


def test_without_the_extra_the_command_says_which_package_is_missing(tmp_path):
    program = without("soundfile") + (
        "from lightning_adpsgd.asr.__main__ import main\n"
        "sys.exit(main(['transcribe', 'call.wav']))"
    )
    command = [warm.python(), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    expected = "error: the package soundfile is missing: pip install"
    assert (done.returncode, done.stderr[: len(expected)]) == (1, expected)


def test_a_folder_without_a_recogniser_is_named(tmp_path, capsys):
    assert main(["transcribe", "a.wav", "--model", str(tmp_path)]) == 1
    assert f"error: {tmp_path}: no recogniser" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("recogniser.json", "{", "invalid JSON"),
        ("recogniser.json", '{"format": 0}', "expected `format` 2; export again"),
        ("weights.pt", "nothing", "cannot be loaded"),
    ],
)
def test_a_broken_folder_is_named(exported, tmp_path, capsys, name, content, message):
    shutil.copytree(exported, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    assert main(["transcribe", "a.wav", "--model", str(tmp_path / "model")]) == 1
    assert f"{name}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": None}, "it lacks 'features'"),
        ({"features": [40]}, "list indices"),
        ({"model": {"num_state": 3}}, "unexpected keyword argument 'num_state'"),
        ({"search": {"bean": 1}}, "unexpected keyword argument 'bean'"),
    ],
)
def test_a_description_with_a_wrong_entry_is_named(
    exported, tmp_path, capsys, changes, message
):
    shutil.copytree(exported, tmp_path / "model")
    path = tmp_path / "model" / "recogniser.json"
    told = json.loads(path.read_text()) | changes
    told = {name: value for name, value in told.items() if value is not None}
    path.write_text(json.dumps(told))
    assert main(["transcribe", "a.wav", "--model", str(tmp_path / "model")]) == 1
    found = capsys.readouterr().err
    assert f"{tmp_path / 'model'}: cannot be used: " in found
    assert message in found


@pytest.mark.parametrize("name", ["weights.pt", "HCLG.fst", "tree.json", "lexicon.txt"])
def test_a_folder_that_lacks_a_file_names_it(exported, tmp_path, capsys, name):
    shutil.copytree(exported, tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    assert main(["transcribe", "a.wav", "--model", str(tmp_path / "model")]) == 1
    found = capsys.readouterr().err
    assert found.startswith(f"error: {tmp_path}")
    assert name in found


def test_a_folder_of_the_format_before_says_the_same(exported, call, tmp_path):
    shutil.copytree(exported, tmp_path / "model")
    path = tmp_path / "model" / "recogniser.json"
    told = json.loads(path.read_text())
    del told["adaptation"], told["graph"]
    path.write_text(json.dumps(told | {"format": 1}))
    found = list(Recogniser(tmp_path / "model").transcribe(call))
    assert found == list(Recogniser(exported).transcribe(call))


def test_the_folder_says_what_is_in_it(parts, exported):
    told = json.loads((exported / "recogniser.json").read_text())
    assert told["model"]["num_states"] == parts.model.hparams["num_states"]
    assert (told["features"]["num_mels"], told["acoustic_scale"]) == (40, SCALE)
    states = json.loads((exported / "states.json").read_text())
    assert len(states["names"]) == len(states["log_priors"])
    assert sum(np.exp(states["log_priors"])) == pytest.approx(1)
    weights = torch.load(exported / "weights.pt", weights_only=True)
    assert weights.keys() == parts.model.state_dict().keys()


def test_an_export_that_fails_leaves_nothing(parts, tmp_path):
    (tmp_path / "graph").mkdir()
    broken = Parts(**(vars(parts) | {"graph": tmp_path / "graph"}))
    with pytest.raises(FileNotFoundError):
        export(broken, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


def test_a_full_disk_is_named_when_weights_are_written(parts, tmp_path):
    states = parts.model.hparams["num_states"]
    large = dataclasses.replace(parts, model=acoustic_model(states, hidden_size=128))
    disk = tmp_path / "disk"
    error = on_a_small_disk(disk, lambda: write_files(large, disk), "512k").error
    assert f"No space left on device: '{disk / 'weights.pt'}'" in error


def test_an_export_that_was_cut_off_is_written_again(parts, tmp_path):
    FrontEnd().save(tmp_path / "front_end.npz")
    options = AdaptationOptions(fmllr=False, ivectors=False)
    adaptation = Adaptation(options=options, folders=(tmp_path,))
    (tmp_path / "model").mkdir()
    for _ in range(2):
        adapted = dataclasses.replace(parts, adaptation=adaptation)
        write_files(adapted, tmp_path / "model")
    assert (tmp_path / "model/adaptation/front_end.npz").exists()


def test_states_of_kaldi_that_were_cut_off_are_written_again(tmp_path):
    numbers, flags = np.zeros(2, np.int32), np.zeros(2, bool)
    found = Transitions(numbers, numbers, numbers, flags, flags, np.zeros(2))
    found.save(tmp_path / "transitions.npz")
    np.save(tmp_path / "pairs.npy", numbers)
    for folder in ("phones", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "phones/word_boundary.int").touch()
    states = KaldiStates(transitions=tmp_path / "transitions.npz", graph=tmp_path)
    for _ in range(2):
        assert states.write(tmp_path / "model") == ("pdf0",)


def test_others_may_read_an_export_as_they_may_read_other_folders(parts, tmp_path):
    (tmp_path / "other").mkdir()
    export(parts, tmp_path / "model")
    modes = [(tmp_path / name).stat().st_mode for name in ("other", "model")]
    assert modes[0] == modes[1]


def test_a_folder_that_is_there_is_not_overwritten(parts, exported):
    with pytest.raises(FileExistsError, match="exists; choose"):
        export(parts, exported)


def test_a_model_of_adapted_speakers_is_refused(parts, tmp_path):
    model = acoustic_model(63, input_size=260)
    with pytest.raises(ValueError, match=r"40 or 120 inputs.*0 of streams, got 260"):
        export(Parts(**(vars(parts) | {"model": model})), tmp_path / "model")


def test_without_the_package_onnx_it_is_named(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[onnx\]"):
        export(parts, tmp_path / "model", onnx=True)
    assert list(tmp_path.iterdir()) == []


def test_the_network_for_other_programs_computes_the_same(parts, tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    write_onnx(parts.model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    for shape in ((1, 21), (5, 33)):
        frames = torch.randn(*shape, 120)
        with torch.no_grad():
            expected = parts.model(frames).log_softmax(-1).numpy()
        [found] = session.run(None, {"frames": frames.numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-4)
