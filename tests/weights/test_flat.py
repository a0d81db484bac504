import gc
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.mixing.averages import all_finite
from lightning_adpsgd.weights.flat import (
    FlatParameters,
    averaged_buffers,
    same_order,
)


class Mixed(nn.Module):
    """Two dtypes, batch-norm buffers, an integer buffer and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(3, 2)
        self.twice = nn.Linear(2, 2, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(2)
        self.empty = nn.Parameter(torch.empty(0))


def test_writing_to_the_vector_writes_the_module() -> None:
    module = nn.Linear(3, 2)
    flat = FlatParameters(module)
    flat.vectors[0].copy_(torch.arange(8.0))
    assert sorted(module.weight.flatten().tolist() + module.bias.tolist()) == list(
        range(8)
    )


def test_writing_to_the_module_writes_the_vector() -> None:
    module = nn.Linear(3, 2, bias=False)
    flat = FlatParameters(module)
    with torch.no_grad():
        module.weight.fill_(7)
    assert flat.vectors[0].tolist() == [7.0] * 6


def test_values_and_identity_of_the_parameters_are_kept() -> None:
    module = Mixed()
    before = dict(module.named_parameters())
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    FlatParameters(module)
    assert all(p is before[name] for name, p in module.named_parameters())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, values[name])


def test_each_dtype_has_a_vector_and_integer_buffers_have_none() -> None:
    flat = FlatParameters(Mixed())
    lengths = {vector.dtype: vector.numel() for vector in flat.vectors}
    # 3·2 + 2 weights, 2·2 of the batch norm and 2·2 of its running statistics
    assert lengths == {torch.float32: 16, torch.float64: 6}
    assert "num_batches_tracked" not in flat.layout()


def test_running_statistics_lie_in_the_vector() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    flat = FlatParameters(module)
    module(torch.tensor([[0.0, 10.0], [0.0, 30.0]]))
    expected = torch.cat([module.running_mean, module.running_var])  # type: ignore[list-item]
    assert torch.equal(flat.vectors[0], expected)
    assert expected.tolist() != [0, 0, 1, 1]


def test_frozen_weights_and_buffers_are_spans_that_are_not_trained() -> None:
    frozen, trained = nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 5)
    tied = nn.Linear(2, 3).requires_grad_(False)
    tied.weight = nn.Parameter(trained.weight[:2, :3].view(3, 2))
    norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
    module = nn.Sequential(frozen, trained, tied, norm)
    flat = FlatParameters(module, shards=16)
    for vector, spans in zip(flat.vectors, flat.spans(), strict=True):
        parts = vector.split([span.length for span in spans])
        for part, span in zip(parts, spans, strict=True):
            part.fill_(0.0 if span.is_trained else 7.0)
    values = {name: tensor.eq(7.0) for name, tensor in module.state_dict().items()}
    sevens = {name for name, found in values.items() if found.all()}
    assert sevens == {"0.weight", "0.bias", "2.bias", "3.running_mean", "3.running_var"}
    assert not any(values[name].any() for name in ("1.weight", "1.bias", "2.weight"))
    assert [len(spans) for spans in flat.spans()] == [6, 3]


def test_tied_weights_stay_tied_and_take_one_place() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    flat = FlatParameters(nn.Sequential(first, second))
    assert flat.vectors[0].numel() == 16
    flat.vectors[0].fill_(3)
    assert second.weight.eq(3).all()
    assert second.weight is first.weight


def test_two_parameters_over_the_same_memory_stay_over_the_same_memory() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.data)
    values = first.weight.detach().clone()
    flat = FlatParameters(nn.Sequential(first, second))
    assert flat.vectors[0].numel() == 16
    assert second.weight.data_ptr() == first.weight.data_ptr()
    assert torch.equal(second.weight, values)


class Overlapping(nn.Module):
    """Weights and a buffer over the same memory, beside others."""

    last: Tensor

    def __init__(self, weight: Tensor, *others: Tensor) -> None:
        super().__init__()
        self.before = nn.Linear(2, 1)
        self.weight = nn.Parameter(weight)
        self.other = nn.Parameter(others[0])
        self.register_buffer("last", others[-1].detach())


def overlapping() -> dict[str, list[Tensor]]:
    wide, square, row = (torch.randn(shape) for shape in ((3, 4), (3, 3), (4,)))
    turned = wide.clone().T
    return {
        "transposes": [wide, wide.T],
        "square transposes": [square, square.T],
        "a transpose first": [turned, turned.T],
        "rows": [wide[1:], wide, wide[:2]],
        "a whole, and its first and last row": [wide, wide[:1], wide[2:]],
        "columns beside one another": [wide[:, :2], wide[:, 2:]],
        "an element and what is expanded from it": [row, row[2:3].expand(5)],
        "the same with other strides": [row.view(1, 4), row.as_strided((1, 4), (1, 1))],
    }


@pytest.mark.parametrize("case", overlapping())
@torch.no_grad()
def test_weights_over_some_of_the_same_memory_stay_over_it(case: str) -> None:
    # These keep the memory of before: what one change does there is the oracle.
    wanted = overlapping()[case]
    module = Overlapping(*wanted)
    mine = module.weight, module.other, module.last
    flat = FlatParameters(module)
    for act in (flat.check_views, flat.rebind, flat.release):
        wanted[0].mul_(2)
        module.weight.mul_(2)
        act()
        for tensor, expected in zip(mine, wanted, strict=False):
            assert torch.equal(tensor, expected)
        assert torch.equal(module.last, wanted[-1])


def test_conjugates_over_the_same_memory_are_refused_by_name() -> None:
    """One of them would take the values of the other."""
    wave = torch.randn(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"`weight` and `other` must not .*conjugates"):
        FlatParameters(Overlapping(wave, wave.conj(), torch.ones(1)))
    FlatParameters(module := Overlapping(wave, wave.conj().clone(), torch.ones(1)))
    assert torch.equal(module.other, wave.conj())


def test_negatives_over_the_same_memory_are_refused_by_name() -> None:
    """As the imaginary part of a conjugate is."""
    wave = torch.randn(2, dtype=torch.complex64)
    negative = wave.conj().imag
    with pytest.raises(ValueError, match=r"`weight` and `other` must not .*negatives"):
        FlatParameters(Overlapping(wave.imag, negative, torch.ones(1)))
    FlatParameters(module := Overlapping(wave.imag, negative.clone(), torch.ones(1)))
    assert torch.equal(module.other, -module.weight)


def test_weights_over_the_same_memory_take_it_once() -> None:
    wide = torch.randn(3, 4)
    flat = FlatParameters(Overlapping(wide, wide.T))
    assert flat.vectors[0].numel() == 12 + 3


def test_a_frozen_row_of_a_trained_weight_is_not_left_out() -> None:
    wide = torch.randn(3, 4)
    module = Overlapping(wide, wide[1], wide[1])
    module.other.requires_grad_(False)
    flat = FlatParameters(module, with_frozen=False)
    flat.vectors[0].fill_(7)
    assert module.other.tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("layer", "layout"),
    [(nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)],
)
def test_strides_of_channels_last_are_kept(
    layer: type[nn.Conv2d | nn.Conv3d], layout: torch.memory_format
) -> None:
    module = layer(3, 4, 2)
    weight = module.weight.detach().to(memory_format=layout)
    module.weight.data = weight.clone()
    flat = FlatParameters(module)
    assert module.weight.stride() == weight.stride() != weight.contiguous().stride()
    assert torch.equal(module.weight, weight)
    flat.vectors[0].zero_()
    assert not module.weight.any()


class Tied(Mixed):
    """Has one Parameter by two names, and two Parameters over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.alike = nn.Linear(3, 2), nn.Linear(3, 2)
        self.same.weight = self.single.weight
        self.alike.weight = nn.Parameter(self.single.weight.data)
        self.image = nn.Conv2d(3, 4, 2)
        filters = self.image.weight.detach().to(memory_format=torch.channels_last)
        self.image.weight.data = filters.clone()


