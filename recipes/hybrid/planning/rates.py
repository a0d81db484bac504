"""The speed of one core at work that depends on models, measured on a finished run.

It uses the run's own features, mixtures and graph, with models as large as the papers'
where size decides the cost: 2,048 Gaussians and 100 dimensions behind i-vectors, and
the network of 43 million parameters. Seconds are processor time of one thread.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm import gmm
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.search.alignment import align, mixture_scorer
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from lightning_adpsgd.asr.speakers.fmllr import estimate, transformed
from lightning_adpsgd.asr.speakers.ivectors import train_extractor
from lightning_adpsgd.asr.speakers.ubm import occupancy
from recipes.hybrid.adaptation.fmllr import fmllr_options
from recipes.hybrid.data.labels import alignment_options, training_utterances
from recipes.hybrid.data.speakers import Speaker, Speakers
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.planning.costs import (
    ALIGNING,
    FMLLR,
    IVECTORS,
    NETWORK,
    OCCUPANCY,
    SEARCH,
    Cost,
)
from recipes.hybrid.recognition.decoder import make_decoder

GAUSSIANS, IVECTOR, STATES, INPUTS = 2048, 100, 32_000, 260
_UTTERANCES, _SIDES, _NETWORK_FRAMES, _SEARCHED = 150, 3, 300, 12


def rates(settings: Settings) -> Iterator[tuple[str, Cost]]:
    """Name and rate, one after the other.

    Args:
        settings: settings of a run whose stage `adapt` is finished.
    """
    torch.set_num_threads(1)
    labels = settings.directory("mixtures") / "train" / "labels.npy"
    speakers = Speakers.of(settings, "train", labels)
    yield ALIGNING, _aligning(settings)
    yield FMLLR, _fmllr(settings, speakers)
    yield OCCUPANCY, _occupancy(speakers)
    yield IVECTORS, _ivectors()
    yield NETWORK, _network()
    yield SEARCH, _search(settings)


def _aligning(settings: Settings) -> Cost:
    """One pass of realignment in context."""
    folder = settings.directory("mixtures")
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = read_topology(folder / "tree.json")
    graphs = TrainingGraphs(lexicon, topology, settings.align.silence_probability)
    scorer = mixture_scorer(
        GaussianMixtures.load(folder / "gmm.npz"),
        FrontEnd.load(folder / "front_end.npz"),
    )
    options = alignment_options(settings, num_processes=1)
    spoken = training_utterances(settings, lexicon)[:_UTTERANCES]
    begin = time.process_time()
    list(align(spoken, graphs, scorer, options))
    return _rate("frames", sum(len(one.log_mel) for one in spoken), begin)


def _fmllr(settings: Settings, speakers: Speakers) -> Cost:
    """A map for each side, and the sums of its adapted frames."""
    mixtures = GaussianMixtures.load(settings.directory("streams") / "mixtures.npz")
    options, count = fmllr_options(settings), 0
    begin = time.process_time()
    for side in speakers.sides[:_SIDES]:
        frames, states = _spoken(speakers, side)
        found = estimate(mixtures, [(frames, states)], options)
        gmm.accumulate(mixtures, transformed(found.transform, frames), states)
        count += len(frames)
    return _rate("frames", count, begin)


def _spoken(speakers: Speakers, side: Speaker) -> tuple[np.ndarray, np.ndarray]:
    positions: Sequence[int] = side.positions
    frames = np.concatenate([speakers.frames(position) for position in positions])
    labels = [speakers.store.labels(position).numpy() for position in positions]
    return frames, np.concatenate(labels)


def _occupancy(speakers: Speakers) -> Cost:
    frames, _ = _spoken(speakers, speakers.sides[0])
    dice = np.random.default_rng(0)
    means = dice.standard_normal((GAUSSIANS, frames.shape[1]))
    ubm = GaussianMixtures(
        np.zeros(GAUSSIANS, np.int64),
        np.full(GAUSSIANS, 1 / GAUSSIANS),
        means,
        np.ones_like(means),
        np.ones(frames.shape[1]),
    )
    begin = time.process_time()
    occupancy(ubm, frames)
    return _rate("frames", len(frames), begin)


def _ivectors() -> Cost:
    sides, dice = 64, np.random.default_rng(0)
    counts = dice.random((sides, GAUSSIANS))
    deviations = dice.standard_normal((sides, GAUSSIANS, 40))
    steps = train_extractor(counts, deviations, IVECTOR, num_iterations=1)
    begin = time.process_time()
    list(steps)
    return _rate("sides", sides, begin)


def _network() -> Cost:
    model = AcousticModel(STATES, input_size=INPUTS).eval()
    inputs = [torch.randn(_NETWORK_FRAMES, dims) for dims in (40, 40, IVECTOR)]
    begin = time.process_time()
    model.log_likelihoods(*inputs)
    return _rate("frames", _NETWORK_FRAMES, begin)


def _search(settings: Settings) -> Cost:
    """Search by the mixtures for unknown speakers: harder than by a network."""
    folder = settings.directory("mixtures")
    scorer = GaussianMixtures.load(folder / "gmm.npz").scorer()
    speakers = Speakers.of(settings, "dev", None)
    decoder, positions = make_decoder(settings), range(len(speakers.store))
    spoken = [scorer(speakers.frames(p)) for p in islice(positions, _SEARCHED)]
    begin = time.process_time()
    for matrix in spoken:
        decoder.decode(matrix, settings.adapt.acoustic_scale)
    return _rate("frames", sum(map(len, spoken)), begin)


def _rate(unit: str, count: int, begin: float) -> Cost:
    return Cost(unit, count / (time.process_time() - begin))
