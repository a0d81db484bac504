"""From scores to words: the search graph, the search, and what others can use."""

from dataclasses import dataclass

from recipes.hybrid.pipeline.bounds import above_zero, at_least, within


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """The search graph.

    Attributes:
        silence_probability: probability of a silence between two words.
    """

    silence_probability: float = 0.5

    def __post_init__(self) -> None:
        above_zero(self, "silence_probability")
        within(self, 0, 0.999, "silence_probability")


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The search, and the acoustic scales of which the best on `dev` is taken.

    Attributes:
        beam: width of the search below the best path, in scaled log-likelihood.
        max_active: largest number of graph states alive after a frame.
        acoustic_scales: acoustic scales that are tried for a network.
        gmm_acoustic_scales: acoustic scales that are tried for the mixtures of the
            alignment.
        max_dev_utterances: largest number of utterances of `dev` that the scales are
            tried on.
        nbest: number of word sequences of each utterance that are rescored with the
            model of `lm.large_order`; 0 for none.
        lattice_beam: largest distance of these sequences from the best one.
        lm_weights: weights of the larger model against that of the graph, tried on
            `dev`.
        word_penalties: penalties per word, tried on `dev`.
        best_epoch: whether the network with the lowest held-out loss is decoded too, if
            it is not the last one.
        export_likelihoods: whether the test sets' log-likelihoods are also written as
            Kaldi archives; needs `kaldi.experiment`.
        export_lattices: whether the test sets' lattices are also written in Kaldi's
            form.
    """

    beam: float = 13.0
    max_active: int = 2000
    acoustic_scales: tuple[float, ...] = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
    gmm_acoustic_scales: tuple[float, ...] = (0.05, 0.07, 0.1, 0.14)
    max_dev_utterances: int = 100
    nbest: int = 0
    lattice_beam: float = 6.0
    lm_weights: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    word_penalties: tuple[float, ...] = (-1.0, -0.5, 0.0, 0.5, 1.0)
    best_epoch: bool = True
    export_likelihoods: bool = False
    export_lattices: bool = False

    def __post_init__(self) -> None:
        above_zero(self, "beam", "lattice_beam")
        above_zero(self, "acoustic_scales", "gmm_acoustic_scales")
        at_least(self, 2, "max_active")
        at_least(self, 1, "max_dev_utterances")
        at_least(self, 0, "nbest")
        if self.nbest and self.lattice_beam > self.beam:
            raise ValueError(
                f"`lattice_beam` must be at most `beam` {self.beam:g} with `nbest="
                f"{self.nbest}`, got {self.lattice_beam:g}"
            )


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Further contents of the folder for `python -m lightning_adpsgd.asr transcribe`.

    Attributes:
        onnx: whether `model.onnx` is written, which needs the package `onnx`.
    """

    onnx: bool = False