def test_released_weights_have_storage_of_their_own_and_ties_as_before() -> None:
    module = Tied()
    flat = FlatParameters(module)
    before = {name: (p, p.stride()) for name, p in module.named_parameters()}
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.single.bias.data = torch.ones(2)  # has left the vector before
    values["single.bias"] = torch.ones(2)
    flat.release()
    assert before == {name: (p, p.stride()) for name, p in module.named_parameters()}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, values[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert module.same.weight is module.single.weight
    assert module.alike.weight.data_ptr() == module.single.weight.data_ptr()
    storages = {p.data_ptr() for p in module.parameters() if p.numel()}
    assert len(storages) == len([p for p in module.parameters() if p.numel()]) - 1
    assert flat.vectors == []
    flat.release()


def test_released_vectors_keep_no_module_and_no_frozen_weight() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    flat = FlatParameters(module, with_frozen=False)
    flat.release()
    found = [weakref.ref(one) for one in (module, module[1].weight)]
    del module
    gc.collect()
    assert [one() for one in found] == [None, None]
    flat.release()


def test_an_optimizer_of_before_moves_released_weights_which_may_be_flat_again() -> (
    None
):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    FlatParameters(module).release()
    flat = FlatParameters(module)
    expected = module.weight.detach() - 1
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight, expected)
    assert torch.equal(flat.vectors[0][:4].view(2, 2), expected)


