"""A trained model and everything needed to turn sound into words, in one folder.

    recogniser.json   sizes of the model, kind of frames, options of the search
    weights.pt        state_dict of the acoustic model
    model.onnx        the same network for other programs, if requested
    states.json       names of the HMM states and their log priors
    tree.json         states of the phones
    lexicon.txt ...   words and phones, as `lexicon.write_lexicon` writes them
    HCLG.fst          the search graph, and words.txt, the words of its labels
    adaptation/       what fMLLR and i-vectors of a speaker are found with, if it takes
                      them (`adaptation`)

With a graph of Kaldi, `pairs.npy`, `transitions.npz` and `phones/` take the place of
tree and lexicon.
"""

import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.kaldi import graph as kaldi_graph
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.language.lexicon import read_lexicon, write_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.search.decoding import (
    FRAME_SHIFT_S,
    ConfidentSearch,
    Decoder,
    SearchOptions,
    TimedWord,
    hear,
    read_graph,
)
from lightning_adpsgd.asr.sound.audio import SoundFile
from lightning_adpsgd.asr.sound.features import Normalisation
from lightning_adpsgd.asr.sound.segments import find_segments
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE
from lightning_adpsgd.asr.speakers.adaptation import (
    AdaptationOptions,
    Adapter,
    silent_states,
    stream_dims,
)
from lightning_adpsgd.files import write_json

FORMAT = 2
_READABLE = (1, 2)  # folders of format 1 know neither speakers nor Kaldi
_ADAPTATION = "adaptation"
SIZES = (
    "num_states",
    "input_size",
    "num_layers",
    "hidden_size",
    "bottleneck_size",
    "window",
    "hop",
)


Streams = Callable[[np.ndarray], Sequence[Tensor]]
"""A function from the log-mel frames of an utterance to the model's other inputs."""


class RecogniserError(ValueError):
    """A folder holds no usable recogniser; the message names its path."""


@dataclass(frozen=True, kw_only=True)
class OwnStates:
    """The states of a graph of this package.

    Attributes:
        lexicon: Folder of the lexicon.
        tree: File of the topology.
    """

    lexicon: Path
    tree: Path

    def write(self, folder: Path) -> tuple[str, ...]:
        """Copies them into a folder; returns the names of the states."""
        write_lexicon(folder, read_lexicon(self.lexicon))
        shutil.copy(self.tree, folder / "tree.json")
        return tuple(read_topology(folder / "tree.json").state_names)


@dataclass(frozen=True, kw_only=True)
class KaldiStates:
    """The pdfs of a graph of Kaldi.

    Attributes:
        transitions: File of the transitions.
        graph: Folder with `pairs.npy` and `phones`.
    """

    transitions: Path
    graph: Path

    def write(self, folder: Path) -> tuple[str, ...]:
        """Copies them into a folder; returns the names of the pdfs."""
        shutil.copy(self.transitions, folder / "transitions.npz")
        shutil.copy(self.graph / "pairs.npy", folder / "pairs.npy")
        shutil.copytree(self.graph / "phones", folder / "phones")
        num_pdfs = Transitions.load(folder / "transitions.npz").num_pdfs
        return tuple(f"pdf{pdf}" for pdf in range(num_pdfs))


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The models that estimate a speaker's streams.

    Attributes:
        options: Streams that the model takes.
        folders: Folders with `options.files`; the first that has a file counts.
    """

    options: AdaptationOptions
    folders: tuple[Path, ...]

    def write(self, folder: Path) -> int:
        """Copies the files into a folder; returns the values added to a frame."""
        folder.mkdir()
        for name in self.options.files:
            places = [place / name for place in self.folders]
            found = next((path for path in places if path.exists()), places[0])
            shutil.copy(found, folder / name)
        return stream_dims(folder, self.options)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a recogniser.

    Attributes:
        model: The acoustic model, with its priors.
        num_mels: Number of log-mel energies of a frame.
        acoustic_scale: Acoustic scale, chosen on development data.
        search: Width of the search.
        states: States that the graph reads.
        graph: Folder with `HCLG.fst` and `words.txt`.
        adaptation: Models for streams, if the model takes them; needs `OwnStates`.
        least_fit: Fit of a segment's words below which it has none, chosen on
            development data; None keeps all words.
    """

    model: AcousticModel
    num_mels: int
    acoustic_scale: float
    search: SearchOptions
    states: OwnStates | KaldiStates
    graph: Path
    adaptation: Adaptation | None = None
    least_fit: float | None = None


