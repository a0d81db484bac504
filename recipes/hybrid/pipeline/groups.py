"""The settings of each stage: one small group per stage, by the name of the stage.

A stage's fingerprint holds its own group (`runner.py`). A changed value therefore makes
that stage, and those that read its output, out of date. A stage without a group has
nothing to choose.
"""

from dataclasses import dataclass
from pathlib import Path

from lightning_adpsgd.registration import NAMES
from recipes.hybrid.pipeline.bounds import above_zero, at_least, one_of, within

ADAPTED_BY = ("none", "fmllr", "ivectors", "both")
SPEEDS = (0.5, 2.0)
STRATEGIES = ("ddp", *NAMES)
ORDERS = (None, "step_then_average", "average_then_step")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Which utterances are used, and for what.

    Attributes:
        dev_utterances: number of utterances, the first by id, that are held out as
            `dev`, as in Kaldi's recipe. Their speakers may be in `train` as well. With
            0, whole speakers are held out instead, and none of them is in `train`.
        dev_fraction: share of the training speakers held out as `dev`, the last ones
            by name. Only used if `dev_utterances` is 0.
        min_dev_sides: fewest conversation sides in `dev`; only used with
            `dev_fraction`.
        max_repeats: number of utterances kept in `train`, approximately, of a text
            that is heard more often. Without it "uh-huh" takes over. 0 keeps all.
        extend_s: seconds by which test segments begin earlier and end later, unless
            they would reach into another segment; 0.1 in Kaldi's recipe.
        clip_s: seconds by which a transcript may end after its audio. It is clipped;
            beyond that the utterance is skipped and counted.
        min_utterance_s: seconds below which an utterance is skipped and counted.
    """

    dev_utterances: int = 0
    dev_fraction: float = 0.08
    min_dev_sides: int = 2
    max_repeats: int = 300
    extend_s: float = 0.0
    clip_s: float = 0.1
    min_utterance_s: float = 0.1

    def __post_init__(self) -> None:
        at_least(self, 0, "dev_utterances", "min_dev_sides", "max_repeats")
        at_least(self, 0, "extend_s", "clip_s", "min_utterance_s")
        within(self, 0, 1, "dev_fraction")


@dataclass(frozen=True, kw_only=True)
class LexiconSettings:
    """Where pronunciations come from.

    Attributes:
        repair: whether the patches of Kaldi's recipe are applied to the MS-State
            dictionary.
        cmudict: dictionary in CMUdict's form, for training words that the MS-State
            dictionary lacks; none by default.
        synthesise: whether eSpeak pronounces words that no dictionary has.
        min_count: occurrences in training below which eSpeak is not asked for a word.
    """

    repair: bool = False
    cmudict: Path | None = None
    synthesise: bool = False
    min_count: int = 2


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """The n-gram language models of the training transcripts.

    Attributes:
        order: number of words in the longest n-grams of the search graph.
        prune: relative growth of the model's perplexity below which an n-gram is left
            out; 0 keeps all n-grams. A word sequence that occurs once in n words costs
            some 1 / n or more.
        max_ngrams: largest number of n-grams of the search graph; more are pruned away
            as `prune` does. 0 is no bound.
        large_order: order of a second model, which is not pruned, for `decode.nbest`;
            0 for none.
        text: file of further sentences, one a line, whose audio need not be there.
        arpa: ARPA file of a model from elsewhere, unpacked.
        weights: weights of the transcripts' model, that of `text` and that of `arpa`,
            of those that there are; none: those with which `dev` is likeliest.
    """

    order: int = 3
    prune: float = 0.0
    max_ngrams: int = 0
    large_order: int = 0
    text: Path | None = None
    arpa: Path | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "order")
        at_least(self, 0, "prune", "large_order", "max_ngrams")
        number = 1 + (self.text is not None) + (self.arpa is not None)
        if self.weights is not None:
            above_zero(self, "weights")
            if len(self.weights) != number or abs(sum(self.weights) - 1) > 1e-6:
                raise ValueError(
                    f"`weights` must be {number} numbers that sum to 1, got "
                    f"{','.join(map(str, self.weights))}"
                )


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What is stored for each 10 ms frame.

    Attributes:
        num_mels: number of log-mel coefficients per frame.
        dtype: type on disk, "float16" or "float32".
        noise_share: share of the training sides to which noise is added.
        noise_decibels: lowest and highest signal-to-noise ratio that is drawn.
        noise_files: folder of recorded noise; white noise if none.
        noise_seed: seed of everything drawn for the noise.
        speeds: speeds of further copies of every training utterance, for instance 0.9
            and 1.1. Each copy has a speaker of its own.
    """

    num_mels: int = 40
    dtype: str = "float16"
    noise_share: float = 0.0
    noise_decibels: tuple[float, float] = (10.0, 25.0)
    noise_files: Path | None = None
    noise_seed: int = 0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 1, "num_mels")
        one_of(self, "dtype", ("float16", "float32"))
        _check_speeds(self.speeds)
        if not 0 <= self.noise_share <= 1:
            raise ValueError(
                f"`noise_share` must lie in [0, 1], got {self.noise_share}"
            )
        if len(self.noise_decibels) != 2:
            raise ValueError(
                f"`noise_decibels` must be two numbers, got {self.noise_decibels}"
            )


