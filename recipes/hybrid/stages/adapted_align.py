"""Stage `adapted_align`: labels from mixtures and frames adapted to the speakers.

The states and their graph stay. The mixtures that stage `adapt` has trained behind
fMLLR find the state of each frame again, in the frames that it has mapped.
"""

from collections.abc import Iterator
from pathlib import Path

from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from recipes.hybrid.data.labels import Stored, alignment_options, label_splits
from recipes.hybrid.data.splits import with_copies
from recipes.hybrid.pipeline.settings import Settings


def adapted_align(settings: Settings, output: Path) -> None:
    """Labels every frame by the adapted mixtures.

    Raises:
        StageError: No utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = read_topology(settings.directory("mixtures") / "tree.json")
    mixtures = GaussianMixtures.load(settings.directory("streams") / "mixtures.npz")
    graphs = TrainingGraphs(lexicon, topology, settings.align.silence_probability)
    options = alignment_options(settings)
    scorer = mixtures.scorer().of
    label_splits(settings, output, lexicon, graphs, scorer, options, _adapted)


def _adapted(settings: Settings, split: str) -> Iterator[Stored]:
    """The utterances of a split that have frames, each with those behind fMLLR."""
    store = FrameStore(settings.directory("streams") / split / "fmllr")
    for utterance in with_copies(settings, split):
        if utterance.id in store:
            yield utterance, store.frames(store.position(utterance.id)).numpy()
