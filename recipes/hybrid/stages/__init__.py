"""The table of stages: their order, purposes, inputs and dependencies.

Each stage is the function `<name>` in the module `<name>`, except where another layout
replaces it (`_with_layout`). The module is imported when the stage runs: skipping
stages or printing the help needs no torch.

An element of `inputs` is a stage, or one of the names "mixtures", "states", "streams",
"aligner" and "search". Each of these is the output of one of several stages, which the
settings choose (`Settings.stage_of`).
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from lightning_adpsgd.asr.kaldi.lexicon import SILENCES, find_lexicon
from lightning_adpsgd.asr.kaldi.tables import recordings_of
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, Together

SPOKEN = ("prepare", "lexicon")
_OF_KALDIS_SEARCH = ("kaldi.arpa", "kaldi.graph")
"""Settings that affect only Kaldi's search, so labels and streams stay valid."""
_OF_THE_NETWORKS_SEARCH = (
    *("decode.acoustic_scales", "decode.best_epoch", "decode.nbest"),
    *("decode.lattice_beam", "decode.lm_weights", "decode.word_penalties"),
)
"""Settings that affect only the search with a network, so the mixtures' stays valid."""


def _function(module: str, name: str) -> Callable[[Settings, Path], None]:
    def run(settings: Settings, output: Path) -> None:
        loaded = importlib.import_module(f"{__name__}.{module}")
        getattr(loaded, name)(settings, output)

    return run


def _stage(
    name: str,
    purpose: str,
    *,
    inputs: tuple[str, ...] = (),
    depends: tuple[str, ...] = (),
    wanted: Callable[[Settings], bool] = lambda _: True,
    together: Together = "leader",
    is_last: bool = False,
    apart: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    work: str = "",
) -> Stage:
    return Stage(
        name,
        purpose,
        _function(name, name),
        inputs,
        depends,
        wanted,
        together,
        is_last=is_last,
        apart=apart,
        needs=needs,
        work=work,
    )


STAGES = (
    _stage(
        "check",
        "look at every file of the corpus before anything is computed",
        depends=("corpus", "discs", "sources"),
    ),
    _stage(
        "prepare",
        "cut the recordings into utterances for training, development and test",
        inputs=("check",),
        depends=("corpus", "discs", "sources", "prepare"),
    ),
    _stage(
        "lexicon",
        "give every word its pronunciations",
        inputs=("prepare",),
        depends=("corpus", "discs", "lexicon", "wider"),
    ),
    _stage(
        "lm",
        "count which words follow which: the n-gram language model",
        inputs=SPOKEN,
        depends=("lm",),
    ),
    _stage(
        "features",
        "turn sound into normalised log-mel frames, 100 a second",
        inputs=("prepare",),
        depends=("features",),
        together="machines",
        work="*/.sides.done*",
    ),
    _stage(
        "align",
        "find the HMM state of each frame, from a flat start",
        inputs=(*SPOKEN, "features"),
        depends=("seed", "align"),
        together="machines",
        work="gmm.npz",
        wanted=lambda settings: not settings.uses_kaldi,
    ),
    _stage(
        "kaldi",
        "take the state of each frame from Kaldi's alignments",
        inputs=("prepare", "features"),
        depends=("kaldi",),
        apart=_OF_KALDIS_SEARCH,
        wanted=lambda settings: settings.uses_kaldi,
    ),
    _stage(
        "triphone",
        "grow a decision tree: HMM states of phones in context",
        inputs=(*SPOKEN, "features", "align"),
        depends=("seed", "align", "triphone"),
        together="machines",
        work="**/gmm.npz",
        wanted=lambda settings: (
            settings.states == "triphone" and not settings.uses_kaldi
        ),
    ),
    _stage(
        "graph",
        "compose states, phones, words and sentences into one search graph",
        inputs=("lexicon", "lm/lm.arpa", "mixtures"),
        depends=("graph", "kaldi.graph"),
    ),
    _stage(
        "adapt",
        "find what tells each speaker from the others: fMLLR and i-vectors",
        inputs=(*SPOKEN, "features", "mixtures", "graph"),
        depends=("seed", "adapt", "kaldi"),
        apart=_OF_KALDIS_SEARCH,
        together="machines",
        work="*.npz",
        wanted=lambda settings: settings.adapt.streams != "none",
    ),
    _stage(
        "adapted_align",
        "find the state of each frame again, by the adapted mixtures",
        inputs=(*SPOKEN, "features", "mixtures", "streams"),
        depends=("align",),
        together="machines",
        wanted=lambda settings: settings.realign.adapted,
    ),
    _stage(
        "realign",
        "find the state of each frame again, by the network of another run",
        inputs=(*SPOKEN, "features", "mixtures", "streams", "aligner"),
        depends=("align", "realign"),
        together="machines",
        wanted=lambda settings: settings.realign.run is not None,
    ),
    _stage(
        "adapted_baseline",
        "recognise frames that are adapted to their speakers, by the mixtures",
        inputs=(*SPOKEN, "features", "graph", "streams", "mixtures"),
        depends=("decode", "compared"),
        apart=_OF_THE_NETWORKS_SEARCH,
        together="machines",
        is_last=True,
        wanted=lambda settings: settings.adapt.fmllr and not settings.kaldi.fmllr,
    ),
    _stage(
        "baseline",
        "recognise by the Gaussian mixtures, for comparison",
        inputs=(*SPOKEN, "features", "mixtures", "graph"),
        depends=("decode", "compared"),
        apart=_OF_THE_NETWORKS_SEARCH,
        together="machines",
        is_last=True,
        wanted=lambda settings: not settings.uses_kaldi,
    ),
    _stage(
        "train",
        "train the acoustic model to name the state of each frame",
        inputs=("prepare", "features", "states", "streams"),
        needs=("search",),
        depends=("seed", "train", "timed"),
        together="all",
        work="**/*.ckpt",
    ),
    _stage(
        "decode",
        "search the most likely words of every test utterance",
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
        depends=("decode", "compared", "kaldi.arpa"),
        together="machines",
    ),
    _stage(
        "score",
        "compare with the reference: the word error rate",
        inputs=("prepare", "decode"),
    ),
    _stage(
        "export",
        "put the model and all that it needs to transcribe into one folder",
        inputs=(
            *SPOKEN,
            "mixtures",
            "graph",
            "streams",
            "train",
            "decode",
            "score",
        ),
        depends=("adapt", "decode", "export"),
        wanted=lambda settings: settings.finds_streams_itself,
    ),
)

