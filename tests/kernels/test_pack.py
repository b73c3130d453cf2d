"""Packing: the reference here, the kernels where test_interpreter.py runs this. Both give the same bits."""

from typing import Any

import pytest
import torch
from packing_error import error_bound, unpacked
from torch import Tensor

from memwall.triton_kernels.pack import BLOCK_ELEMENTS, Packed, pack, pack_into, unpack_into
from memwall.triton_kernels.pack._reference import reference_pack, reference_unpack

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["int8", "fp8"]

pytestmark = pytest.mark.usefixtures("launches")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_packs(tensor: Tensor, form: Any) -> None:
    """The reference's bits, and no error above the bound plus half a step of the tensor's own dtype."""
    packed = pack(tensor, form)
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
        assert bool((error <= error_bound(tensor, form) + rounding).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 127, 128, 129, 2048, 5000])
def test_error_is_within_the_bound(form: str, dtype: torch.dtype, num_elements: int, poisoned: None) -> None:
    torch.manual_seed(0)
    assert_packs(torch.randn(num_elements).to(dtype), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [-140, -126, -100, -20, 0, 20, 100, 127])
def test_sizes_of_every_kind(form: str, power: int, poisoned: None) -> None:
    torch.manual_seed(0)
    assert_packs((torch.randn(3, 200).clamp(-1.9, 1.9).double() * 2.0**power).float(), form)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_equal_values_are_exact(form: str) -> None:
    for value in (0.0, 3.0, -0.7):
        tensor = torch.full((300,), value)
        torch.testing.assert_close(unpacked(pack(tensor, form), tensor), tensor, rtol=1e-6, atol=0.0)


def test_every_code_of_fp8_comes_back() -> None:
    """All finite bit patterns of e4m3, in blocks whose unit is 1."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(torch.float8_e4m3fn).float()
    blocks = torch.cat([torch.cat((part, torch.tensor([448.0]))) for part in values.split(127)])
    blocks = torch.nn.functional.pad(blocks, (0, -blocks.numel() % BLOCK_ELEMENTS))
    blocks[-1] = 448.0
    packed = pack(blocks, "fp8")
    assert torch.equal(packed.units, torch.ones_like(packed.units))
    assert same_bits(unpacked(packed, blocks), blocks)


def test_halves_are_rounded_to_even_as_torch_does() -> None:
    """Between all neighbours of e4m3, a hair to either side, and in the middle."""
    codes = torch.arange(0, 0x7E, dtype=torch.uint8)
    low, high = codes.view(torch.float8_e4m3fn).double(), (codes + 1).view(torch.float8_e4m3fn).double()
    for middle in ((low + high) / 2, (low + high) / 2 * (1 + 2.0**-20), (low + high) / 2 * (1 - 2.0**-20)):
        block = torch.cat((middle.float(), torch.tensor([448.0, -448.0])))
        assert same_bits(pack(block, "fp8").codes[:-2], block[:-2].to(torch.float8_e4m3fn))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_value_that_is_not_finite_is_nan(form: str, bad: float) -> None:
    tensor = torch.randn(4 * 128)
    tensor[140] = bad
    assert_packs(tensor, form)
    assert unpacked(pack(tensor, form), tensor).isnan().nonzero().squeeze(1).tolist() == list(range(128, 256))


@pytest.mark.parametrize("form", FORMS)
def test_an_outlier_costs_its_own_block_only(form: str) -> None:
    tensor = torch.randn(3 * 128)
    alone = unpacked(pack(tensor, form), tensor)
    tensor[200] = 1e6
    found = unpacked(pack(tensor, form), tensor)
    assert torch.equal(found[:128], alone[:128])
    assert torch.equal(found[256:], alone[256:])


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_never_written(form: str) -> None:
    tensor = torch.randn(5, 40)
    packed = pack(tensor, form)
    tensors = (tensor, packed.codes, packed.units)
    before = [(t._version, t.clone()) for t in tensors]
    pack(tensor, form)
    unpacked(packed, tensor)
    for t, (version, copy) in zip(tensors, before, strict=True):
        assert t._version == version
        assert same_bits(t, copy)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 128, 5000])
def test_memory_that_is_there_already_gets_the_same_bits(form: Any, dtype: torch.dtype, num_elements: int) -> None:
    tensor = torch.randn(num_elements).to(dtype)
    expected = pack(tensor, form)
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


@pytest.mark.parametrize("form", FORMS)
def test_what_a_layer_saves_can_be_packed(form: Any) -> None:
    """Gradients of a linear layer whose input was packed between forward and backward."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(256, 16), torch.randn(32, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: pack(t, form) if t.shape == x.shape else t, lambda t: t if isinstance(t, Tensor) else unpacked(t, x)
    ):
        loss = layer(x).square().sum()
    (found,) = torch.autograd.grad(loss, layer.weight)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    error = float((found - expected).norm() / expected.norm())
    assert 0.0 < error < {"int8": 0.02, "fp8": 0.05}[form]
