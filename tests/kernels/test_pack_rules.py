"""Packing: what needs no kernel: mistakes, empty tensors, and that a block knows of no other."""

import pytest
import torch
from packing_error import unpacked

from memwall.errors import UsageError
from memwall.triton_kernels.pack import BLOCK_ELEMENTS, pack, pack_into, unpack_into


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_tensors_and_scalars(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    found = unpacked(pack(tensor), tensor)
    assert found.shape == shape
    torch.testing.assert_close(found, tensor, rtol=1e-6, atol=0.0)


def test_no_gradient_is_kept() -> None:
    assert not pack(torch.randn(5, 40, requires_grad=True)).units.requires_grad


def test_memory_that_does_not_fit_is_named() -> None:
    tensor = torch.zeros(300)
    packed = pack(tensor)
    wrong = {
        r"300 elements .* 300 codes|found torch\.float64": (tensor.double(), packed),
        r"299 elements .* found .*torch\.int8 \[300\]": (tensor[:299], packed),
        r"with strides \[2\]": (torch.zeros(600)[::2], packed),
        r"3 float32 units, found .* and torch\.float32 \[2\]": (tensor, packed._replace(units=packed.units[:2])),
        r"and torch\.float64 \[3\]": (tensor, packed._replace(units=packed.units.double())),
        r"torch\.int16 \[300\]": (tensor, packed._replace(codes=packed.codes.short())),
    }
    for message, (given, memory) in wrong.items():
        with pytest.raises(UsageError, match=message):
            pack_into(given, memory)
        with pytest.raises(UsageError, match=message):
            unpack_into(memory, given)


@pytest.mark.parametrize("bad_element", [None, 100_000])
def test_large_tensors_are_packed_as_their_parts_are(bad_element: int | None) -> None:
    """However many elements are worked on at a time: a block knows of no other."""
    tensor = torch.randn(150_001)
    if bad_element is not None:
        tensor[bad_element] = torch.nan
    whole = pack(tensor)
    for part in range(0, tensor.numel(), 37 * BLOCK_ELEMENTS):
        alone = pack(tensor[part : part + 37 * BLOCK_ELEMENTS])
        blocks = slice(part // BLOCK_ELEMENTS, part // BLOCK_ELEMENTS + alone.units.numel())
        assert torch.equal(
            whole.codes[part : part + alone.codes.numel()].view(torch.int8), alone.codes.view(torch.int8)
        )
        assert torch.equal(whole.units[blocks].nan_to_num(-1.0), alone.units.nan_to_num(-1.0))