def _check_speeds(speeds: tuple[float, ...]) -> None:
    slowest, fastest = SPEEDS
    for speed in speeds:
        # NaN is refused here too.
        if not slowest <= speed <= fastest or speed != round(speed, 2):
            raise ValueError(
                f"`speeds` must be from {slowest} to {fastest} in steps of 0.01, got "
                f"{speed}; 0.9,1.1 is usual"
            )
    if 1 in speeds or len(set(speeds)) < len(speeds):
        raise ValueError(
            "`speeds` names each copy's speed once, without the recorded speed 1, got "
            f"{','.join(map(str, speeds))}"
        )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The acoustic model and how it is trained.

    The defaults suit an hour of speech and a machine without a GPU. The papers' model
    has 6 layers of 512 and a bottleneck of 256, trained with `epochs=16`,
    `warmup_epochs=10`, `base_rate=0.1`, `base_batch=256`, `momentum=0`.

    Attributes:
        strategy: "ddp" or a name of `lightning_adpsgd` ("hadpsgd", "adpsgd", ...).
        num_learners: number of learners on each machine: processes, or GPUs.
        num_nodes: number of machines; `--nodes` sets it.
        super_learner_size: number of learners per super-learner of "hadpsgd".
        order: "step_then_average" or "average_then_step"; none: the strategy's own.
        mixing_gain: share of each average that is taken, in (0, 1].
        cpu_share: share of the training's time that exchanges may take, in (0, 1]. The
            default is larger than the strategy's own, because recipes compare what is
            learnt and not the speed.
        accelerator: "cpu" or "gpu".
        batch_size: number of chunks per learner and step.
        chunk: number of frames per chunk.
        num_workers: number of processes per learner that load batches ahead. With 0
            the training process loads them itself, and a GPU waits for it.
        epochs: number of passes over the training data.
        validate_every: number of epochs between validations, each with a checkpoint.
        base_rate: learning rate at the start.
        base_batch: global batch for which `base_rate` would be kept. The peak rate is
            larger by (all_learners * batch_size) / base_batch.
        warmup_epochs: number of epochs in which the rate grows to its peak.
        decay: factor on the rate per epoch afterwards.
        momentum: momentum of SGD.
        num_layers: number of bidirectional LSTM layers.
        hidden_size: number of LSTM cells per direction.
        bottleneck_size: size of the linear layer before the softmax.
        dropout: dropout rate between LSTM layers.
        max_warp: largest part by which training stretches the frequency axis.
        max_stretch: largest part by which training stretches time, to mimic other
            speeds.
        mask_bands: widest stretch of bands that training masks in a chunk
            (SpecAugment); 0 masks none.
        mask_frames: longest stretch of frames that it masks.
        clip: largest norm of the gradient of a step; 0 does not clip.
        precision: precision in Lightning's words: "32-true", "bf16-mixed", ...; none:
            "bf16-mixed" on GPUs and "32-true" on the CPU. GPUs before Ampere, such as
            V100, compute bfloat16 slowly: set "16-mixed" or "32-true" there.
        checkpoint_minutes: minutes between checkpoints within an epoch; with 0 there
            are those after validations alone. With them a SIGTERM saves and ends the
            training, and the same command goes on where it was.
        wer_utterances: largest number of utterances of `dev` that are recognised after
            every validation, beside the training, two minutes of speech at most; 0 for
            none.
        wer_scale: acoustic scale of that recognition.
    """

    strategy: str = "hadpsgd"
    num_learners: int = 4
    num_nodes: int = 1
    super_learner_size: int = 2
    order: str | None = None
    mixing_gain: float = 1.0
    cpu_share: float = 0.5
    accelerator: str = "cpu"
    batch_size: int = 16
    chunk: int = 21
    num_workers: int = 0
    epochs: int = 16
    validate_every: int = 1
    base_rate: float = 0.2
    base_batch: int = 16
    warmup_epochs: float = 2.0
    decay: float = 0.8
    momentum: float = 0.9
    num_layers: int = 2
    hidden_size: int = 128
    bottleneck_size: int = 64
    dropout: float = 0.0
    max_warp: float = 0.15
    max_stretch: float = 0.0
    mask_bands: int = 0
    mask_frames: int = 0
    clip: float = 0.0
    precision: str | None = None
    checkpoint_minutes: float = 0.0
    wer_utterances: int = 20
    wer_scale: float = 0.1

    def __post_init__(self) -> None:
        one_of(self, "strategy", STRATEGIES)
        one_of(self, "order", ORDERS)
        one_of(self, "accelerator", ("cpu", "gpu"))
        one_of(self, "precision", (None, *PRECISIONS))
        at_least(self, 1, "num_learners", "super_learner_size", "batch_size", "chunk")
        at_least(self, 1, "num_nodes")
        at_least(self, 1, "epochs", "validate_every", "base_batch")
        at_least(self, 1, "num_layers", "hidden_size", "bottleneck_size")
        at_least(self, 0, "num_workers", "wer_utterances", "warmup_epochs", "clip")
        at_least(self, 0, "checkpoint_minutes", "mask_bands", "mask_frames")
        above_zero(self, "base_rate", "decay", "cpu_share", "mixing_gain", "wer_scale")
        within(self, 0, 1, "cpu_share", "mixing_gain", "momentum", "dropout")
        within(self, 0, 0.9, "max_warp", "max_stretch")
        if self.strategy == "hadpsgd" and self.all_learners % self.super_learner_size:
            raise ValueError(
                f"`super_learner_size` must divide the {self.all_learners} learners, "
                f"got {self.super_learner_size}"
            )

    @property
    def all_learners(self) -> int:
        """The number of learners on all machines."""
        return self.num_learners * self.num_nodes

    @property
    def chosen_precision(self) -> str:
        """The precision that `precision` asks for, or that suits the accelerator."""
        suits = "bf16-mixed" if self.accelerator == "gpu" else "32-true"
        return self.precision or suits


@dataclass(frozen=True, kw_only=True)
class RaceSettings:
    """Training for a time instead of a number of epochs, with a slow learner or none.

    Attributes:
        seconds: wall-clock seconds of training; 0 trains `train.epochs` epochs. The
            schedule of the learning rate is fitted to the time: after half of it, the
            rate is that of half of the epochs.
        step_s: seconds that every step lasts at least. Learners that share the cores of
            one machine are then as fast as if each had its own.
        pause_s: seconds that each step of the last learner lasts longer. It emulates a
            slower machine.
    """

    seconds: float = 0.0
    step_s: float = 0.0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, 0, "seconds", "step_s", "pause_s")
        for name in ("step_s", "pause_s"):
            if getattr(self, name) and not self.seconds:
                raise ValueError(
                    f"`{name}` must be 0 where `seconds` is 0, got "
                    f"{getattr(self, name)}: only a training for a time has a pace"
                )


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


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """What the network is told of the speaker, per conversation side.

    The papers' 260 inputs are 120 of log-mel with differences, 40 of fMLLR (the
    dimensions of the mixtures) and 100 of an i-vector.

    Attributes:
        streams: "none", "fmllr", "ivectors" or "both".
        rounds: number of times that the mixtures are trained on the adapted training
            speech; 0 adapts to the mixtures of the alignment.
        passes: number of times that a side's frames are shared among the Gaussians.
        min_frames: fewest frames, without silence, for a full map of a side.
        min_offset_frames: fewest frames for an offset. Below that fMLLR changes
            nothing.
        decodings: number of times that sides without transcripts are decoded: first
            with the mixtures of the alignment, then with adapted ones.
        acoustic_scale: acoustic scale of these decodings.
        num_gaussians: number of Gaussians in the mixture of all speech behind
            i-vectors.
        max_frames: largest number of frames that this mixture is trained on.
        ivector_dims: number of dimensions of an i-vector.
        ivector_iterations: number of training iterations of the i-vector extractor.
        ivector_period: number of frames between i-vectors, each from what was heard
            before; 0: one i-vector for all of a side.
        frame_weight: weight of a frame against the average speaker. It is below 1
            because neighbouring frames say much the same.
    """

    streams: str = "none"
    rounds: int = 2
    passes: int = 3
    min_frames: int = 500
    min_offset_frames: int = 100
    decodings: int = 2
    acoustic_scale: float = 0.07
    num_gaussians: int = 64
    max_frames: int = 200_000
    ivector_dims: int = 100
    ivector_iterations: int = 10
    ivector_period: int = 0
    frame_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.streams not in ADAPTED_BY:
            raise ValueError(
                f"`streams` must be one of {', '.join(ADAPTED_BY)}, got "
                f"{self.streams!r}"
            )
        if self.decodings < 1:
            raise ValueError(f"`decodings` must be at least 1, got {self.decodings}")

    @property
    def fmllr(self) -> bool:
        """Whether there is fMLLR."""
        return self.streams in ("fmllr", "both")

    @property
    def ivectors(self) -> bool:
        """Whether there are i-vectors."""
        return self.streams in ("ivectors", "both")


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
        at_least(self, 0, "num_iterations", "min_gain", "lda_reach")
        above_zero(self, "min_frames", "frames_per_gaussian")


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


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """The search graph.

    Attributes:
        silence_probability: probability of a silence between two words.
    """

    silence_probability: float = 0.5


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
        at_least(self, 1, "max_active", "max_dev_utterances")
        at_least(self, 0, "nbest")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Further contents of the folder for `python -m lightning_adpsgd.asr transcribe`.

    Attributes:
        onnx: whether `model.onnx` is written, which needs the package `onnx`.
    """

    onnx: bool = False
