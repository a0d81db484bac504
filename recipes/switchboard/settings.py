"""The settings of one Switchboard experiment, one small group per stage.

A group carries the name of its stage: a stage's fingerprint holds its own group
(`pipeline.py`), so a changed value makes that stage, and those that read its output,
out of date. Where a group is missing the stage has nothing to choose.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_STAGES = ("train", "decode", "score", "export")
TRAINING_SPLITS = ("train", "dev")
TEST_SPLITS = (
    *("swb", "ch"),
    *("dev-clean", "dev-clean-2", "test-clean", "dev-other", "test-other"),
)
STATES = ("monophone", "triphone")
ADAPTED_BY = ("none", "fmllr", "ivectors", "both")
SPEEDS = (0.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Which utterances are used, and for what.

    Attributes:
        dev_utterances: So many utterances, the first by id, are held out as `dev`, as
            Kaldi's recipe does; their speakers may be in `train` as well. 0 holds
            speakers out instead, of whom nobody is in `train`.
        dev_fraction: Share of the training speakers held out as `dev`, the last ones
            by name; at least `min_dev_sides` sides. Only if `dev_utterances` is 0.
        min_dev_sides: Fewest conversation sides in `dev`.
        max_repeats: Of an utterance text heard more often than this about so many are
            kept in `train` ("uh-huh" would otherwise take over); 0 keeps all.
        extend_s: Test segments begin and end this much earlier and later, in seconds,
            where they do not come into another one; 0.1 in Kaldi's recipe.
        clip_s: A transcript may end this much after its audio and is clipped; beyond
            that the utterance is skipped and counted. In seconds.
        min_utterance_s: Shorter utterances are skipped and counted, in seconds.
    """

    dev_utterances: int = 0
    dev_fraction: float = 0.08
    min_dev_sides: int = 2
    max_repeats: int = 300
    extend_s: float = 0.0
    clip_s: float = 0.1
    min_utterance_s: float = 0.1


