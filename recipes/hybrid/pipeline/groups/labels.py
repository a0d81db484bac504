"""The HMM states: which there are, and how each frame gets its own."""

from dataclasses import dataclass
from pathlib import Path

from recipes.hybrid.pipeline.bounds import above_zero, at_least, within

NUM_CEPSTRA = 13
"""Cepstra of a frame, which mixtures are trained on."""


@dataclass(frozen=True, kw_only=True)
class AlignSettings:
    """The flat start: monophone Gaussian mixtures by Viterbi training.

    Attributes:
        num_iterations: number of realignments after the equal alignment.
        num_gaussians: number of Gaussians of all HMM states together.
        acoustic_scale: factor on log-likelihoods against pronunciation costs.
        beam: width of the search, in scaled log-likelihood.
        retry_beam: width that is tried when nothing survives `beam`.
        max_training_utterances: largest number of utterances, evenly taken, that the
            mixtures are trained on. Labels are made for all.
        silence_probability: probability of a silence between two words.
    """

    num_iterations: int = 14
    num_gaussians: int = 1000
    acoustic_scale: float = 0.1
    beam: float = 8.0
    retry_beam: float = 40.0
    max_training_utterances: int = 6000
    silence_probability: float = 0.5

    def __post_init__(self) -> None:
        at_least(self, 1, "num_iterations", "num_gaussians", "max_training_utterances")
        above_zero(self, "acoustic_scale", "beam", "retry_beam", "silence_probability")
        within(self, 0, 0.999, "silence_probability")
        if self.beam > self.retry_beam:
            raise ValueError(
                f"`beam` must be at most `retry_beam` {self.retry_beam:g}, got "
                f"{self.beam:g}"
            )


@dataclass(frozen=True, kw_only=True)
class TriphoneSettings:
    """Phones in context: the decision tree and the mixtures of its leaves.

    The search and its bounds are those of `AlignSettings`. The papers have 32,000
    leaves for 2,000 hours.

    Attributes:
        start: folder of the labels that the first tree is grown on, which a stage has
            left for the same frames (`exp/realign/NAME` of another experiment); none:
            those of the monophones.
        keep_labels: whether these labels, in the numbering of the tree, are those that
            the network learns; otherwise the mixtures of its leaves find them again.
        rounds: number of times that the tree is grown, from the second time on the
            labels of the time before.
        num_leaves: largest number of leaves of the tree.
        min_frames: fewest frames of a leaf.
        min_gain: least log-likelihood that a split gains.
        tie: whether leaves that sound alike share a state in the end.
        num_iterations: number of realignments after the labels of the monophones.
        num_gaussians: largest number of Gaussians of all states together.
        frames_per_gaussian: fewest training frames per Gaussian; with less speech
            there are fewer Gaussians.
        lda: whether tree and mixtures see, in place of cepstra with slopes, the
            directions that tell the monophones' states apart.
        lda_reach: number of frames on each side that these directions are taken from.
        lda_dimension: number of these directions.
        mllt: whether their axes are turned so that diagonal covariances fit best.
    """

    start: Path | None = None
    keep_labels: bool = False
    rounds: int = 1
    num_leaves: int = 2000
    min_frames: float = 1000.0
    min_gain: float = 0.0
    tie: bool = True
    num_iterations: int = 8
    num_gaussians: int = 4000
    frames_per_gaussian: float = 350.0
    lda: bool = True
    lda_reach: int = 4
    lda_dimension: int = 40
    mllt: bool = True

    def __post_init__(self) -> None:
        at_least(self, 1, "rounds", "num_leaves", "num_gaussians", "lda_dimension")
        if self.keep_labels and self.rounds > 1:
            raise ValueError(
                f"`rounds` must be 1 with `keep_labels`, got {self.rounds}: a tree "
                "grown again on the same labels is the same"
            )
        at_least(self, 1, "num_iterations")
        at_least(self, 0, "min_gain", "lda_reach")
        above_zero(self, "min_frames", "frames_per_gaussian")
        spliced = (2 * self.lda_reach + 1) * NUM_CEPSTRA
        if self.lda and self.lda_dimension > spliced:
            raise ValueError(
                f"`lda_dimension` must be at most {spliced}, {NUM_CEPSTRA} cepstra of "
                f"{2 * self.lda_reach + 1} frames (`lda_reach`), got "
                f"{self.lda_dimension}"
            )


@dataclass(frozen=True, kw_only=True)
class RealignSettings:
    """Labels by adapted mixtures, or by a network, in place of the mixtures.

    Attributes:
        adapted: whether the mixtures behind fMLLR (`adapt.streams`) make the labels.
        run: name of the finished training run whose network makes the labels, other
            than the run that learns from them; none: no such labels are made.
        acoustic_scale: factor on its log-likelihoods against pronunciation costs.
    """

    adapted: bool = False
    run: str | None = None
    acoustic_scale: float = 0.1

    def __post_init__(self) -> None:
        above_zero(self, "acoustic_scale")
        if self.adapted and self.run is not None:
            raise ValueError(
                f"`adapted` must be false with `run={self.run}`: labels are made by "
                "the adapted mixtures or by that network"
            )


@dataclass(frozen=True, kw_only=True)
class KaldiSettings:
    """A Kaldi experiment whose alignments and graph take the place of our own.

    Attributes:
        experiment: folder with `final.mdl` and `ali.*.gz` (`exp/tri4_ali_nodup`);
            none: the recipe makes its own alignments and graph.
        more_alignments: further folders with `ali.*.gz` by the same model, for
            instance of the held-out utterances; comma-separated.
        graph: folder with `HCLG.fst`, `words.txt` and `phones`; none: the only one in
            `experiment`.
        arpa: ARPA file, unpacked, that `HCLG.fst` was made from. `decode.nbest` weighs
            its model against a larger one.
        fmllr: tables or archives of fMLLR frames of all splits, comma-separated, that
            `adapt.streams=fmllr` (or both) takes in place of its own.
        ivectors: tables or archives of i-vectors in the same way, either one row per
            utterance or online i-vectors.
        ivector_period: number of frames between online i-vectors (Kaldi's default is
            10); 0: one per utterance.
        data: data directories whose `segments` has the times of utterances with other
            names than Kaldi's recipes give, comma-separated.
        least_coverage: least share of a split's utterances, in [0, 1], that must have
            labels, fMLLR or i-vectors.
    """

    experiment: Path | None = None
    more_alignments: tuple[Path, ...] = ()
    graph: Path | None = None
    arpa: Path | None = None
    fmllr: tuple[str, ...] = ()
    ivectors: tuple[str, ...] = ()
    ivector_period: int = 10
    data: tuple[Path, ...] = ()
    least_coverage: float = 0.95

    def __post_init__(self) -> None:
        at_least(self, 0, "ivector_period")
        if not 0 <= self.least_coverage <= 1:
            raise ValueError(
                f"`least_coverage` must lie in [0, 1], got {self.least_coverage}"
            )

    @property
    def folder(self) -> Path:
        """The folder `experiment`.

        Raises:
            ValueError: `experiment` is none.
        """
        if self.experiment is None:
            raise ValueError("`kaldi.experiment` must name a folder, got none")
        return self.experiment
