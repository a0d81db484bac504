"""The acoustic model: its size, its loss, what it makes of whole utterances."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.asr.frames.store import IGNORE
from lightning_adpsgd.asr.model import (
    AcousticModel,
    NonFiniteLoss,
    frame_cross_entropy,
)
from lightning_adpsgd.asr.sound.features import CONTEXT

STATES = 7


def small_model(**changes) -> AcousticModel:
    sizes = {
        "input_size": 12,
        "num_layers": 1,
        "hidden_size": 8,
        "bottleneck_size": 6,
        "global_batch": 8,
        "corpus_chunks": 64,
        "base_batch": 8,
        "base_rate": 1.0,
        "warmup_epochs": 0.0,
        "decay": 1.0,
    }
    return AcousticModel(STATES, **(sizes | changes))


def learnable_batches(num_chunks: int = 64) -> TensorDataset:
    """Chunks whose labels are the index of the largest of the first features."""
    frames = torch.randn(num_chunks, 21 + 2 * CONTEXT, 4)
    return TensorDataset(frames, frames[:, CONTEXT:-CONTEXT].argmax(-1))


def quiet_trainer(**changes) -> Trainer:
    arguments = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**(arguments | changes))


def test_at_the_sizes_of_the_papers_it_has_their_number_of_parameters():
    with torch.device("meta"):
        model = AcousticModel(32_000, input_size=260)
    assert sum(p.numel() for p in model.parameters()) == 43_154_944


def test_the_loss_of_equal_logits_is_the_logarithm_of_the_number_of_states():
    loss = frame_cross_entropy(torch.zeros(2, 3, STATES), torch.ones(2, 3).long())
    assert loss.item() == pytest.approx(math.log(STATES))


def test_frames_with_the_ignored_label_change_no_loss():
    logits, labels = torch.randn(2, 5, STATES), torch.randint(STATES, (2, 5))
    labels[:, 3:] = IGNORE
    expected = frame_cross_entropy(logits[:, :3], labels[:, :3])
    assert frame_cross_entropy(logits, labels).item() == pytest.approx(expected.item())


def test_a_batch_without_a_counted_frame_has_loss_zero():
    labels = torch.full((2, 5), IGNORE)
    assert frame_cross_entropy(torch.randn(2, 5, STATES), labels).item() == 0


def test_the_loss_of_logits_in_bfloat16_is_as_exact_as_they_are():
    logits = torch.randn(64, 21, STATES, generator=torch.Generator().manual_seed(0))
    logits, labels = logits.bfloat16(), torch.ones(64, 21).long()
    expected = frame_cross_entropy(logits.float(), labels).item()
    assert frame_cross_entropy(logits, labels).item() == pytest.approx(expected)


def test_training_learns_what_the_frames_say():
    seed_everything(1)
    model = small_model()
    loader = DataLoader(learnable_batches(), batch_size=8, shuffle=True)
    trainer = quiet_trainer(max_epochs=40)
    trainer.fit(model, loader)
    [result] = trainer.validate(model, loader, verbose=False)
    assert result["val_accuracy"] > 0.9


def test_validation_averages_over_frames_and_not_over_batches():
    model = small_model()
    frames, labels = learnable_batches(5).tensors
    labels = labels.clone()
    labels[4, 1:] = IGNORE
    loader = DataLoader(TensorDataset(frames, labels), batch_size=4)
    [result] = quiet_trainer().validate(model, loader, verbose=False)
    logits, _ = model._evaluate((frames, labels))
    expected = frame_cross_entropy(logits, labels).item()
    assert result["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_rate_follows_the_global_samples_of_the_steps():
    model = small_model(warmup_epochs=2.0, global_batch=32, base_rate=0.1)
    loader = DataLoader(learnable_batches(), batch_size=8)
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(model, loader)
    [rate] = {g["lr"] for g in trainer.optimizers[0].param_groups}
    assert rate == pytest.approx(model.schedule.rate(3 * 32))


def test_a_loss_that_is_not_finite_stops_with_the_learner_and_the_step():
    frames = learnable_batches(8).tensors[0]
    frames[5] = math.nan
    loader = DataLoader(TensorDataset(frames, torch.zeros(8, 21).long()), batch_size=4)
    with pytest.raises(NonFiniteLoss, match="learner 0 is nan at step 1"):
        quiet_trainer(max_epochs=1).fit(small_model(), loader)


def test_deltas_are_added_where_the_frames_have_a_third_of_the_inputs():
    ramp = torch.arange(30.0)[:, None].expand(30, 4)
    inputs = small_model()._utterance_inputs(ramp)[10:20]
    expected = [ramp[10:20], torch.ones(10, 4), torch.zeros(10, 4)]
    torch.testing.assert_close(inputs, torch.cat(expected, 1))


def test_a_chunk_with_its_margin_has_the_deltas_of_its_utterance():
    model, utterance = small_model(), torch.randn(40, 4)
    whole = model._utterance_inputs(utterance)[10:20]
    chunk = model._chunk_inputs(utterance[None, 6:24], 10)[0]
    torch.testing.assert_close(chunk, whole)


def test_frames_that_are_complete_only_lose_their_margin():
    frames = torch.randn(2, 27, 12)
    inputs = small_model()._chunk_inputs(frames, 21)
    torch.testing.assert_close(inputs, frames[:, 3:24])


def test_more_labels_than_frames_are_refused():
    with pytest.raises(ValueError, match=r"21 labels need as many frames.*got 20"):
        small_model()._chunk_inputs(torch.zeros(2, 28, 4), 21)


def test_frames_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"`input_size` 12.*got 5"):
        small_model()._chunk_inputs(torch.zeros(1, 29, 5), 21)


def _naive_log_posteriors(model: AcousticModel, frames: Tensor) -> Tensor:
    """Frame by frame, the mean over every window that holds the frame."""
    inputs = model._utterance_inputs(frames)
    window, hop = model.hparams["window"], model.hparams["hop"]
    last = max(len(frames) - window, 0)
    starts = sorted({*range(0, last, hop), last})
    outputs = {s: model(inputs[None, s : s + window])[0].softmax(-1) for s in starts}
    rows = []
    for t in range(len(frames)):
        rows.append(
            torch.stack(
                [o[t - s] for s, o in outputs.items() if s <= t < s + window]
            ).mean(0)
        )
    return torch.stack(rows).log()


@pytest.mark.parametrize("num_frames", [1, 20, 21, 22, 28, 50])
def test_log_posteriors_are_the_mean_over_the_windows_of_a_frame(num_frames):
    model, frames = small_model(), torch.randn(num_frames, 4)
    with torch.no_grad():
        expected = _naive_log_posteriors(model, frames)
    torch.testing.assert_close(model.log_posteriors(frames), expected)


def test_windows_in_several_batches_give_what_one_batch_gives(monkeypatch):
    model, frames = small_model(), torch.randn(200, 4)
    whole = model.log_posteriors(frames)
    most = 3 * model.hparams["window"] * model.hparams["num_states"]
    for few in (most, 1):
        monkeypatch.setattr("lightning_adpsgd.asr.model._MOST_POSTERIORS", few)
        torch.testing.assert_close(model.log_posteriors(frames), whole)


def test_a_window_over_the_whole_utterance_is_the_full_forward():
    model, frames = small_model(window=200, hop=100), torch.randn(120, 4)
    with torch.no_grad():
        logits = model(model._utterance_inputs(frames)[None])[0]
    torch.testing.assert_close(model.log_posteriors(frames), logits.log_softmax(-1))


def test_longer_windows_come_closer_to_the_full_forward():
    frames, distances = torch.randn(200, 4), []
    for window, hop in ((21, 21), (21, 7), (80, 20)):
        torch.manual_seed(0)
        model = small_model(window=window, hop=hop)
        with torch.no_grad():
            logits = model(model._utterance_inputs(frames)[None])[0]
        seen = model.log_posteriors(frames).exp()
        distances.append(float((seen - logits.softmax(-1)).abs().mean()))
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 0.01


def test_posteriors_of_a_frame_sum_to_one():
    log_posteriors = small_model().log_posteriors(torch.randn(100, 4))
    torch.testing.assert_close(log_posteriors.exp().sum(1), torch.ones(100))


def test_an_empty_utterance_has_no_posteriors():
    assert small_model().log_posteriors(torch.zeros(0, 4)).shape == (0, STATES)


def test_an_utterance_with_a_frame_that_is_not_finite_is_refused():
    frames = torch.zeros(30, 4)
    frames[3, 1] = math.inf
    with pytest.raises(ValueError, match="must be finite"):
        small_model().log_posteriors(frames)


def test_likelihoods_divide_the_posteriors_by_the_priors():
    model, frames = small_model(), torch.randn(25, 4)
    counts = torch.tensor([5, 1, 0, 10, 20, 30, 33])
    model.set_priors(counts)
    priors = counts.clamp(min=1) / 100
    expected = (model.log_posteriors(frames).exp() / priors).log()
    torch.testing.assert_close(model.log_likelihoods(frames), expected)


def test_counts_for_another_number_of_states_are_refused():
    with pytest.raises(ValueError, match=r"7 counts.*shape \(3,\)"):
        small_model().set_priors(torch.ones(3))


def test_a_checkpoint_is_enough_to_evaluate_an_utterance(tmp_path):
    model, frames = small_model(), torch.randn(25, 4)
    model.set_priors(torch.arange(7))
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(model, DataLoader(learnable_batches(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = AcousticModel.load_from_checkpoint(tmp_path / "model.ckpt")
    torch.testing.assert_close(
        loaded.log_likelihoods(frames), model.log_likelihoods(frames)
    )


def test_a_hop_longer_than_the_window_is_refused():
    with pytest.raises(ValueError, match="`hop` must be from 1 to `window` 21, got 22"):
        small_model(hop=22)


def test_frames_are_warped_in_training_only():
    model = small_model(max_warp=0.5)
    frames, labels = learnable_batches(8).tensors
    batch = frames, labels
    losses = [frame_cross_entropy(*model._evaluate(batch)).item() for _ in range(2)]
    assert losses[0] == losses[1]
    assert model.training_step(batch, 0).item() != losses[0]


def test_time_is_stretched_in_training_only():
    model = small_model(max_stretch=0.5)
    batch = learnable_batches(8).tensors
    losses = [frame_cross_entropy(*model._evaluate(batch)).item() for _ in range(2)]
    assert losses[0] == losses[1]
    assert model.training_step(batch, 0).item() != losses[0]


def test_bands_and_frames_are_masked_in_training_only():
    model = small_model(mask_bands=2, mask_frames=5)
    batch = learnable_batches(8).tensors
    losses = [frame_cross_entropy(*model._evaluate(batch)).item() for _ in range(2)]
    assert losses[0] == losses[1]
    assert model.training_step(batch, 0).item() != losses[0]


@pytest.mark.parametrize("name", ["mask_bands", "mask_frames"])
def test_a_negative_mask_is_refused(name: str):
    with pytest.raises(ValueError, match=f"`{name}` must not be negative, got -1"):
        small_model(**{name: -1})


def test_streams_of_a_stretched_chunk_stay_with_their_frames():
    model = small_model(max_stretch=0.3)
    ramp = torch.arange(29.0)[None, :, None].repeat(4, 1, 2)
    labels = torch.zeros(4, 21).long()
    fmllr, ivector = ramp[:, 4:25], torch.randn(4, 3)
    frames, _, moved, same = model._varied((ramp, labels, fmllr, ivector))
    assert torch.equal(same, ivector)
    inside = slice(2, -2)  # there nothing comes from beyond the stream's ends
    torch.testing.assert_close(moved[:, 6:15], frames[:, 4:25][:, 6:15])
    assert not torch.equal(frames[:, inside], ramp[:, inside])


def test_dropout_acts_between_layers_and_in_training_only():
    model, frames = small_model(num_layers=2, dropout=0.5), torch.randn(2, 9, 12)
    model.train()
    assert not torch.equal(model(frames), model(frames))
    model.eval()
    assert torch.equal(model(frames), model(frames))


def test_a_step_with_a_clipped_gradient_is_no_longer_than_the_bound():
    model = small_model(base_rate=1.0)
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    trainer = quiet_trainer(max_steps=1, gradient_clip_val=1e-3)
    trainer.fit(model, DataLoader(learnable_batches(8), batch_size=8))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no LSTM in bfloat16",
)
def test_mixed_precision_computes_in_bfloat16_and_keeps_weights_in_float32():
    model, seen = small_model(), []
    model.output.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    trainer = quiet_trainer(max_steps=2, precision="bf16-mixed")
    trainer.fit(model, DataLoader(learnable_batches(16), batch_size=8))
    assert seen == [torch.bfloat16] * 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert math.isfinite(trainer.callback_metrics["train_loss"].item())


def test_mixed_precision_is_refused_on_a_cpu_that_cannot_compute_it(
    monkeypatch: pytest.MonkeyPatch,
):
    def lacks_bfloat16(*_: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(torch.nn.LSTM, "forward", lacks_bfloat16)
    trainer = quiet_trainer(max_steps=1, precision="bf16-mixed")
    with pytest.raises(ValueError, match=r'on this CPU.* lacks AVX-512.* "bf16-mixed"'):
        trainer.fit(small_model(), DataLoader(learnable_batches(8), batch_size=8))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_weights_of_other_precisions_train_and_evaluate(precision: Any):
    model, frames = small_model(), torch.randn(25, 4)
    loader = DataLoader(learnable_batches(16), batch_size=8)
    trainer = quiet_trainer(max_steps=2, precision=precision)
    trainer.fit(model, loader, loader)
    assert math.isfinite(trainer.callback_metrics["val_loss"].item())
    assert bool(model.log_likelihoods(frames).isfinite().all())


def test_a_validation_in_bfloat16_is_the_mean_of_all_batches():
    torch.manual_seed(0)
    model, loader = small_model(), DataLoader(learnable_batches(100), batch_size=2)
    trainer = quiet_trainer(precision="bf16-true")
    trainer.validate(model, loader, verbose=False)
    losses = [
        frame_cross_entropy(*model._evaluate((frames.bfloat16(), labels))).item()
        for frames, labels in loader
    ]
    expected = sum(losses) / len(losses)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize("name", ["max_warp", "max_stretch"])
def test_a_stretch_of_the_whole_axis_is_refused(name: str):
    with pytest.raises(ValueError, match=rf"`{name}` must lie in \[0, 1\), got 1"):
        small_model(**{name: 1})