def test_a_strided_parameter_becomes_dense_with_its_values() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(12.0).view(3, 4).T)
    flat = FlatParameters(module)
    assert torch.equal(module.weight, torch.arange(12.0).view(3, 4).T)
    assert flat.vectors[0].numel() == 12


def test_shards_cover_the_padded_vector_in_equal_parts() -> None:
    vector = FlatParameters(nn.Linear(3, 2), shards=3).vectors[0]
    assert vector.numel() == 9
    assert vector[8] == 0
    parts = vector.tensor_split(3)
    assert torch.equal(torch.cat(parts), vector)
    parts[1].fill_(5)
    assert vector[3:6].tolist() == [5.0] * 3


@pytest.mark.parametrize("first", ["optimizer", "vector"])
def test_an_optimizer_moves_the_vector_whichever_was_made_first(first: str) -> None:
    module = nn.Linear(1, 1, bias=False)
    if first == "optimizer":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        flat = FlatParameters(module)
    else:
        flat = FlatParameters(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    flat.vectors[0].fill_(1)
    module(torch.tensor([[4.0]])).sum().backward()
    optimizer.step()
    assert flat.vectors[0].tolist() == [1 - 0.5 * 4]


def test_a_lazy_module_is_refused_by_name() -> None:
    told = r"`0\.weight` has no shape yet.* `trainer\.fit` or `fabric\.setup`"
    with pytest.raises(ValueError, match=told):
        FlatParameters(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_sparse_buffer_is_refused_by_name_unless_ddp_is_to_ignore_it(
    persistent: bool,
) -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("edges", torch.eye(2).to_sparse(), persistent)
    with pytest.raises(ValueError, match=r"`edges` must be dense .*torch.sparse_coo"):
        FlatParameters(module)
    module._ddp_params_and_buffers_to_ignore = ["edges"]  # pyright: ignore
    flat = FlatParameters(module)
    flat.check_views()
    assert [len(vector) for vector in flat.vectors] == [2]
    flat.release()
    assert module.edges.is_sparse


def test_a_weight_of_8_bits_is_refused_by_name_unless_ddp_is_to_ignore_it() -> None:
    module = nn.Linear(2, 2)
    quantised = module.weight.detach().to(torch.float8_e4m3fn)
    module.weight = nn.Parameter(quantised, requires_grad=False)
    told = r"`weight` must have 16 bits or more to be averaged, got torch\.float8_e4m3f"
    with pytest.raises(ValueError, match=told):
        FlatParameters(module, with_frozen=False)
    module._ddp_params_and_buffers_to_ignore = ["weight"]  # pyright: ignore
    flat = FlatParameters(module)
    assert [len(vector) for vector in flat.vectors] == [2]
    assert [*flat.own_tensors()] == ["weight"]


def test_a_buffer_of_8_bits_that_no_checkpoint_holds_is_left_as_it_is() -> None:
    module = nn.Linear(2, 2)
    cache = torch.ones(3).to(torch.float8_e4m3fn)
    module.register_buffer("cache", cache, persistent=False)
    assert [len(vector) for vector in FlatParameters(module).vectors] == [6]
    assert module.cache is cache


def test_weights_on_two_devices_are_refused() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match=r"one device.*cpu.*meta"):
        FlatParameters(module)


def test_replaced_storage_is_found_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    flat = FlatParameters(module)
    flat.check_views()
    module[0].weight.data = torch.zeros(2, 2)
    told = r"`0\.weight` was given new storage.* `trainer\.fit` or `fabric\.setup`"
    with pytest.raises(RuntimeError, match=told):
        flat.check_views()


def test_values_in_replaced_storage_are_taken_into_the_vector() -> None:
    module = nn.Linear(2, 2, bias=False)
    flat = FlatParameters(module)
    module.weight.data = torch.full((2, 2), 7.0)
    flat.rebind()
    flat.check_views()
    assert flat.vectors[0].tolist() == [7.0] * 4
    assert torch.equal(module.weight, torch.full((2, 2), 7.0))


def test_a_replaced_parameter_is_found_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    flat = FlatParameters(module)
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match=r"`0\.weight`"):
        flat.check_views()


