"""How long the stages and the training of a corpus will take, as projections.

    minutes of a stage = units / (units per second of a core * cores * 60)
    hours of training = hours of one GPU / (GPUs * efficiency)

A projection supposes that cores and GPUs do not wait for disks.
"""

from recipes.hybrid.planning.costs import (
    ALIGNING,
    CORPORA,
    FMLLR,
    FRAMES_PER_HOUR,
    IVECTORS,
    LANGUAGE,
    LEAVES_GROWN,
    NETWORK,
    OCCUPANCY,
    SEARCH,
    STATISTICS,
    Corpus,
    Cost,
)
from recipes.hybrid.planning.graph_size import projected

ALIGNED = 100_000  # utterances that mixtures are trained on
LEAVES = 32_000
WORDS = 30_000  # of the lexicon
MAX_NGRAMS = 800_000  # of the search graph, as the recipes set it
MOST_GAUSSIANS = 200_000  # of the mixtures behind adaptation and baselines
FRAMES_PER_GAUSSIAN = 350
WORDS_PER_HOUR = 10_800  # 3.1 million in 286 h of Switchboard, 21 million in Fisher
HUB5_FRAMES = 3.7 * FRAMES_PER_HOUR  # both parts of the test
DEV_FRAMES = 4000 * 500  # utterances of 5 s
CHOSEN_FRAMES = 400 * 500  # of them, for the choice of scales
SCALES, GMM_SCALES = 6, 4
CONFIDENT = 3  # times the search for the best path, one with confidences takes
DECODINGS = 2  # of speakers without transcripts, for their maps
UBM_FRAMES = 2e6 * 12  # as many passes at full size as 6 at each doubling come to
IVECTOR_ITERATIONS = 10
FMLLR_ROUNDS = 2 + 1  # of the mixtures' training, and the maps that are kept
GRAPH = projected({1: WORDS, 2: MAX_NGRAMS - WORDS}, in_context=True)
# One V100 trains SWB-2000 for 16 epochs in 192 hours, 64 of them in 5.2 (the papers).
V100_HOURS, V100_64_HOURS = 192.0, 5.2


def stage_minutes(
    corpus: Corpus, costs: dict[str, Cost], cores: int
) -> dict[str, float]:
    """Minutes of the stages that run on cores; some parts of them use one."""
    trained = min(1.0, ALIGNED / corpus.utterances)
    alone = {
        "prepare": [("prepare", corpus.utterances)],
        "lm": [(LANGUAGE, corpus.hours * WORDS_PER_HOUR)],
        "triphone": [(LEAVES_GROWN, LEAVES)],
    }
    # Frames right on all of `dev`, scales and fit on a part of it, then the test.
    scored = HUB5_FRAMES + DEV_FRAMES + 2 * CHOSEN_FRAMES
    fit = CHOSEN_FRAMES * CONFIDENT
    by_mixtures = [
        _likelihoods(corpus, scored),
        (SEARCH, HUB5_FRAMES * CONFIDENT + CHOSEN_FRAMES * GMM_SCALES + fit),
    ]
    unknown = (HUB5_FRAMES + DEV_FRAMES) * DECODINGS
    shared = {
        "check": [("check", corpus.recordings)],
        "prepare": [],
        "lm": [],
        "features": [("features", corpus.frames)],
        # 14 realignments of some, then labels for all
        "align": [("align", corpus.frames * (1 + 14 * trained))],
        "triphone": [
            (STATISTICS, corpus.frames),
            (ALIGNING, corpus.frames * (1 + 8 * trained)),
        ],
        "graph": [],
        "adapted_baseline": by_mixtures,
        "baseline": by_mixtures,
        "adapt": [
            (FMLLR, corpus.frames * FMLLR_ROUNDS),
            _likelihoods(corpus, unknown),
            (SEARCH, unknown),
            (OCCUPANCY, corpus.frames + UBM_FRAMES),
            (IVECTORS, corpus.sides * IVECTOR_ITERATIONS),
        ],
        "decode": [
            (NETWORK, scored),
            (SEARCH, HUB5_FRAMES + CHOSEN_FRAMES * SCALES + fit),
        ],
    }

    def seconds(parts: list[tuple[str, float]]) -> float:
        return sum(number / costs[name].per_second for name, number in parts)

    found = {
        stage: (seconds(parts) / cores + seconds(alone.get(stage, []))) / 60
        for stage, parts in shared.items()
    }
    return found | {"graph": GRAPH.seconds / 60}


def _likelihoods(corpus: Corpus, frames: float) -> tuple[str, float]:
    """What the likelihoods of all Gaussians take, in proportion to those of 2,048."""
    return OCCUPANCY, frames * num_gaussians(corpus) / 2048


def num_gaussians(corpus: Corpus) -> float:
    """Gaussians of the triphones' mixtures: as many as asked for, or speech allows."""
    aligned = min(1.0, ALIGNED / corpus.utterances) * corpus.frames
    return min(MOST_GAUSSIANS, aligned / FRAMES_PER_GAUSSIAN)


def training_hours(corpus: Corpus, gpus: int) -> tuple[float, float]:
    """Hours of 16 epochs on V100s: if nothing is lost, and at the papers' efficiency.

    64 of them did 37 times the work of one; what 8 lose lies between 0 and that.
    """
    one = V100_HOURS * corpus.hours / CORPORA[1].hours
    efficiency = V100_HOURS / (V100_64_HOURS * 64)
    return one / gpus, one / gpus if gpus == 1 else one / (gpus * efficiency)
