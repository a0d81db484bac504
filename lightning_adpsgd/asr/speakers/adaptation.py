"""fMLLR and i-vectors of a speaker whose words are unknown, as inputs of a network.

A speaker's sound is processed twice. In the first pass, speaker-independent mixtures
decode it, and the states of the resulting words give the fMLLR map of its frames
(`fmllr`). The positions of its frames relative to a mixture of all speech give the
i-vector (`ivectors`). In the second pass, the network gets both in addition to the
log-mel frames (`streams`).

Transcripts are never used, so the same code adapts to a test side of a corpus and to a
new call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.speakers.fmllr import (
    Estimate,
    FmllrOptions,
    estimate,
    transformed,
)
from lightning_adpsgd.asr.speakers.ivectors import Heard, IVectorExtractor
from lightning_adpsgd.asr.speakers.ubm import occupancy

MOST_FRAMES = 180_000  # half an hour of speech determines a map completely


class StateSearch(Protocol):
    """A search that returns HMM states, such as a `Decoder`."""

    def states(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> np.ndarray:
        """The states of the most likely words, [time]; -1 if nothing was found."""
        ...


def silent_states(lexicon: Lexicon, topology: Topology) -> np.ndarray:
    """Mask of the states of silence or noise, bool [states]."""
    return topology.phone_of_state < len(lexicon.silence_phones)


def spoken_states(states: np.ndarray, silent: np.ndarray) -> np.ndarray:
    """Replaces silent and unknown states by -1.

    Silence carries more information about the line than about the speaker.

    Args:
        states: [time], negative where unknown.
        silent: Mask of the states of silence or noise, bool [states].
    """
    known = states >= 0
    return np.where(known & ~silent[np.where(known, states, 0)], states, -1)


class DecodedMaps:
    """Estimates fMLLR maps from the states that decoding finds.

    Args:
        decoder: The search.
        silent: Mask of the states of silence or noise, bool [states].
        plain: Mixtures for unadapted speech.
        adapted: Mixtures for which maps are estimated, and which decode from the second
            pass on.
        options: Options of the estimate.
        decodings: Number of decoding passes over a speaker.
        acoustic_scale: Acoustic scale of these passes.
    """

    def __init__(
        self,
        decoder: StateSearch,
        silent: np.ndarray,
        plain: GaussianMixtures,
        adapted: GaussianMixtures,
        options: FmllrOptions,
        *,
        decodings: int = 2,
        acoustic_scale: float = 0.07,
    ) -> None:
        self._decoder, self._silent = decoder, silent
        self._plain, self._scorer = plain.scorer(), adapted.scorer()
        self._adapted, self._options = adapted, options
        self._decodings, self._scale = decodings, acoustic_scale

    def __call__(self, frames: Sequence[np.ndarray]) -> Estimate:
        """The map of a speaker.

        Args:
            frames: Input of the mixtures for each of its utterances, [time, dims].
        """
        found = self._heard(frames, map(self._plain, frames))
        for _ in range(self._decodings - 1):
            moved = (transformed(found.transform, own) for own in frames)
            found = self._heard(frames, map(self._scorer, moved))
        return found

    def _heard(
        self, frames: Sequence[np.ndarray], likelihoods: Iterable[np.ndarray]
    ) -> Estimate:
        states = (self._decoder.states(own, self._scale) for own in likelihoods)
        known = [spoken_states(own, self._silent) for own in states]
        return estimate(
            self._adapted, list(zip(frames, known, strict=True)), self._options
        )


@dataclass(frozen=True, kw_only=True)
class AdaptationOptions:
    """The streams that a network takes, and options of their estimates.

    Attributes:
        fmllr: Whether the model takes fMLLR.
        ivectors: Whether the model takes i-vectors.
        decodings: Number of decoding passes over a speaker, for fMLLR.
        acoustic_scale: Acoustic scale of these passes.
        estimate: Options of the map's estimate.
        ivector_period: Number of frames from one i-vector to the next, each estimated
            from earlier frames; 0: one i-vector per speaker.
    """

    fmllr: bool
    ivectors: bool
    decodings: int = 2
    acoustic_scale: float = 0.07
    estimate: FmllrOptions = field(default_factory=FmllrOptions)
    ivector_period: int = 0

    @classmethod
    def of(cls, told: dict[str, Any]) -> "AdaptationOptions":
        """The options from a dictionary that `dataclasses.asdict` made."""
        values: dict[str, Any] = {
            **told,
            "estimate": FmllrOptions(**told["estimate"]),
        }
        return cls(**values)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `Adapter.load` reads."""
        fmllr = ("gmm.npz", "mixtures.npz") if self.fmllr else ()
        ivectors = ("ubm.npz", "ivectors.npz") if self.ivectors else ()
        return ("front_end.npz", *fmllr, *ivectors)


class _IVectors(NamedTuple):
    """The models that estimate i-vectors."""

    ubm: GaussianMixtures
    extractor: IVectorExtractor
    period: int