def test_an_added_parameter_is_found_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    flat = FlatParameters(module)
    module.append(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"`1\.weight` was added .*before `trainer"):
        flat.check_views()


@pytest.mark.parametrize("first", [None, torch.zeros(0)])
def test_a_buffer_that_was_nothing_at_set_up_is_to_have_its_final_shape(
    first: Tensor | None,
) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("history", first)
    flat = FlatParameters(module)
    flat.check_views()
    module.history = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"`history` .*\(3,\).*its final shape"):
        flat.check_views()


def test_a_buffer_that_no_checkpoint_holds_may_grow() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("history", torch.zeros(1), persistent=False)
    flat = FlatParameters(module)
    module.history = torch.ones(3)
    flat.rebind()
    flat.check_views()


def test_a_removed_parameter_is_found_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    flat = FlatParameters(module)
    del module[1]
    with pytest.raises(RuntimeError, match=r"`1\.weight` was removed"):
        flat.check_views()


def test_layouts_tell_models_apart() -> None:
    assert FlatParameters(nn.Linear(2, 3)).layout() == (
        FlatParameters(nn.Linear(2, 3)).layout()
    )
    assert FlatParameters(nn.Linear(2, 3)).layout() != (
        FlatParameters(nn.Linear(3, 2)).layout()
    )


def test_layouts_have_the_same_order_if_names_and_shapes_are_equal() -> None:
    ours = FlatParameters(nn.Linear(2, 3)).layout()
    assert same_order(FlatParameters(nn.Linear(2, 3).double()).layout(), ours)
    assert not same_order(FlatParameters(nn.Linear(3, 2)).layout(), ours)
    assert not same_order(FlatParameters(nn.Linear(2, 3, bias=False)).layout(), ours)


def test_a_module_without_weights_has_no_vector() -> None:
    flat = FlatParameters(nn.ReLU())
    assert flat.vectors == []