def export(parts: Parts, folder: Path, onnx: bool = False) -> None:
    """Writes a recogniser, whole or not at all.

    Args:
        parts: Parts of the recogniser.
        folder: Folder to write, which must not exist yet.
        onnx: Whether to write `model.onnx` as well.

    Raises:
        FileExistsError: The folder exists.
        ValueError: The inputs of the model do not match the parts.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write_files(parts, partial, onnx)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_files(parts: Parts, folder: Path, onnx: bool = False) -> None:
    """Writes the files of `export` into an existing folder, incomplete until the end.

    Raises:
        ValueError: The inputs of the model do not match the parts.
    """
    model, adaptation = parts.model, parts.adaptation
    added = 0 if adaptation is None else adaptation.write(folder / _ADAPTATION)
    _check_inputs(parts, added)
    names = parts.states.write(folder)
    for name in ("HCLG.fst", "words.txt"):
        shutil.copy(parts.graph / name, folder / name)
    priors = model.log_priors.tolist()
    write_json(folder / "states.json", {"names": names, "log_priors": priors})
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.save(weights, folder / "weights.pt")
    if onnx:
        write_onnx(model, folder / "model.onnx")
    write_json(folder / "recogniser.json", _description(parts, added))


def _check_inputs(parts: Parts, added: int) -> None:
    found, mels = parts.model.hparams["input_size"], parts.num_mels
    if found not in (mels + added, 3 * mels + added):
        raise ValueError(
            f"`model` must take {mels + added} or {3 * mels + added} inputs, {mels} or "
            f"{3 * mels} of a frame and {added} of streams, got {found}; `adaptation` "
            "says where streams come from"
        )
    if added and isinstance(parts.states, KaldiStates):
        raise ValueError(
            "`adaptation` must be None with a graph of Kaldi: Kaldi's streams of a new "
            "call cannot be found without Kaldi"
        )


def _description(parts: Parts, added: int) -> dict[str, Any]:
    width = parts.model.hparams["input_size"] - added
    adaptation = parts.adaptation
    return {
        "format": FORMAT,
        "model": {name: parts.model.hparams[name] for name in SIZES},
        "features": {
            "sample_rate": SAMPLE_RATE,
            "kind": "Kaldi's log-mel filter bank, 25 ms every 10 ms, no dither",
            "num_mels": parts.num_mels,
            "normalisation": "mean and variance of the speech of a channel",
            "differences": width == 3 * parts.num_mels,
        },
        "adaptation": None if adaptation is None else asdict(adaptation.options),
        "graph": "pdfs" if isinstance(parts.states, KaldiStates) else "states",
        "acoustic_scale": parts.acoustic_scale,
        "least_fit": parts.least_fit,
        "search": asdict(parts.search),
    }


class _Posteriors(nn.Module):
    """The network in the ONNX file: from frames to log-posteriors."""

    def __init__(self, model: AcousticModel) -> None:
        super().__init__()
        self.lstm, self.bottleneck = model.lstm, model.bottleneck
        self.output = model.output

    @override
    def forward(self, frames: Tensor) -> Tensor:
        return self.output(self.bottleneck(self.lstm(frames)[0])).log_softmax(-1)


def write_onnx(model: AcousticModel, path: Path) -> None:
    """Writes the network: `frames` [batch, time, input_size] to `log_posteriors`.

    Differences are taken before it, windows averaged and priors subtracted after it.

    Args:
        model: On the CPU.
        path: The file.

    Raises:
        ModuleNotFoundError: The package `onnx` is not installed.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ModuleNotFoundError(
            "the package onnx is not installed: pip install lightning-adpsgd[onnx]"
        )
    sizes = model.hparams
    example = torch.zeros(1, sizes["window"], sizes["input_size"])
    axes = {0: "batch", 1: "time"}
    with warnings.catch_warnings():
        # torch's newer exporter is no choice: it unrolls an LSTM over a fixed time.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Posteriors(model).eval(),
            (example,),
            str(path),
            input_names=["frames"],
            output_names=["log_posteriors"],
            dynamic_axes={"frames": axes, "log_posteriors": axes},
            dynamo=False,
        )


class SaidWord(NamedTuple):
    """A word, the channel in which it was said (from 0), and when, in seconds.

    `confidence` is its posterior, in [0, 1].
    """

    channel: int
    word: str
    start_s: float
    duration_s: float
    confidence: float

    @property
    def timed(self) -> TimedWord:
        """The word without its channel."""
        return TimedWord(*self[1:])


