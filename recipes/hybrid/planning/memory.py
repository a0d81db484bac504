"""How much disk and memory a corpus will need, as projections."""

from recipes.hybrid.planning.costs import Corpus
from recipes.hybrid.planning.hours import GRAPH, WORDS_PER_HOUR

NUM_PARAMETERS = 43_154_944
_MEL_BYTES = 40 * 2
_FMLLR_BYTES = 40 * 2
_LABEL_BYTES = 4
_UTTERANCE_BYTES = 1330  # growth of a process that read 100,000 of Fisher's shape
# Peak of a process that made and pruned 4-grams of 3.0 million words; larger texts
# repeat themselves more, so that this is too much rather than too little.
_WORD_BYTES = 700


def disk_gb(corpus: Corpus) -> dict[str, float]:
    """Gigabytes that stages leave, and that the discs hold as mu-law."""
    return {
        "discs, not compressed": corpus.disc_hours * 3600 * 8000 * 2 / 1e9,
        "features, float16": corpus.frames * _MEL_BYTES / 1e9,
        "fMLLR, float16": corpus.frames * _FMLLR_BYTES / 1e9,
        "labels": corpus.frames * _LABEL_BYTES / 1e9,
        "weights in a checkpoint": NUM_PARAMETERS * 4 / 1e9,
    }


def memory_gb(corpus: Corpus) -> dict[str, float]:
    """Gigabytes of memory, of which frames are mapped and need not be in it."""
    return {
        "graph: composing": GRAPH.bytes / 1e9,
        "lm: 4-grams before pruning": corpus.hours * WORDS_PER_HOUR * _WORD_BYTES / 1e9,
        "prepare: utterances": corpus.utterances * _UTTERANCE_BYTES / 1e9,
        "training, each GPU: weights, gradients, gossip": NUM_PARAMETERS * 4 * 4 / 1e9,
    }