class Recurrent(nn.Module):
    """A recurrent module among others, and a smaller one."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.small = nn.GRU(3, 2)
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        self.after = nn.Linear(8, 2)


def test_weights_of_an_lstm_lie_as_cudnn_reads_them() -> None:
    module = Recurrent()
    lstm = module.lstm
    flat = FlatParameters(module)
    groups = lstm.all_weights  # of each layer and direction: two matrices, two biases
    wanted = [w for group in groups for w in group[:2]]
    wanted += [w for group in groups for w in group[2:]]
    place = flat.vectors[0].data_ptr()
    for weight in wanted:
        assert weight.data_ptr() == place
        assert weight.is_contiguous()
        place += weight.numel() * weight.element_size()
    assert wanted[0].storage_offset() == 0
    # What the forward uses are these, and not copies of theirs.
    assert [w.data_ptr() for w in lstm._flat_weights if w is not None] == [
        w.data_ptr() for group in groups for w in group
    ]


def test_an_lstm_computes_the_same_from_the_vector_and_learns_in_it() -> None:
    module = Recurrent()
    inputs = torch.randn(5, 2, 3)
    expected = module.lstm(inputs)[0]
    flat = FlatParameters(module)
    output = module.lstm(inputs)[0]
    assert torch.equal(output, expected)
    before = flat.vectors[0].clone()
    output.square().mean().backward()
    torch.optim.SGD(module.lstm.parameters(), 0.1).step()
    size = sum(w.numel() for w in module.lstm.parameters())
    assert bool((flat.vectors[0][:size] != before[:size]).any())
    assert torch.equal(flat.vectors[0][size:], before[size:])
    flat.check_views()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_cudnn_takes_the_weights_where_they_are() -> None:
    module = Recurrent().cuda()
    flat = FlatParameters(module)
    with warnings.catch_warnings():
        # "RNN module weights are not part of single contiguous chunk of memory"
        warnings.simplefilter("error")
        module.lstm(torch.randn(5, 2, 3, device="cuda"))[0].mean().backward()
    flat.check_views()


# --- weights that stay outside


@torch.no_grad()
def test_what_ddp_is_to_ignore_stays_outside_whatever_becomes_of_it() -> None:
    module = Masked(1.0)
    ignored = ["net.weight", "mean"]
    module._ddp_params_and_buffers_to_ignore = ignored  # pyright: ignore
    assert not {*averaged_buffers(module)} & {*ignored}
    flat = FlatParameters(module, with_frozen=False)
    assert flat.layout() == "net.bias:(2,):torch.float32;mask:(3, 3):torch.float32"
    flat.vectors[0].fill_(7.0)
    assert module.mean.tolist() == [1.0, 1.0]
    module.mean, module.net.weight.data = torch.ones(5), torch.ones(1, 2)
    flat.rebind()
    flat.check_views()
    assert len(module.mean) == 5


# --- weights that stay frozen


def test_frozen_weights_may_stay_out_of_the_vector() -> None:
    frozen, trained = nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)
    before = frozen.weight.data_ptr()
    flat = FlatParameters(nn.Sequential(frozen, trained), with_frozen=False)
    assert [len(vector) for vector in flat.vectors] == [3]
    assert flat.layout().startswith("1.weight:(1, 2):torch.float32;1.bias:")
    assert frozen.weight.data_ptr() == before
    flat.rebind()
    flat.check_views()


def test_a_frozen_weight_that_shares_memory_with_a_trained_one_stays_tied() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = nn.Parameter(one.weight.detach(), requires_grad=False)
    flat = FlatParameters(nn.Sequential(one, other), with_frozen=False)
    with torch.no_grad():
        flat.vectors[0].fill_(7)
    assert other.weight.tolist() == one.weight.tolist() == [[7.0] * 3] * 3


def test_a_weight_that_was_left_out_as_frozen_must_stay_frozen() -> None:
    frozen, trained = nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)
    flat = FlatParameters(nn.Sequential(frozen, trained), with_frozen=False)
    frozen.requires_grad_(True)
    for check in (flat.rebind, flat.check_views):
        with pytest.raises(RuntimeError, match=r"`0\.weight` was frozen at set-up"):
            check()


class Masked(nn.Module):
    """Constants without a mean beside what has one."""

    mask: Tensor
    mean: Tensor

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2, dtype=dtype)
        self.table = nn.Parameter(torch.tensor([value, 1.0]), requires_grad=False)
        mask = torch.triu(torch.full((3, 3), value, dtype=dtype), 1)
        self.register_buffer("mask", mask)
        self.register_buffer("mean", torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [-math.inf, math.inf, math.nan, torch.finfo(torch.float32).min],
)
def test_what_has_no_mean_stays_outside(value: float) -> None:
    """Such as the mask of `nn.Transformer.generate_square_subsequent_mask`."""
    module = Masked(value)
    mask = module.mask
    flat = FlatParameters(module)
    assert flat.without_mean == ["table", "mask"]
    assert flat.layout() == FlatParameters(Masked(value)).layout()
    assert [len(vector) for vector in flat.vectors] == [6 + 2]
    assert all_finite(flat.vectors)
    flat.rebind()
    flat.check_views()
    assert module.mask is mask
    module.table.requires_grad_(True)
    with pytest.raises(RuntimeError, match="its values have no mean"):
        flat.rebind()


def test_what_had_no_mean_when_the_training_began_stays_outside() -> None:
    flat = FlatParameters(Masked(1.0), kept_out=["mask", "gone", "net.weight"])
    assert flat.without_mean == ["mask"]
    assert "mask" not in flat.layout()
    assert [*flat.own_tensors()] == ["mask"]


def test_what_ddp_is_to_ignore_is_a_learners_own() -> None:
    masked: Any = Masked(1.0)
    masked._ddp_params_and_buffers_to_ignore = ["net.bias", "mask"]
    own = FlatParameters(masked).own_tensors()
    assert set(own) == {"net.bias", "mask"}
    own["net.bias"].fill_(7.0)
    assert masked.net.bias.tolist() == [7.0, 7.0]


def test_large_values_that_have_a_mean_are_averaged() -> None:
    assert FlatParameters(Masked(-1e30)).without_mean == []
    half = Masked(torch.finfo(torch.float16).min, torch.float16)
    assert FlatParameters(half).without_mean == []


def test_weights_that_are_trained_are_never_left_out() -> None:
    """They have diverged, which a mean must tell."""
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, math.nan)
    assert FlatParameters(module).without_mean == []


def test_a_buffer_that_is_assigned_anew_is_taken_into_the_vector() -> None:
    masked = Masked(1.0)
    flat = FlatParameters(nn.Sequential(masked))
    buffer = masked.mean
    weight = masked.net.weight.sum()
    masked.mean = 0.5 * masked.mean + weight  # with a graph of its own
    flat.rebind()
    assert masked.mean is buffer
    assert not buffer.requires_grad
    assert buffer.tolist() == pytest.approx([0.5 + weight.item()] * 2)
    flat.check_views()
    flat.vectors[0].fill_(3.0)
    assert buffer.tolist() == [3.0, 3.0]
    masked.mean = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"`0\.mean` of .*\[2\].*was given \(\[5\]"):
        flat.rebind()


class Scripted(nn.Module):
    """A layer for TorchScript that gives its buffer's place to another tensor."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))

    @override
    def forward(self, rows: Tensor) -> Tensor:
        self.mean = self.mean + rows.mean(0)
        return self.norm(rows)


