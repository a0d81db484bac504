"""The papers' acoustic model, schedule and algorithms, as settings of the stages.

The model has six bidirectional LSTM layers of 512 cells a direction, a bottleneck of
256, and reads chunks of 21 frames. Plain SGD trains it for 16 epochs. The rate rises
for 10 epochs in proportion to the batch, 0.1 at 256, and then falls by sqrt(1/2) an
epoch. The states are 32,000, of phones in context. The 260 inputs are 120 of log-mel
with differences, 40 of fMLLR and 100 of an i-vector. Runs differ in the algorithm
alone, except `single`, the papers' baseline: one learner, batch 256.
"""

from typing import NamedTuple

from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings

GLOBAL_BATCH = 8192
SINGLE = "single"

MODEL = (
    "train.num_layers=6",
    "train.hidden_size=512",
    "train.bottleneck_size=256",
    "train.chunk=21",
    "train.dropout=0",
    "train.max_warp=0",
)
SCHEDULE = (
    "train.epochs=16",
    "train.base_rate=0.1",
    "train.base_batch=256",
    "train.warmup_epochs=10",
    f"train.decay={0.5**0.5}",
    "train.momentum=0",
)
DATA = (
    "prepare.dev_utterances=4000",
    "prepare.max_repeats=300",
    "prepare.extend_s=0.1",
    "lexicon.repair=true",
)
STATES = (
    "states=triphone",
    "triphone.num_leaves=32000",
    "triphone.num_gaussians=200000",
    "align.max_training_utterances=100000",
)
STREAMS = (
    "adapt.streams=both",
    "adapt.num_gaussians=2048",
    "adapt.max_frames=2000000",
)
DECODING = (
    "lm.order=4",
    "lm.max_ngrams=800000",
    "lm.large_order=4",
    "decode.nbest=100",
    "decode.max_active=7000",
    "decode.max_dev_utterances=400",
)


class Algorithm(NamedTuple):
    """The block of settings in which one run differs from another.

    Attributes:
        strategy: "ddp", or a name that `lightning_adpsgd` registers.
        meaning: one line for the screen.
    """

    strategy: str
    meaning: str


RUNS = {
    "ddp": Algorithm("ddp", "allreduce of gradients at every step (SSGD)"),
    "sdpsgd": Algorithm("sdpsgd", "averages on a ring, all wait (SD-PSGD)"),
    "adpsgd": Algorithm("adpsgd", "averages on a ring in the background (AD-PSGD)"),
    "adpsgd_random": Algorithm("adpsgd_random", "the same on random rings"),
    "d1psgd": Algorithm("d1psgd", "all average behind the next gradient (D1)"),
    "hadpsgd": Algorithm("hadpsgd", "groups that allreduce gossip (H-ADPSGD)"),
    SINGLE: Algorithm("ddp", "one learner, batch 256: the papers' baseline"),
}


def with_papers(
    settings: Settings, num_learners: int, super_learners: int, num_nodes: int = 1
) -> Settings:
    """The settings with the papers' model, schedule and data.

    Args:
        settings: folders, sources and the name of the run, one of `RUNS`.
        num_learners: number of GPUs on each machine. All of them share the global
            batch of 8,192.
        super_learners: number of groups that `hadpsgd` makes of all.
        num_nodes: number of machines.

    Raises:
        ValueError: There is no such run, or a number does not divide.
    """
    if settings.run not in RUNS:
        raise ValueError(
            f"`run` must be one of {', '.join(RUNS)}, got {settings.run!r}"
        )
    batch = 256 if settings.run == SINGLE else GLOBAL_BATCH
    if settings.run == SINGLE:
        num_learners = super_learners = num_nodes = 1
    learners, groups = num_learners * num_nodes, super_learners
    if learners < 1 or batch % learners:
        raise ValueError(f"`learners` must divide the batch {batch}, got {learners}")
    if groups < 1 or learners % groups:
        raise ValueError(f"`super_learners` must divide {learners}, got {groups}")
    sizes = (
        f"train.strategy={RUNS[settings.run].strategy}",
        "train.accelerator=gpu",
        f"train.num_learners={num_learners}",
        f"train.num_nodes={num_nodes}",
        f"train.super_learner_size={learners // groups}",
        f"train.batch_size={batch // learners}",
        "train.num_workers=2",
        "train.checkpoint_minutes=30",
    )
    return override(
        settings, *MODEL, *SCHEDULE, *DATA, *STATES, *STREAMS, *DECODING, *sizes
    )