_OF_A_LAYOUT = ("check", "prepare", "lexicon")


def _with_layout(
    module: str,
    of_corpus: Mapping[str, Callable[[Path], Iterable[Path]]] = MappingProxyType({}),
    of_sound: Callable[[Path], Iterable[Path]] | None = None,
    **editions: str,
) -> tuple[Stage, ...]:
    """The stages, with those that a module has for another layout replaced.

    Args:
        module: name of the module.
        of_corpus: what they read of the corpus, as `Stage` has it, by name.
        of_sound: the sound that all but `lexicon` read, as `Stage` has it.
        editions: editions of its stages, by name.
    """
    return tuple(
        stage._replace(
            run=_function(module, stage.name),
            edition=editions.get(stage.name, ""),
            of_corpus=of_corpus.get(stage.name),
            of_sound=None if stage.name == "lexicon" else of_sound,
        )
        if stage.name in _OF_A_LAYOUT
        else stage
        for stage in STAGES
    )


LIBRISPEECH = _with_layout("librispeech")
"""The stages for a corpus in LibriSpeech's layout."""

_TABLES = ("wav.scp", "text", "utt2spk", "segments", "reco2file_and_channel")


_SPLITS = ("train", "dev", "test")


def _tables(corpus: Path) -> list[Path]:
    return [corpus / split / name for split in _SPLITS for name in _TABLES]


def _recordings(corpus: Path) -> list[Path]:
    return sorted({one for split in _SPLITS for one in recordings_of(corpus / split)})


def _dictionary(corpus: Path) -> list[Path]:
    found = find_lexicon(corpus)
    return [] if found is None else [found, found.with_name(SILENCES)]


KALDI_DATA = _with_layout(
    "kaldi_data",
    # `check` looks at the dictionary, too, but nobody reads what it has found there.
    {"check": _tables, "prepare": _tables, "lexicon": _dictionary},
    _recordings,
    lexicon="phones as they are written",
)
"""The stages for Kaldi data directories."""
