"""The acoustic model of the papers: a bidirectional LSTM over chunks of frames.

It has stacked bidirectional LSTM layers, a linear bottleneck and a softmax over the
context-dependent states of hidden Markov models, and is trained by frame cross-entropy.
At the papers' sizes (260 inputs, 6 layers of 2 x 512, bottleneck 256, 32,000 states) it
has 43,154,944 parameters.

It maps frames to log-posteriors. It does not read audio and does not decode.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_adpsgd.asr.frames.augmentation import (
    random_factors,
    random_masks,
    random_warp,
    stretch_labels,
    stretch_time,
)
from lightning_adpsgd.asr.frames.store import IGNORE
from lightning_adpsgd.asr.schedule import GlobalSampleLR, PaperSchedule
from lightning_adpsgd.asr.sound.features import (
    CONTEXT,
    add_differences,
    with_differences,
)

_CHECK_EVERY_STEPS = 50
_MOST_POSTERIORS = 1 << 24  # computed at once: 67 MB; 24 windows of 32,000 states


class NonFiniteLoss(FloatingPointError):
    """The loss of a learner is infinite or NaN."""


class AcousticModel(LightningModule):
    """A bidirectional LSTM that predicts the HMM state of each frame.

    A batch is `(frames, labels)`: float frames `[batch, time + 2 * margin, feature]`
    and integer labels `[batch, time]`, with `IGNORE` for frames that do not count. The
    deltas use up a margin of `features.CONTEXT` frames on each side; without deltas, a
    margin of any width is cut off. If the speaker is known, a batch also has fMLLR
    `[batch, time, feature]` and i-vectors `[batch, feature]`; the device repeats an
    i-vector for each frame. A stream with zero features counts as absent.

    Args:
        num_states: Number of classes of the softmax.
        input_size: Number of features of a frame at the LSTM's input, including
            streams: 260 with 40 of fMLLR and 100 of an i-vector. Subtract the features
            of the streams: frames that have the remaining width are used unchanged; to
            frames with a third of it, the device adds deltas and delta-deltas.
        num_layers: Number of LSTM layers.
        hidden_size: Number of cells of a layer in each direction.
        bottleneck_size: Width of the linear layer before the softmax.
        dropout: Dropout probability between LSTM layers.
        max_warp: Largest warp of the frequency axis in training: each chunk is
            stretched by a factor drawn from 1 - max_warp to 1 + max_warp. For log-mel
            frames.
        max_stretch: Largest stretch of the time axis in training: each chunk is
            stretched by a factor drawn from 1 - max_stretch to 1 + max_stretch.
        mask_bands: Largest number of adjacent bands of each chunk that are set to the
            mean in training; for normalised log-mel frames.
        mask_frames: Largest number of adjacent frames of each chunk that are set to the
            mean in training.
        global_batch: Number of chunks in one step of all learners together.
        corpus_chunks: Number of chunks in one epoch of all learners together.
        base_rate: Learning rate at the start, see `schedule`.
        base_batch: Global batch that `base_rate` belongs to.
        warmup_epochs: Number of epochs until the peak rate.
        decay: Factor of the rate per epoch after the warm-up.
        momentum: Momentum of SGD; local to each learner and never averaged.
        window: Number of frames of a window when whole utterances are evaluated.
        hop: Number of frames from one window to the next; posteriors of overlapping
            windows are averaged.

    Raises:
        ValueError: A warp, stretch, mask or `hop` is out of its bounds.
    """

    log_priors: Tensor

    def __init__(
        self,
        num_states: int = 32_000,
        *,
        input_size: int = 120,
        num_layers: int = 6,
        hidden_size: int = 512,
        bottleneck_size: int = 256,
        dropout: float = 0.0,
        max_warp: float = 0.0,
        max_stretch: float = 0.0,
        mask_bands: int = 0,
        mask_frames: int = 0,
        global_batch: int = 256,
        corpus_chunks: int = 1,
        base_rate: float = 0.1,
        base_batch: int = 256,
        warmup_epochs: float = 10.0,
        decay: float = 2**-0.5,
        momentum: float = 0.0,
        window: int = 21,
        hop: int = 7,
    ) -> None:
        super().__init__()
        _check_window(window, hop)
        for name, most in (("max_warp", max_warp), ("max_stretch", max_stretch)):
            if not 0 <= most < 1:
                raise ValueError(f"`{name}` must lie in [0, 1), got {most}")
        for name, widest in (("mask_bands", mask_bands), ("mask_frames", mask_frames)):
            if widest < 0:
                raise ValueError(f"`{name}` must not be negative, got {widest}")
        self.save_hyperparameters()
        self.schedule = PaperSchedule(
            corpus_chunks, global_batch, base_rate, base_batch, warmup_epochs, decay
        )
        self.lstm = nn.LSTM(
            input_size,
            hidden_size,
            num_layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout,
        )
        self.bottleneck = nn.Linear(2 * hidden_size, bottleneck_size)
        self.output = nn.Linear(bottleneck_size, num_states)
        self.register_buffer("log_priors", torch.zeros(num_states).log_softmax(0))
        self.val_loss = MeanMetric()
        self.val_accuracy = _frame_accuracy(num_states)

    @override
    def setup(self, stage: str) -> None:
        _check_precision(self.trainer)

    @override
    def forward(self, frames: Tensor) -> Tensor:
        """Logits of the states.

        Args:
            frames: `[batch, time, input_size]`, deltas included.

        Returns:
            `[batch, time, num_states]`.
        """
        frames = frames.to(self.output.weight.dtype)  # of `precision="bf16-true"`, say
        return self.output(self.bottleneck(self.lstm(frames)[0]))

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """The frame cross-entropy of a batch, also logged as `train_loss`."""
        logits, labels = self._evaluate(self._varied(batch))
        loss = frame_cross_entropy(logits, labels)
        self._raise_unless_finite(loss)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Adds a batch to `val_loss` and `val_accuracy`, means over all frames."""
        logits, labels = self._evaluate(batch)
        counted = (labels != IGNORE).sum()
        # `precision="bf16-true"` rounds the sums as weights, and Lightning's log makes
        # the metric round each later batch: it moves it, with bfloat16 as the default.
        self.val_loss.set_dtype(torch.float32)
        self.val_loss.update(frame_cross_entropy(logits, labels), weight=counted)
        self.val_accuracy.update(logits.argmax(-1).flatten(), labels.flatten())
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def frame_losses(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The cross-entropy of every frame of a batch, and a mask of those that count.

        Returns:
            Losses [batch, time] in nats, 0 where a frame does not count, and the mask
            [batch, time] of those that do.
        """
        logits, labels = self._evaluate(batch)
        losses = functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
        )
        return losses, labels != IGNORE

    @override
    def configure_optimizers(self) -> Any:
        """SGD with a learning rate that follows the global samples at every step."""
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.schedule.base_rate,
            momentum=self.hparams["momentum"],
        )
        scheduler = GlobalSampleLR(optimizer, self.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def set_priors(self, state_counts: Tensor) -> None:
        """Stores the states' frequencies, so that a checkpoint suffices for decoding.

        Args:
            state_counts: Number of frames of each state in the training data,
                `[num_states]`. A state without frames counts as one frame, so that
                words with it can be recognised; in Kaldi they cannot.

        Raises:
            ValueError: The number of states is wrong, or a count is negative.
        """
        expected = self.hparams["num_states"]
        if state_counts.shape != (expected,) or bool((state_counts < 0).any()):
            raise ValueError(
                f"`state_counts` must hold {expected} counts of 0 or more, got shape "
                f"{tuple(state_counts.shape)} with minimum {state_counts.min()}"
            )
        counts = state_counts.to(torch.float64).clamp(min=1)
        self.log_priors.copy_((counts / counts.sum()).log())

    @torch.no_grad()
    def log_posteriors(
        self,
        frames: Tensor,
        fmllr: Tensor | None = None,
        ivectors: Tensor | None = None,
    ) -> Tensor:
        """The log-posteriors of the states over a whole utterance.

        The LSTM runs over overlapping windows of the length of its training chunks, and
        a frame's posteriors are averaged over its windows. Deltas are computed over the
        whole utterance. A window uses the i-vector of its first frame, as a chunk does
        in training.

        Args:
            frames: `[time, feature]`; no frames give no rows.
            fmllr: `[time, feature]`, if the model was trained with them.
            ivectors: `[time, feature]`, if the model was trained with them.

        Returns:
            `[time, num_states]` float32.

        Raises:
            ValueError: A frame has a non-finite value.
        """
        if not bool(frames.isfinite().all()):
            raise ValueError("`frames` must be finite, but has a non-finite value")
        if len(frames) == 0:
            return frames.new_zeros((0, self.hparams["num_states"]))
        was_training = self.training
        self.eval()
        try:
            none = frames.new_zeros((len(frames), 0))
            beside = [
                none if stream is None else stream for stream in (fmllr, ivectors)
            ]
            inputs = self._utterance_inputs(frames.float(), beside)
            return self._windowed_log_posteriors(inputs, *beside)
        finally:
            self.train(was_training)

    def log_likelihoods(
        self,
        frames: Tensor,
        fmllr: Tensor | None = None,
        ivectors: Tensor | None = None,
    ) -> Tensor:
        """Log-posteriors minus log-priors, `[time, num_states]`, for decoders."""
        return self.log_posteriors(frames, fmllr, ivectors).sub_(self.log_priors)

    def _windowed_log_posteriors(
        self, inputs: Tensor, fmllr: Tensor, ivectors: Tensor
    ) -> Tensor:
        window, hop = self.hparams["window"], self.hparams["hop"]
        starts = torch.tensor(_window_starts(len(inputs), window, hop))
        reach = torch.arange(min(window, len(inputs)))
        total = inputs.new_zeros((len(inputs), self.hparams["num_states"]))
        counts = inputs.new_zeros((len(inputs), 1))
        at_once = max(1, _MOST_POSTERIORS // (len(reach) * self.hparams["num_states"]))
        for some in starts.to(inputs.device).split(at_once):
            at = some[:, None] + reach.to(inputs.device)  # (window, time)
            windows = _joined(inputs[at], fmllr[at], ivectors[some])
            posteriors = self(windows).float().softmax(-1).flatten(0, 1)
            total.index_add_(0, at.flatten(), posteriors)
            counts.index_add_(0, at.flatten(), torch.ones_like(posteriors[:, :1]))
        # In place: with 32,000 states 20 s are 256 MB.
        return total.div_(counts).clamp_(min=torch.finfo(total.dtype).tiny).log_()

    def _varied(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The batch with random warps, stretches and masks."""
        frames, labels, *beside = batch
        frames = frames.float()
        if most := self.hparams["max_warp"]:
            frames = random_warp(frames, most)
        if most := self.hparams["max_stretch"]:
            factors = random_factors(frames, most)
            frames, labels = (
                stretch_time(frames, factors),
                stretch_labels(labels, factors),
            )
            along = [part.ndim == 3 for part in beside]  # not i-vectors
            beside = [
                stretch_time(part.float(), factors) if moves else part
                for part, moves in zip(beside, along, strict=True)
            ]
        bands, length = self.hparams["mask_bands"], self.hparams["mask_frames"]
        return (random_masks(frames, bands, length), labels, *beside)

    def _evaluate(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        frames, labels, *beside = batch
        labels = labels.long()
        inputs = self._chunk_inputs(frames.float(), labels.shape[1], beside)
        return self(_joined(inputs, *beside) if beside else inputs), labels

    def _chunk_inputs(
        self, frames: Tensor, num_frames: int, beside: Sequence[Tensor] = ()
    ) -> Tensor:
        """Adds deltas to `[batch, time + 2 * margin, feature]`, or cuts the margin."""
        if self._needs_differences(frames, beside):
            frames = add_differences(frames)
        margin = (frames.shape[1] - num_frames) // 2
        if margin < 0:
            raise ValueError(
                f"{num_frames} labels need as many frames, plus {2 * CONTEXT} if "
                f"deltas are added, got {frames.shape[1]}"
            )
        return frames[:, margin : margin + num_frames]

    def _utterance_inputs(
        self, frames: Tensor, beside: Sequence[Tensor] = ()
    ) -> Tensor:
        """Adds deltas to the frames of an utterance, `[time, feature]`."""
        if self._needs_differences(frames, beside):
            return with_differences(frames)
        return frames

    def _needs_differences(self, frames: Tensor, beside: Sequence[Tensor]) -> bool:
        added = sum(stream.shape[-1] for stream in beside)
        width, expected = frames.shape[-1], self.hparams["input_size"] - added
        if width not in (expected, expected / 3):
            raise ValueError(
                f"frames must have `input_size` {self.hparams['input_size']} features "
                f"less the {added} of streams, or a third of that for deltas to be "
                f"added, got {width}"
            )
        return width != expected

    def _raise_unless_finite(self, loss: Tensor) -> None:
        # On other devices than the CPU, reading a value means waiting for the device.
        if loss.device.type != "cpu" and self.global_step % _CHECK_EVERY_STEPS:
            return
        if not bool(loss.isfinite()):
            raise NonFiniteLoss(
                f"the loss of learner {self.global_rank} is {loss.item()} at step "
                f"{self.global_step}: lower `base_rate`, lengthen `warmup_epochs`, or "
                "look for frames that are not finite"
            )


def frame_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean negative log-posterior of the frames' states, in nats.

    Args:
        logits: `[batch, time, num_states]`.
        labels: `[batch, time]`; `IGNORE` where a frame does not count.

    Returns:
        A scalar; 0 if no frame counts.
    """
    # The sum of a batch has two digits in bfloat16.
    precise = torch.promote_types(logits.dtype, torch.float32)
    total = functional.cross_entropy(
        logits.flatten(0, 1).to(precise),
        labels.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )
    return total / (labels != IGNORE).sum().clamp(min=1)


def _frame_accuracy(num_states: int) -> MulticlassAccuracy:
    return MulticlassAccuracy(
        num_states, average="micro", ignore_index=IGNORE, validate_args=False
    )


def _joined(frames: Tensor, fmllr: Tensor, ivectors: Tensor) -> Tensor:
    """Concatenates streams to frames; repeats the i-vector for every frame.

    Args:
        frames: `[batch, time, feature]`.
        fmllr: fMLLR, the same shape; zero features if there is none.
        ivectors: `[batch, feature]`; zero features if there is none.
    """
    repeated = ivectors[:, None].expand(-1, frames.shape[1], -1)
    parts = (frames, fmllr.to(frames.dtype), repeated.to(frames.dtype))
    return torch.cat(parts, dim=-1)


def _window_starts(num_frames: int, window: int, hop: int) -> list[int]:
    """The starts of windows that cover all frames; the last ends at the last frame."""
    last = max(num_frames - window, 0)
    return [*range(0, last, hop), last]


def _check_window(window: int, hop: int) -> None:
    if not 1 <= hop <= window:
        raise ValueError(f"`hop` must be from 1 to `window` {window}, got {hop}")


def _check_precision(trainer: Trainer) -> None:
    """Refuses "bf16-mixed" on a CPU for which oneDNN has no LSTM in bfloat16."""
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if not on_cpu or trainer.precision != "bf16-mixed":
        return
    with torch.random.fork_rng(devices=[]):  # those of the training stay as they are
        lstm = nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            lstm(torch.zeros(1, 1))
    except RuntimeError as error:
        raise ValueError(
            '`precision` must be "32-true", "64-true" or "bf16-true" on this CPU, '
            'which lacks AVX-512 and so a mixed-precision LSTM, got "bf16-mixed"'
        ) from error
