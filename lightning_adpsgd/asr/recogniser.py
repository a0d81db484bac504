"""Turns sound files into words, with a recogniser that `export` has written."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_adpsgd.asr.export import ADAPTATION, FORMAT
from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.kaldi import graph as kaldi_graph
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.search.decoding import (
    ConfidentSearch,
    Decoder,
    SearchOptions,
    decode_at_scales,
)
from lightning_adpsgd.asr.search.graph_files import read_graph
from lightning_adpsgd.asr.search.words import FRAME_SHIFT_S, TimedWord
from lightning_adpsgd.asr.sound.audio import SoundFile
from lightning_adpsgd.asr.sound.features import Normalisation
from lightning_adpsgd.asr.sound.segments import find_segments
from lightning_adpsgd.asr.speakers.adaptation import (
    AdaptationOptions,
    Adapter,
    silent_states,
)

_READABLE = (1, FORMAT)  # folders of format 1 know neither speakers nor Kaldi

Streams = Callable[[np.ndarray], Sequence[Tensor]]
"""A function from the log-mel frames of an utterance to the model's other inputs."""


class RecogniserError(ValueError):
    """A folder has no usable recogniser; the message names its path."""


class SaidWord(NamedTuple):
    """A recognised word with its channel (from 0) and its times in seconds.

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
        folder: Folder written by `export`.
        least_fit: Threshold of the fit: words of a segment with a poorer fit are
            dropped. None: the threshold in the folder, or none if it has none. Negative
            infinity keeps all words.

    Raises:
        RecogniserError: A file is missing, damaged, or of an unsupported format.
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
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise RecogniserError(f"{folder}: cannot be used: {problem}") from error

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
        """The fit below which a segment has no words."""
        return self._search.least_fit

    @property
    def num_poor(self) -> int:
        """The number of segments whose words were dropped for a poor fit so far."""
        return self._search.num_poor

    def transcribe(self, path: Path) -> Iterator[SaidWord]:
        """Yields the words of a sound file as they are found, channel by channel.

        Words of segments that match the model poorly are dropped: those with a mean
        log-likelihood below `least_fit`, from the argument or the exported folder.

        Args:
            path: Sound file of 8 kHz or more.

        Raises:
            AudioError: The file cannot be used.
            OSError: The folder of temporary files has no room for its frames.
        """
        sound = SoundFile(path)
        for channel in range(sound.num_channels):
            for timed in self._words(sound, channel):
                yield SaidWord(channel, *timed)

    def _words(self, sound: SoundFile, channel: int) -> Iterator[TimedWord]:
        with tempfile.TemporaryFile(buffering=0) as file:
            # On disk, because the frames of a day are 1.4 GB.
            for block in sound.log_mel(channel, self._num_mels):
                _append(file, block)
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
        """Makes a first pass over a channel, to find the streams of its segments."""
        if self._adapter is None:
            return lambda part: ()
        return self._adapter.adapt_to(parts).streams

    def _segment(
        self, frames: np.ndarray, first: int, streams: Sequence[Tensor]
    ) -> Iterator[TimedWord]:
        inputs = torch.from_numpy(frames)
        matrix = self._model.log_likelihoods(inputs, *streams).numpy()
        [hypothesis] = decode_at_scales(matrix, self._search, [self._acoustic_scale])
        for timed in hypothesis.words:
            start = timed.start_s + first * FRAME_SHIFT_S
            yield timed._replace(start_s=start)


def _append(file: FileIO, frames: np.ndarray) -> None:
    """Writes frames to the end of a temporary file.

    Raises:
        OSError: There is no room for them; it names the folder.
    """
    rest = memoryview(frames.astype(np.float32).tobytes())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        error.filename = tempfile.gettempdir()
        raise


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
    return Adapter.load(folder / ADAPTATION, options, decoder, silent)


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
    except Exception as error:  # torch raises a different one for each kind of damage
        raise RecogniserError(f"{path}: cannot be loaded: {error}") from error
    return model.eval()


def _level(frames: np.ndarray) -> np.ndarray:
    pieces = range(0, len(frames), 100_000)
    return np.concatenate([frames[i : i + 100_000].mean(axis=1) for i in pieces])
