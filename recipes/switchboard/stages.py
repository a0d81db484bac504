"""The table of stages: in which order, for what, reading which, depending on what."""

import importlib
from collections.abc import Callable
from pathlib import Path

from recipes.switchboard.pipeline import Stage
from recipes.switchboard.settings import Settings

SPOKEN = ("prepare", "lexicon")


def _from(module: str, function: str) -> Callable[[Settings, Path], None]:
    # Imported when it runs: skipping stages or printing the help needs no torch.
    def stage(settings: Settings, output: Path) -> None:
        loaded = importlib.import_module(f"recipes.switchboard.{module}")
        getattr(loaded, function)(settings, output)

    return stage


def _check(settings: Settings, output: Path) -> None:
    if settings.uses_kaldi:
        importlib.import_module("recipes.switchboard.kaldi_stages").check(settings)
    _from("check_stage", "check")(settings, output)


def _graph(settings: Settings, output: Path) -> None:
    module = "kaldi_stages" if settings.uses_kaldi else "hmm_stages"
    _from(module, "graph")(settings, output)


STAGES = (
    Stage(
        "check",
        "look at every file of the corpus before anything is computed",
        _check,
        depends=("corpus", "discs", "sources"),
    ),
    Stage(
        "prepare",
        "cut the recordings into utterances for training, development and test",
        _from("prepare_stage", "prepare"),
        inputs=("check",),
        depends=("corpus", "discs", "sources", "prepare"),
    ),
    Stage(
        "lexicon",
        "give every word its pronunciations",
        _from("data_stages", "lexicon"),
        inputs=("prepare",),
        depends=("corpus", "discs", "lexicon"),
    ),
    Stage(
        "lm",
        "count which words follow which: the n-gram language model",
        _from("data_stages", "lm"),
        inputs=SPOKEN,
        depends=("lm",),
    ),
    Stage(
        "features",
        "turn sound into normalised log-mel frames, 100 a second",
        _from("feature_stage", "features"),
        inputs=("prepare",),
        depends=("features",),
    ),
    Stage(
        "align",
        "find which HMM state each frame belongs to, from a flat start",
        _from("hmm_stages", "align"),
        inputs=(*SPOKEN, "features"),
        depends=("seed", "align"),
        wanted=lambda settings: not settings.uses_kaldi,
    ),
    Stage(
        "kaldi",
        "take the state of each frame from alignments of Kaldi",
        _from("kaldi_stages", "labels"),
        inputs=("prepare", "features"),
        depends=("kaldi",),
        wanted=lambda settings: settings.uses_kaldi,
    ),
    Stage(
        "triphone",
        "grow a decision tree: HMM states of phones in context",
        _from("triphone_stage", "triphone"),
        inputs=(*SPOKEN, "features", "align"),
        depends=("seed", "align", "triphone"),
        wanted=lambda settings: (
            settings.states == "triphone" and not settings.uses_kaldi
        ),
    ),
    Stage(
        "graph",
        "compose states, phones, words and sentences into one search graph",
        _graph,
        inputs=("lexicon", "lm", "mixtures"),
        depends=("graph",),
    ),
    Stage(
        "adapt",
        "find what tells each speaker from the others: fMLLR and i-vectors",
        _from("adapt_stage", "adapt"),
        inputs=(*SPOKEN, "features", "mixtures", "graph"),
        depends=("seed", "adapt", "kaldi"),
        wanted=lambda settings: settings.adapt.streams != "none",
    ),
    Stage(
        "realign",
        "find the state of each frame anew, by the network of another run",
        _from("realign_stage", "realign"),
        inputs=(*SPOKEN, "features", "mixtures", "streams", "aligner"),
        depends=("align", "realign"),
        wanted=lambda settings: settings.realign.run is not None,
    ),
    Stage(
        "adapted_baseline",
        "what the mixtures recognise of frames that are adapted to their speakers",
        _from("decode_stages", "adapted_baseline"),
        inputs=(*SPOKEN, "features", "states", "graph", "streams", "mixtures"),
        depends=("decode",),
        wanted=lambda settings: settings.adapt.fmllr and not settings.kaldi.fmllr,
    ),
    Stage(
        "baseline",
        "what the Gaussian mixtures recognise, for comparison",
        _from("decode_stages", "baseline"),
        inputs=(*SPOKEN, "features", "mixtures", "states", "graph"),
        depends=("decode",),
        wanted=lambda settings: not settings.uses_kaldi,
    ),
    Stage(
        "train",
        "train the acoustic model to name the state of each frame",
        _from("train_stage", "train"),
        inputs=("prepare", "features", "states", "streams", "search"),
        depends=("seed", "train"),
    ),
    Stage(
        "decode",
        "search the most likely words of every test utterance",
        _from("decode_stages", "decode"),
        inputs=(
            *SPOKEN,
            "lm",
            "features",
            "mixtures",
            "states",
            "graph",
            "streams",
            "train",
        ),
        depends=("decode",),
    ),
    Stage(
        "score",
        "compare with what was said: the word error rate",
        _from("score_stage", "score"),
        inputs=("prepare", "decode"),
    ),
    Stage(
        "export",
        "put the model and all that it needs into one folder, to transcribe with",
        _from("export_stage", "export"),
        inputs=("lexicon", "mixtures", "graph", "streams", "train", "decode"),
        depends=("adapt", "decode", "export"),
        wanted=lambda settings: settings.finds_streams_itself,
    ),
)
