"""Writes a trained model and everything needed to turn sound into words into a folder.

    recogniser.json   sizes of the model, kind of frames, options of the search
    weights.pt        state_dict of the acoustic model
    model.onnx        the same network for other programs, if requested
    states.json       names of the HMM states and their log priors
    tree.json         states of the phones
    lexicon.txt ...   words and phones, as `lexicon.write_lexicon` writes them
    HCLG.fst          the search graph, and words.txt, the words of its labels
    adaptation/       models for a speaker's fMLLR and i-vectors, if the network takes
                      them (`adaptation`)

With a Kaldi graph, `pairs.npy`, `transitions.npz` and `phones/` replace tree and
lexicon. `recogniser.Recogniser` reads such a folder.
"""

import importlib.util
import io
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.language.lexicon import read_lexicon, write_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.search.decoding import SearchOptions
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE
from lightning_adpsgd.asr.speakers.adaptation import AdaptationOptions, stream_dims
from lightning_adpsgd.files import bytes_written_whole, write_json

FORMAT = 2
ADAPTATION = "adaptation"
SIZES = (
    "num_states",
    "input_size",
    "num_layers",
    "hidden_size",
    "bottleneck_size",
    "window",
    "hop",
)


@dataclass(frozen=True, kw_only=True)
class OwnStates:
    """The HMM states of one of this package's graphs.

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
    """The pdfs of a Kaldi graph.

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
        shutil.copytree(self.graph / "phones", folder / "phones", dirs_exist_ok=True)
        num_pdfs = Transitions.load(folder / "transitions.npz").num_pdfs
        return tuple(f"pdf{pdf}" for pdf in range(num_pdfs))


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The models that estimate a speaker's streams.

    Attributes:
        options: Streams that the model takes.
        folders: Folders with `options.files`; each file is taken from the first folder
            that has it.
    """

    options: AdaptationOptions
    folders: tuple[Path, ...]

    def write(self, folder: Path) -> int:
        """Copies the files into a folder; returns the values added to a frame."""
        folder.mkdir(exist_ok=True)
        for name in self.options.files:
            places = [place / name for place in self.folders]
            found = next((path for path in places if path.exists()), places[0])
            shutil.copy(found, folder / name)
        return stream_dims(folder, self.options)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a recogniser.

    Attributes:
        model: Acoustic model, with its priors.
        num_mels: Number of log-mel energies of a frame.
        acoustic_scale: Acoustic scale, chosen on development data.
        search: Width of the search.
        states: States that the graph reads.
        graph: Folder with `HCLG.fst` and `words.txt`.
        adaptation: Models for streams, if the model takes them; needs `OwnStates`.
        least_fit: Fit below which a segment's words are dropped, chosen on development
            data; None keeps all words.
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
        ModuleNotFoundError: `onnx` is set and the package is not installed.
        ValueError: The inputs of the model do not match the parts.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another folder")
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        write_files(parts, partial, onnx)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_files(parts: Parts, folder: Path, onnx: bool = False) -> None:
    """Writes the files of `export` into an existing folder, incomplete until the end.

    Files that an interrupted call has left there are replaced.

    Raises:
        ModuleNotFoundError: `onnx` is set and the package is not installed.
        ValueError: The inputs of the model do not match the parts.
    """
    model, adaptation = parts.model, parts.adaptation
    added = 0 if adaptation is None else adaptation.write(folder / ADAPTATION)
    _check_inputs(parts, added)
    names = parts.states.write(folder)
    for name in ("HCLG.fst", "words.txt"):
        shutil.copy(parts.graph / name, folder / name)
    priors = model.log_priors.tolist()
    write_json(folder / "states.json", {"names": names, "log_priors": priors})
    _save_weights(model, folder / "weights.pt")
    if onnx:
        write_onnx(model, folder / "model.onnx")
    write_json(folder / "recogniser.json", _description(parts, added))


def _save_weights(model: AcousticModel, path: Path) -> None:
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    # By way of memory: into a file, torch tells of a full disk by positions alone.
    content = io.BytesIO()
    torch.save(weights, content)
    with bytes_written_whole(path) as file:
        file.write(content.getbuffer())


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
            "`adaptation` must be None with a graph of Kaldi, got "
            f"{type(parts.adaptation).__name__}: the streams of a new call cannot be "
            "computed without Kaldi; export a model of frames alone"
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

    Differences must be taken before it; windows are averaged and priors subtracted
    after it.

    Args:
        model: Model on the CPU.
        path: File to write.

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
        # torch's newer exporter cannot be used: it unrolls an LSTM over a fixed time.
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