class Voice:
    """The streams of one speaker, whose utterances must be requested in order.

    Args:
        front_end: Front end that makes the input of the mixtures.
        transform: fMLLR transform, or None.
        ivectors: Models that estimate i-vectors, or None.
        ivector: The one i-vector of the speaker, or None.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        transform: np.ndarray | None,
        ivectors: _IVectors | None,
        ivector: np.ndarray | None,
    ) -> None:
        self._front_end, self._transform = front_end, transform
        self._ivectors, self._ivector = ivectors, ivector
        self._heard: Heard | None = None

    def streams(self, log_mel: np.ndarray) -> tuple[Tensor, Tensor]:
        """fMLLR and i-vectors, each [time, dims]; zero dims if there is none.

        Args:
            log_mel: Normalised log-mel frames of the next utterance, [time, mel].
        """
        frames, none = self._front_end(log_mel), np.zeros((len(log_mel), 0))
        fmllr, ivectors = none, none
        if self._transform is not None:
            fmllr = transformed(self._transform, frames)
        if self._ivectors is not None:
            ivectors = self._ivectors_of(frames, self._ivectors)
        return torch.from_numpy(fmllr).float(), torch.from_numpy(ivectors).float()

    def _ivectors_of(self, frames: np.ndarray, found: _IVectors) -> np.ndarray:
        if self._ivector is not None:
            return np.tile(self._ivector, (len(frames), 1))
        before = self._heard or found.extractor.nothing_heard()
        rows, self._heard = found.extractor.online(
            found.ubm, frames, found.period, before
        )
        return np.repeat(rows, found.period, axis=0)[: len(frames)]


class Adapter:
    """Estimates the streams of speakers from their sound.

    Args:
        front_end: Front end that makes the input of the mixtures.
        maps: Function from frames to the fMLLR map, or None.
        ivectors: Models that estimate i-vectors, or None.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        maps: Callable[[Sequence[np.ndarray]], Estimate] | None,
        ivectors: _IVectors | None,
    ) -> None:
        self._front_end, self._maps, self._ivectors = front_end, maps, ivectors

    @classmethod
    def load(
        cls,
        folder: Path,
        options: AdaptationOptions,
        decoder: StateSearch,
        silent: np.ndarray,
    ) -> "Adapter":
        """Reads `options.files` from a folder.

        Args:
            folder: Folder that holds the files.
            options: Streams that the model takes.
            decoder: The search.
            silent: Mask of the states of silence or noise, bool [states].

        Raises:
            OSError: A file is missing.
            ValueError: A file is damaged, or `front_end.npz` is missing.
        """
        maps = ivectors = None
        if options.fmllr:
            maps = DecodedMaps(
                decoder,
                silent,
                GaussianMixtures.load(folder / "gmm.npz"),
                GaussianMixtures.load(folder / "mixtures.npz"),
                options.estimate,
                decodings=options.decodings,
                acoustic_scale=options.acoustic_scale,
            )
        if options.ivectors:
            ubm = GaussianMixtures.load(folder / "ubm.npz")
            extractor = IVectorExtractor.load(folder / "ivectors.npz")
            ivectors = _IVectors(ubm, extractor, options.ivector_period)
        return cls(FrontEnd.load(folder / "front_end.npz"), maps, ivectors)

    def adapt_to(self, utterances: Callable[[], Iterable[np.ndarray]]) -> Voice:
        """Makes the first pass over a speaker, which estimates its streams.

        Args:
            utterances: Function that iterates over the speaker's normalised log-mel
                frames, [time, mel] each; called once for each stream. A map uses the
                first half hour.
        """
        transform = ivector = None
        if self._maps is not None:
            frames = list(map(self._front_end, _first(utterances())))
            transform = self._maps(frames).transform
        if self._ivectors is not None and not self._ivectors.period:
            ivector = self._ivector(self._ivectors, utterances())
        return Voice(self._front_end, transform, self._ivectors, ivector)

    def _ivector(
        self, found: _IVectors, utterances: Iterable[np.ndarray]
    ) -> np.ndarray:
        size = found.ubm.mean.shape
        totals = np.zeros(size[0]), np.zeros(size)
        for log_mel in utterances:
            parts = occupancy(found.ubm, self._front_end(log_mel))
            totals = tuple(map(add, totals, parts))
        counts, deviations = totals
        return found.extractor.posterior(counts[None], deviations[None]).mean[0]


def _first(utterances: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The utterances that begin within the first `MOST_FRAMES`."""
    total = 0
    for own in utterances:
        if total >= MOST_FRAMES:
            return
        total += len(own)
        yield own


def stream_dims(folder: Path, options: AdaptationOptions) -> int:
    """Values that the streams add to a frame."""
    dims = 0
    if options.fmllr:
        dims += GaussianMixtures.load(folder / "mixtures.npz").mean.shape[1]
    if options.ivectors:
        dims += IVectorExtractor.load(folder / "ivectors.npz").size
    return dims