class Recogniser:
    """Turns sound files into words with times.

    Args:
        folder: Folder that `export` has written.
        least_fit: Fit below which a segment has no words; None takes that of the
            folder, negative infinity keeps all words.

    Raises:
        RecogniserError: A file is missing, broken, or of another format.
    """

    def __init__(self, folder: Path, *, least_fit: float | None = None) -> None:
        self._least_fit = least_fit
        if not (folder / "recogniser.json").is_file():
            raise RecogniserError(
                f"{folder}: no recogniser: recogniser.json is missing; export a "
                "trained model"
            )
        try:
            self._open(folder)
        except RecogniserError:
            raise
        except (OSError, ValueError) as error:
            raise RecogniserError(f"{folder}: cannot be used: {error}") from error

    def _open(self, folder: Path) -> None:
        told = _read_description(folder / "recogniser.json")
        self._num_mels: int = told["features"]["num_mels"]
        self._acoustic_scale: float = told["acoustic_scale"]
        self._model = _read_model(told["model"], folder / "weights.pt")
        search = SearchOptions(**told["search"])
        self._adapter: Adapter | None = None
        if told.get("graph") == "pdfs":
            decoder: Decoder | KaldiDecoder = _read_kaldi(folder, search)
        else:
            decoder = _read_decoder(folder, search)
            self._adapter = _read_adapter(folder, told.get("adaptation"), decoder)
        chosen = (self._least_fit, told.get("least_fit"), float("-inf"))
        least_fit = next(float(fit) for fit in chosen if fit is not None)
        self._search = ConfidentSearch(decoder, least_fit)

    @property
    def least_fit(self) -> float:
        """Fit of a stretch of sound below which it has no words."""
        return self._search.least_fit

    @property
    def num_poor(self) -> int:
        """How many stretches of sound have lost their words so, in all files so far."""
        return self._search.num_poor

    def transcribe(self, path: Path) -> Iterator[SaidWord]:
        """The words of a sound file, channel by channel, as they are found.

        Args:
            path: Sound file of 8 kHz or more.

        Raises:
            AudioError: The file cannot be used.
        """
        sound = SoundFile(path)
        for channel in range(sound.num_channels):
            for timed in self._words(sound, channel):
                yield SaidWord(channel, *timed)

    def _words(self, sound: SoundFile, channel: int) -> Iterator[TimedWord]:
        with tempfile.TemporaryFile() as file:
            # On disk: the frames of a day are 1.4 GB.
            for block in sound.log_mel(channel, self._num_mels):
                block.astype(np.float32).tofile(file)
            frames = np.memmap(file, np.float32, "r+").reshape(-1, self._num_mels)
            segments = find_segments(_level(frames))
            if not segments:
                return
            raw = [torch.from_numpy(frames[first:last]) for first, last in segments]
            normalisation = Normalisation.of(raw)

            def parts() -> Iterator[np.ndarray]:
                return (normalisation.apply(part).numpy() for part in raw)

            streams = self._streams(parts)
            for (first, _), part in zip(segments, parts(), strict=True):
                yield from self._segment(part, first, streams(part))

    def _streams(self, parts: Callable[[], Iterator[np.ndarray]]) -> Streams:
        """A first pass over a channel, which finds the streams of its parts."""
        if self._adapter is None:
            return lambda part: ()
        return self._adapter.hear(parts).streams

    def _segment(
        self, frames: np.ndarray, first: int, streams: Sequence[Tensor]
    ) -> Iterator[TimedWord]:
        inputs = torch.from_numpy(frames)
        matrix = self._model.log_likelihoods(inputs, *streams).numpy()
        [hypothesis] = hear(matrix, self._search, [self._acoustic_scale])
        for timed in hypothesis.words:
            start = timed.start_s + first * FRAME_SHIFT_S
            yield timed._replace(start_s=start)


def _read_kaldi(folder: Path, search: SearchOptions) -> KaldiDecoder:
    return KaldiDecoder(
        kaldi_graph.load(folder),
        Transitions.load(folder / "transitions.npz"),
        read_words(folder / "words.txt"),
        read_boundaries(folder / "phones"),
        search,
    )


def _read_decoder(folder: Path, search: SearchOptions) -> Decoder:
    graph = read_graph(folder / "HCLG.fst")
    topology = read_topology(folder / "tree.json")
    return Decoder(graph, read_lexicon(folder), topology, search)


def _read_adapter(
    folder: Path, told: dict[str, Any] | None, decoder: Decoder
) -> Adapter | None:
    if told is None:
        return None
    options = AdaptationOptions.of(told)
    topology = read_topology(folder / "tree.json")
    silent = silent_states(read_lexicon(folder), topology)
    return Adapter.load(folder / _ADAPTATION, options, decoder, silent)


def _read_description(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecogniserError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(told, dict) or told.get("format") not in _READABLE:
        raise RecogniserError(f"{path}: expected `format` {FORMAT}; export again")
    return told


def _read_model(sizes: dict[str, Any], path: Path) -> AcousticModel:
    model = AcousticModel(**sizes)
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch has a different one for each way to be broken
        raise RecogniserError(f"{path}: cannot be loaded: {error}") from error
    return model.eval()


def _level(frames: np.ndarray) -> np.ndarray:
    pieces = range(0, len(frames), 100_000)
    return np.concatenate([frames[i : i + 100_000].mean(axis=1) for i in pieces])