@dataclass(frozen=True, kw_only=True)
class LexiconSettings:
    """Where pronunciations come from.

    Attributes:
        repair: Apply the patches of Kaldi's recipe to the MS-State dictionary.
        cmudict: A dictionary in the form of CMUdict, for training words that the
            MS-State dictionary lacks; none by default.
        synthesise: Let eSpeak pronounce words that no dictionary has.
        min_count: Words heard less often in training are not given to eSpeak.
    """

    repair: bool = False
    cmudict: Path | None = None
    synthesise: bool = False
    min_count: int = 2


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """The n-gram language models of the training transcripts.

    Attributes:
        order: Words of the longest n-grams of the search graph.
        prune: N-grams whose loss makes the perplexity of that model grow by less than
            this part are left out of it; 0 keeps all, 1e-8 is usual with order 4.
        large_order: The same words without pruning, for `decode.nbest`; 0 for none.
    """

    order: int = 3
    prune: float = 0.0
    large_order: int = 0


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What is stored for each 10 ms frame.

    Attributes:
        num_mels: Log-mel coefficients per frame.
        dtype: Type on disk, "float16" or "float32".
        noise_share: Part of the training sides to which noise is added.
        noise_decibels: The signal-to-noise ratio is drawn between these two.
        noise_files: Folder of recorded noise; none for white noise.
        noise_seed: Of all that is drawn.
        speeds: At each of them, 0.9 and 1.1 for instance, there is a copy of every
            training utterance beside it, by a speaker of its own.
    """

    num_mels: int = 40
    dtype: str = "float16"
    noise_share: float = 0.0
    noise_decibels: tuple[float, float] = (10.0, 25.0)
    noise_files: Path | None = None
    noise_seed: int = 0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
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
        # What is no number is not in the range either.
        if not slowest <= speed <= fastest or speed != round(speed, 2):
            raise ValueError(
                f"`speeds` must be from {slowest} to {fastest} in steps of 0.01, got "
                f"{speed}; 0.9,1.1 is usual"
            )
    if 1 in speeds or len(set(speeds)) < len(speeds):
        raise ValueError(
            "`speeds` are those of the copies, each once; 1 is always there without "
            f"being named; got {','.join(map(str, speeds))}"
        )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The acoustic model and how it is trained.

    The defaults suit an hour of speech and a machine without a GPU. The papers' model
    has 6 layers of 512 and a bottleneck of 256, trained with `epochs=16`,
    `warmup_epochs=10`, `base_rate=0.1`, `base_batch=256`, `momentum=0`.

    Attributes:
        strategy: "ddp" or a name of `lightning_adpsgd` ("hadpsgd", "adpsgd", ...).
        num_learners: Learners of this machine: processes, or GPUs.
        super_learner_size: Learners per super-learner of "hadpsgd".
        order: "step_then_average" or "average_then_step"; none: the strategy's own.
        mixing_gain: How much of each average is taken, in (0, 1].
        cpu_share: The share of the training's time that exchanges may take, in (0, 1].
            More than the strategy's own default, because here
            it is what is learnt that is compared, and not the speed.
        accelerator: "cpu" or "gpu".
        batch_size: Chunks per learner and step.
        chunk: Frames per chunk.
        num_workers: Processes that load batches ahead, for each learner; 0 loads them
            in the training itself, which a GPU waits for.
        epochs: Passes over the training data.
        validate_every: Epochs from one validation and checkpoint to the next.
        base_rate: Learning rate at the start.
        base_batch: Global batch for which `base_rate` would be kept; the peak rate is
            larger by (num_learners * batch_size) / base_batch.
        warmup_epochs: Epochs in which the rate grows to its peak.
        decay: Factor of the rate per epoch afterwards.
        momentum: Of SGD.
        num_layers: Bidirectional LSTM layers.
        hidden_size: Their cells per direction.
        bottleneck_size: Of the linear layer before the softmax.
        dropout: Between LSTM layers.
        max_warp: In training, the frequency axis is stretched by at most this part.
        max_stretch: In training, time is stretched by at most this part: other speeds.
        clip: Largest norm of the gradient of a step; 0 leaves it as it is.
        precision: As Lightning calls it: "32-true", "bf16-mixed", ...
        wer_utterances: So many utterances of `dev` are recognised after every
            validation, beside the training; 0 for none.
        wer_scale: The acoustic scale for that.
    """

    strategy: str = "hadpsgd"
    num_learners: int = 4
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
    clip: float = 0.0
    precision: str = "32-true"
    wer_utterances: int = 0
    wer_scale: float = 0.1


@dataclass(frozen=True, kw_only=True)
class AlignSettings:
    """The flat start: monophone Gaussian mixtures by Viterbi training.

    Attributes:
        num_iterations: Realignments after the equal alignment.
        num_gaussians: Gaussians of all HMM states together.
        acoustic_scale: Factor on log-likelihoods against pronunciation costs.
        beam: Of the search, in scaled log-likelihood.
        retry_beam: Tried when nothing survives `beam`.
        max_training_utterances: The mixtures see at most so many, evenly taken;
            labels are made for all.
        silence_probability: Of a silence between two words.
    """

    num_iterations: int = 14
    num_gaussians: int = 1000
    acoustic_scale: float = 0.1
    beam: float = 8.0
    retry_beam: float = 40.0
    max_training_utterances: int = 6000
    silence_probability: float = 0.5


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """What is told of the speaker beside the log-mel energies, per conversation side.

    The papers' 260 inputs are 120 of log-mel with differences, 40 of fMLLR (the
    dimensions of the mixtures) and 100 of an i-vector.

    Attributes:
        streams: "none", "fmllr", "ivectors" or "both".
        rounds: How often the mixtures are trained on the adapted training speech; 0
            adapts to those of the alignment.
        passes: How often the Gaussians share a side's frames anew.
        min_frames: Fewest frames, silence aside, for a full map of a side.
        min_offset_frames: Fewest for an offset; below that fMLLR changes nothing.
        decodings: How often sides whose words nobody knows are decoded: once with the
            mixtures of the alignment, then with adapted ones.
        acoustic_scale: Of these decodings.
        num_gaussians: Of the mixture of all speech behind i-vectors.
        max_frames: Frames that this mixture is trained on.
        ivector_dims: Numbers in an i-vector.
        ivector_iterations: Of its training.
        ivector_period: Frames from one i-vector to the next, each from what was heard
            before; 0: one for all of a side.
        frame_weight: What a frame counts against the average speaker; neighbours say
            much the same.
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
        num_leaves: Most leaves of the tree.
        min_frames: Fewest frames of a leaf.
        min_gain: Least log-likelihood that a split gains.
        tie: Whether leaves that sound alike share a state in the end.
        num_iterations: Realignments after the labels of the monophones.
        num_gaussians: Most Gaussians of all states together.
        frames_per_gaussian: There are fewer where they would have fewer frames each, of
            those that the mixtures are trained on.
        lda: Whether tree and mixtures see, in place of cepstra with slopes, the
            directions that tell the monophones' states apart.
        lda_reach: Frames on each side that these directions are of.
        lda_dimension: How many directions.
        mllt: Whether their axes are turned so that diagonal covariances fit best.
    """

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


