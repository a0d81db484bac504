"""Stages `align` and `graph`: what stands between frames and words.

`align` leaves the monophones' mixtures `gmm.npz`, what they see of the frames
(`front_end.npz`), the states and labels (see `labels`), and `log.json`. `graph` leaves
`HCLG.fst` and `words.txt`.
"""

from pathlib import Path

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import Topology, read_topology
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.search.alignment import mixture_scorer, train_mixtures
from lightning_adpsgd.asr.search.decoding import write_graph
from lightning_adpsgd.asr.search.graphs import (
    TrainingGraphs,
    decoding_graph,
    symbols_of,
)
from recipes.switchboard.labels import (
    alignment_options,
    label_splits,
    log_training,
    training_utterances,
)
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings


def align(settings: Settings, output: Path) -> None:
    """Trains monophone Gaussian mixtures from a flat start and labels every frame.

    Interrupted after the training, it goes on with the labels.

    Raises:
        StageError: No utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    chosen = settings.align
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon), chosen.silence_probability)
    options = alignment_options(
        settings,
        num_iterations=chosen.num_iterations,
        num_gaussians=chosen.num_gaussians,
    )
    if not (output / "gmm.npz").exists():
        steps = train_mixtures(training_utterances(settings, lexicon), graphs, options)
        FrontEnd().save(output / "front_end.npz")
        log_training(output, steps, options.num_iterations + 1)
    scorer = mixture_scorer(
        GaussianMixtures.load(output / "gmm.npz"),
        FrontEnd.load(output / "front_end.npz"),
    )
    label_splits(settings, output, lexicon, graphs, scorer, options)


def graph(settings: Settings, output: Path) -> None:
    """Composes HMM states, pronunciations and n-grams into one search graph.

    Raises:
        StageError: The language model or the lexicon cannot be used.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    try:
        topology = read_topology(settings.directory("mixtures") / "tree.json")
        hclg = decoding_graph(
            lexicon,
            topology,
            settings.directory("lm") / "lm.arpa",
            silence_probability=settings.graph.silence_probability,
        )
    except (ValueError, OSError) as error:
        raise StageError(str(error)) from error
    words = symbols_of(lexicon, topology).words
    table = "".join(f"{word} {label}\n" for word, label in words.items())
    (output / "words.txt").write_text(table, encoding="utf-8")
    write_graph(hclg, output / "HCLG.fst")
    print(f"  {hclg.num_states} states", flush=True)