# torch no longer develops TorchScript, and models that need it live on.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_module_of_torchscript_keeps_its_weights_and_buffers_in_the_vector() -> None:
    scripted: Any = torch.jit.script(Scripted())
    flat = FlatParameters(nn.Sequential(scripted))
    scripted(torch.full((3, 2), 2.0))
    flat.rebind()
    flat.check_views()
    flat.vectors[0].fill_(5.0)
    tensors = scripted.mean, scripted.norm.running_mean, scripted.norm.weight
    assert [tensor.tolist() for tensor in tensors] == [[5.0, 5.0]] * 3
    scripted(torch.full((3, 2), 2.0))
    flat.rebind()
    assert scripted.mean.tolist() == [7.0, 7.0]
    assert (flat.vectors[0] == 7.0).sum() == 2


def test_where_all_is_frozen_nothing_can_be_left_out() -> None:
    with pytest.raises(ValueError, match="all weights are frozen"):
        FlatParameters(nn.Linear(3, 2).requires_grad_(False), with_frozen=False)


def test_a_buffer_that_is_assigned_on_another_device_is_named() -> None:
    masked = Masked(1.0)
    flat = FlatParameters(nn.Sequential(masked))
    masked.mean = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match=r"`0\.mean` of .*'cpu'.*given .*'meta'"):
        flat.rebind()