@dataclass(frozen=True, kw_only=True)
class RealignSettings:
    """Labels by a network in place of the mixtures.

    Attributes:
        run: Name of the finished training run whose network is asked; none: no such
            labels are made. It must be another than the run that learns from them.
        acoustic_scale: Factor on its log-likelihoods against pronunciation costs.
    """

    run: str | None = None
    acoustic_scale: float = 0.1


@dataclass(frozen=True, kw_only=True)
class KaldiSettings:
    """An experiment of Kaldi, whose alignments and graph take the place of our own.

    Attributes:
        experiment: Folder with `final.mdl` and `ali.*.gz` (`exp/tri4_ali_nodup`);
            none: the recipe aligns and makes its graph itself.
        more_alignments: Further folders with `ali.*.gz` by the same model, for
            instance of the held-out utterances; comma-separated.
        graph: Folder with `HCLG.fst`, `words.txt` and `phones`; none: the only one in
            `experiment`.
        arpa: ARPA file, unpacked, that `HCLG.fst` was made of; `decode.nbest` weighs
            its model against a larger one.
        fmllr: Tables or archives of fMLLR frames of all splits, comma-separated, that
            `adapt.streams=fmllr` (or both) takes in place of its own.
        ivectors: The same for i-vectors, one row per utterance or online ones.
        ivector_period: Frames from one online i-vector to the next (Kaldi's default is
            10); 0: one per utterance.
    """

    experiment: Path | None = None
    more_alignments: tuple[Path, ...] = ()
    graph: Path | None = None
    arpa: Path | None = None
    fmllr: tuple[str, ...] = ()
    ivectors: tuple[str, ...] = ()
    ivector_period: int = 10

    @property
    def folder(self) -> Path:
        """`experiment`, where there is one.

        Raises:
            ValueError: There is none.
        """
        if self.experiment is None:
            raise ValueError("`kaldi.experiment` must name a folder, got none")
        return self.experiment


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """The search graph.

    Attributes:
        silence_probability: Of a silence between two words.
    """

    silence_probability: float = 0.5


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The search, and the acoustic scales of which the best on `dev` is taken.

    Attributes:
        beam: In scaled log-likelihood below the best path.
        max_active: Most states of the graph alive after a frame.
        acoustic_scales: Tried for a network.
        gmm_acoustic_scales: Tried for the mixtures of the alignment.
        max_dev_utterances: Utterances of `dev` that the scales are tried on.
        nbest: So many word sequences of each utterance are weighed anew with the model
            of `lm.large_order`; 0 for none.
        lattice_beam: How far they may be from the best one.
        lm_weights: Of the larger model against that of the graph, tried on `dev`.
        word_penalties: Of each word, tried on `dev`.
        export_likelihoods: Whether the test sets' log-likelihoods are written as
            Kaldi's archives too; needs `kaldi.experiment`.
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
    export_likelihoods: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What the folder for `python -m lightning_adpsgd.asr transcribe` holds besides.

    Attributes:
        onnx: Write `model.onnx`, which takes the package `onnx`.
    """

    onnx: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One experiment.

    Attributes:
        corpus: Root that holds the LDC folders (`LDC97S62`, `LDC2002S09`, ...).
        discs: Further folders that hold discs.
        sources: What is trained on, of "switchboard", "fisher" and "callhome"; `dev`
            is taken from the first.
        out: Experiment directory; every stage writes below `out/exp`.
        run: Name of the training run: `train`, `decode` and `score` exist once per
            run, so that several strategies share one alignment and one graph.
        seed: Seed of everything drawn at random.
        cores: Processes that a stage may use.
        states: What the HMM states are of, "monophone" or "triphone".
    """

    corpus: Path
    out: Path
    discs: tuple[Path, ...] = ()
    sources: tuple[str, ...] = ("switchboard",)
    run: str = "hadpsgd"
    seed: int = 0
    cores: int = 2
    states: str = "monophone"
    prepare: PrepareSettings = field(default_factory=PrepareSettings)
    lexicon: LexiconSettings = field(default_factory=LexiconSettings)
    lm: LmSettings = field(default_factory=LmSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    align: AlignSettings = field(default_factory=AlignSettings)
    triphone: TriphoneSettings = field(default_factory=TriphoneSettings)
    realign: RealignSettings = field(default_factory=RealignSettings)
    kaldi: KaldiSettings = field(default_factory=KaldiSettings)
    adapt: AdaptSettings = field(default_factory=AdaptSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    graph: GraphSettings = field(default_factory=GraphSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    export: ExportSettings = field(default_factory=ExportSettings)

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ValueError(f"`cores` must be at least 1, got {self.cores}")
        for name, run in (("run", self.run), ("realign.run", self.realign.run)):
            if run is not None and (not run or "/" in run or run.startswith(".")):
                raise ValueError(f"`{name}` must be a plain folder name, got {run!r}")
        if self.states not in STATES:
            raise ValueError(f"`states` must be one of {STATES}, got {self.states!r}")
        if self.realign.run == self.run:
            raise ValueError(
                f"`realign.run` must be another run than {self.run!r}, which learns "
                "from the labels"
            )
        if self.uses_kaldi:
            self._check_streams()
            if self.decode.nbest and self.kaldi.arpa is None:
                raise ValueError(
                    f"`decode.nbest={self.decode.nbest}` with `kaldi.experiment` needs "
                    "the language model of its graph: name it with `kaldi.arpa`, or "
                    "set `decode.nbest=0`"
                )
        if self.decode.export_likelihoods and not self.uses_kaldi:
            raise ValueError("`decode.export_likelihoods` needs `kaldi.experiment`")
        if self.uses_kaldi and self.realign.run is not None:
            raise ValueError(
                "`realign.run` must be none with `kaldi.experiment`: Kaldi's labels "
                "stay as they are"
            )

    def _check_streams(self) -> None:
        """Own streams need own mixtures and graphs, which a Kaldi experiment lacks."""
        if self.adapt.fmllr and not self.kaldi.fmllr:
            raise ValueError(
                f"`adapt.streams={self.adapt.streams}` with `kaldi.experiment` takes "
                "fMLLR from Kaldi; name its archives with `kaldi.fmllr`"
            )

    @property
    def uses_kaldi(self) -> bool:
        """Whether labels and graph are those of Kaldi."""
        return self.kaldi.experiment is not None

    @property
    def finds_streams_itself(self) -> bool:
        """Whether a call that comes in can be adapted to, or need not be."""
        taken = bool(self.kaldi.fmllr or self.kaldi.ivectors or self.uses_kaldi)
        return self.streams is None or not taken

    @property
    def roots(self) -> tuple[Path, ...]:
        """All folders that hold discs."""
        return self.corpus, *self.discs

    def directory(self, name: str) -> Path:
        """Where a stage leaves its finished output.

        Args:
            name: Of the stage, or of what several can leave: "mixtures" (numbered
                states and their Gaussian mixtures), "states" (numbered states and
                labels), "streams" (what is told of the speakers; the features where
                that is nothing), "aligner" (the training run that realigns), "search"
                (the graph that a training recognises with; the features where it does
                not).
        """
        stage = self.stage_of(name)
        folder = self.out / "exp" / stage
        if name == "aligner" or stage == "realign":
            return folder / str(self.realign.run)
        return folder / self.run if stage in RUN_STAGES else folder

    def stage_of(self, name: str) -> str:
        """The stage that leaves what `directory` calls by this name."""
        mixtures = "align" if self.states == "monophone" else "triphone"
        mixtures = "kaldi" if self.uses_kaldi else mixtures
        states = "realign" if self.realign.run else mixtures
        streams = "features" if self.adapt.streams == "none" else "adapt"
        search = "graph" if self.train.wer_utterances else "features"
        others = {
            "mixtures": mixtures,
            "states": states,
            "streams": streams,
            "search": search,
            "aligner": "train",
        }
        return others.get(name, name)

    @property
    def streams(self) -> Path | None:
        """Folder of the streams, one folder per split in it; None if there are none."""
        return None if self.adapt.streams == "none" else self.directory("streams")

    def splits(self) -> tuple[str, ...]:
        """The splits that `prepare` found: `train`, `dev`, and parts of the test."""
        prepared = self.directory("prepare")
        splits = TRAINING_SPLITS + TEST_SPLITS
        return tuple(s for s in splits if (prepared / f"{s}.jsonl").exists())


def override(settings: Settings, *assignments: str) -> Settings:
    """Change values, each written as `group.name=value` (`lm.order=2`) or `name=value`.

    Whether they fit together is looked at when all are changed, in whatever order they
    stand; of two for one name the later one holds.

    Raises:
        ValueError: There is no such setting, a value does not fit its type, or the
            settings do not fit together.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        value = _value(type(settings), assignment)
        *groups, name = _path(assignment)
        inside = changes
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return _changed(settings, changes)


def _changed(group: Any, changes: dict[str, Any]) -> Any:
    inner = {
        name: _changed(getattr(group, name), inside)
        for name, inside in changes.items()
        if isinstance(inside, dict)
    }
    return dataclasses.replace(group, **(changes | inner))


def _path(assignment: str) -> list[str]:
    path, equals, _ = assignment.partition("=")
    if not equals:
        raise ValueError(f"a setting is written group.name=value, got {assignment!r}")
    return path.split(".")


def _value(settings: type, assignment: str) -> Any:
    """Of the type that the setting has in `settings` or its groups."""
    *groups, name = _path(assignment)
    group: Any = settings
    for inner in groups:
        group = _hint(group, inner, assignment)
        if not dataclasses.is_dataclass(group):
            raise ValueError(f"{assignment!r}: {inner!r} is a value, not a group")
    hint = _hint(group, name, assignment)
    try:
        return _parse(assignment.partition("=")[2], hint)
    except ValueError as error:
        raise ValueError(f"{assignment!r}: {error}") from error


def _hint(group: Any, name: str, assignment: str) -> Any:
    hints = typing.get_type_hints(group)
    if name not in hints:
        raise ValueError(
            f"{assignment!r}: no setting {name!r}; there are {', '.join(hints)}"
        )
    return hints[name]


def _parse(text: str, hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:  # tuple[float, ...] is written 0.1,0.2
        return tuple(_parse(part, typing.get_args(hint)[0]) for part in text.split(","))
    if hint is bool:
        return _parse_bool(text)
    if dataclasses.is_dataclass(hint):
        raise ValueError("this is a group; name one of its settings")
    return hint(text)


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"must be true or false, got {text!r}")
    return text.lower() == "true"
