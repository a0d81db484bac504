"""The acoustic model: what it is told of speakers, its sizes and its training."""

from dataclasses import dataclass

from lightning_adpsgd.registration import NAMES
from recipes.hybrid.pipeline.bounds import above_zero, at_least, one_of, within

ADAPTED_BY = ("none", "fmllr", "ivectors", "both")
STRATEGIES = ("ddp", *NAMES)
ORDERS = (None, "step_then_average", "average_then_step")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")


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
        one_of(self, "streams", ADAPTED_BY)
        at_least(self, 1, "decodings", "passes", "num_gaussians", "max_frames")
        at_least(self, 1, "ivector_dims", "ivector_iterations", "min_offset_frames")
        at_least(self, 0, "rounds", "ivector_period")
        above_zero(self, "acoustic_scale", "frame_weight")
        within(self, 0, 1, "frame_weight")
        if self.min_offset_frames > self.min_frames:
            raise ValueError(
                f"`min_offset_frames` must be at most `min_frames` {self.min_frames}, "
                f"got {self.min_offset_frames}"
            )

    @property
    def fmllr(self) -> bool:
        """Whether there is fMLLR."""
        return self.streams in ("fmllr", "both")

    @property
    def ivectors(self) -> bool:
        """Whether there are i-vectors."""
        return self.streams in ("ivectors", "both")


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
            The training leaves the model of the last one.
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
            training, and the same command continues where it was.
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
        within(self, 0, 1, "cpu_share", "mixing_gain", "momentum", "dropout", "decay")
        within(self, 0, 0.9, "max_warp", "max_stretch")
        if self.validate_every > self.epochs:
            raise ValueError(
                f"`validate_every` must be at most the {self.epochs} epochs, because a "
                f"training leaves the model of its last validation, got "
                f"{self.validate_every}"
            )
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
