"""Packing: the reference here, the kernels where test_interpreter.py runs this. Both give the same bits."""

import pytest
import torch
from packing_error import error_bound, unpacked
from torch import Tensor

from memwall.triton_kernels.pack import Packed, pack, pack_into, unpack_into
from memwall.triton_kernels.pack._reference import reference_pack, reference_unpack

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("launches")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_packs(tensor: Tensor) -> None:
    """The reference's bits, and no error above the bound plus half a step of the tensor's own dtype."""
    packed = pack(tensor)
    codes, units = torch.empty_like(packed.codes), torch.empty_like(packed.units)
    reference_pack(tensor.view(-1), codes, units)
    assert same_bits(packed.codes, codes)
    assert torch.equal(packed.units.nan_to_num(-1.0), units.nan_to_num(-1.0))
    found, expected = unpacked(packed, tensor), torch.empty(tensor.numel(), dtype=tensor.dtype)
    reference_unpack(codes, units, expected)
    assert torch.equal(found.flatten().nan_to_num(-1.0), expected.nan_to_num(-1.0))
    if tensor.isfinite().all():
        rounding = found.double().abs() * torch.finfo(tensor.dtype).eps / 2 + torch.finfo(tensor.dtype).tiny
        error = (found.double() - tensor.double()).abs()
        assert bool((error <= error_bound(tensor) + rounding).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 127, 128, 129, 2048, 5000])
def test_error_is_within_the_bound(dtype: torch.dtype, num_elements: int, poisoned: None) -> None:
    torch.manual_seed(0)
    assert_packs(torch.randn(num_elements).to(dtype))


@pytest.mark.parametrize("power", [-140, -126, -100, -20, 0, 20, 100, 127])
def test_sizes_of_every_kind(power: int, poisoned: None) -> None:
    torch.manual_seed(0)
    assert_packs((torch.randn(3, 200).clamp(-1.9, 1.9).double() * 2.0**power).float())


def test_zeros_and_equal_values_are_exact() -> None:
    for value in (0.0, 3.0, -0.7):
        tensor = torch.full((300,), value)
        torch.testing.assert_close(unpacked(pack(tensor), tensor), tensor, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_value_that_is_not_finite_is_nan(bad: float) -> None:
    tensor = torch.randn(4 * 128)
    tensor[140] = bad
    assert_packs(tensor)
    assert unpacked(pack(tensor), tensor).isnan().nonzero().squeeze(1).tolist() == list(range(128, 256))


def test_an_outlier_costs_its_own_block_only() -> None:
    tensor = torch.randn(3 * 128)
    alone = unpacked(pack(tensor), tensor)
    tensor[200] = 1e6
    found = unpacked(pack(tensor), tensor)
    assert torch.equal(found[:128], alone[:128])
    assert torch.equal(found[256:], alone[256:])


def test_inputs_are_never_written() -> None:
    tensor = torch.randn(5, 40)
    packed = pack(tensor)
    tensors = (tensor, packed.codes, packed.units)
    before = [(t._version, t.clone()) for t in tensors]
    pack(tensor)
    unpacked(packed, tensor)
    for t, (version, copy) in zip(tensors, before, strict=True):
        assert t._version == version
        assert same_bits(t, copy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 128, 5000])
def test_memory_that_is_there_already_gets_the_same_bits(dtype: torch.dtype, num_elements: int) -> None:
    tensor = torch.randn(num_elements).to(dtype)
    expected = pack(tensor)
    codes = torch.full_like(expected.codes.view(torch.uint8), 0x7F).view(expected.codes.dtype)
    packed = Packed(codes, torch.full_like(expected.units, torch.nan))
    result = torch.full_like(tensor, torch.nan)
    pack_into(tensor, packed)
    unpack_into(packed, result)
    assert same_bits(packed.codes, expected.codes)
    assert same_bits(packed.units, expected.units)
    assert same_bits(result, unpacked(expected, tensor))
    assert packed.is_finite
    tensor[num_elements // 2] = torch.inf
    pack_into(tensor, packed)
    assert not packed.is_finite


def test_what_a_layer_saves_can_be_packed() -> None:
    """Gradients of a linear layer whose input was packed between forward and backward."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(256, 16), torch.randn(32, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: pack(t) if t.shape == x.shape else t, lambda t: t if isinstance(t, Tensor) else unpacked(t, x)
    ):
        loss = layer(x).square().sum()
    (found,) = torch.autograd.grad(loss, layer.weight)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    error = float((found - expected).norm() / expected.norm())
    assert 0.0 < error < 0.02
