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
    LEAVES_GROWN,
    NETWORK,
    OCCUPANCY,
    SEARCH,
    STATISTICS,
    Corpus,
    Cost,
)

ALIGNED = 100_000  # utterances that mixtures are trained on
LEAVES = 32_000
ARCS = 10e6  # of a graph with a pruned 4-gram: supposed
HUB5_FRAMES = 3.7 * FRAMES_PER_HOUR  # both parts of the test
DEV_FRAMES = 400 * 500  # utterances of 5 s, for the choice of scales
SCALES = 6
UBM_FRAMES = 2e6 * 12  # as many passes at full size as 6 at each doubling come to
IVECTOR_ITERATIONS = 10
FMLLR_ROUNDS = 2 + 1  # of the mixtures' training, and the maps that are kept
# One V100 trains SWB-2000 for 16 epochs in 192 hours, 64 of them in 5.2 (the papers).
V100_HOURS, V100_64_HOURS = 192.0, 5.2


def stage_minutes(
    corpus: Corpus, costs: dict[str, Cost], cores: int
) -> dict[str, float]:
    """Minutes of the stages that run on cores; some parts of them use one."""
    trained = min(1.0, ALIGNED / corpus.utterances)
    alone = {
        "prepare": [("prepare", corpus.utterances)],
        "triphone": [(LEAVES_GROWN, LEAVES)],
        "graph": [("graph", ARCS)],
    }
    shared = {
        "check": [("check", corpus.recordings)],
        "prepare": [],
        "features": [("features", corpus.frames)],
        # 14 realignments of some, then labels for all
        "align": [("align", corpus.frames * (1 + 14 * trained))],
        "triphone": [
            (STATISTICS, corpus.frames),
            (ALIGNING, corpus.frames * (1 + 8 * trained)),
        ],
        "graph": [],
        "adapt": [
            (FMLLR, corpus.frames * FMLLR_ROUNDS),
            (OCCUPANCY, corpus.frames + UBM_FRAMES),
            (IVECTORS, corpus.sides * IVECTOR_ITERATIONS),
        ],
        "decode": [
            (NETWORK, HUB5_FRAMES + DEV_FRAMES),
            (SEARCH, HUB5_FRAMES + DEV_FRAMES * SCALES),
        ],
    }

    def seconds(parts: list[tuple[str, float]]) -> float:
        return sum(number / costs[name].per_second for name, number in parts)

    return {
        stage: (seconds(parts) / cores + seconds(alone.get(stage, []))) / 60
        for stage, parts in shared.items()
    }


def training_hours(corpus: Corpus, gpus: int) -> tuple[float, float]:
    """Hours of 16 epochs on V100s: if nothing is lost, and at the papers' efficiency.

    64 of them did 37 times the work of one; what 8 lose lies between 0 and that.
    """
    one = V100_HOURS * corpus.hours / CORPORA[1].hours
    efficiency = V100_HOURS / (V100_64_HOURS * 64)
    return one / gpus, one / gpus if gpus == 1 else one / (gpus * efficiency)
