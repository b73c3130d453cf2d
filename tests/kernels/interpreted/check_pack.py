"""Run by test_interpreter.py, with TRITON_INTERPRET=1: kernels of packing with one thing wrong must be caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from memwall.triton_kernels.pack import _kernel as kernel_module
from memwall.triton_kernels.pack import pack
from memwall.triton_kernels.pack._reference import reference_pack, reference_unpack

SOURCE = Path(kernel_module.__file__)


def check(module: Any) -> None:
    torch.manual_seed(0)
    for form in ("int8", "fp8"):
        # Odd numbers from 17 to 31 lie in the middle between two of e4m3, where the unit is 1.
        halves = torch.cat((torch.arange(1.0, 128.0), torch.tensor([448.0])))
        for flat in (torch.randn(3000) ** 5, torch.randn(1320), halves):
            flat[3], flat[-20:] = float("inf"), 1e-3 * flat[-20:]
            num_blocks = -(-flat.numel() // 128)
            dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn
            found, expected = ((torch.empty(flat.numel(), dtype=dtype), torch.empty(num_blocks)) for _ in range(2))
            module.launch_pack(flat, *found)
            reference_pack(flat, *expected)
            assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
            assert torch.equal(found[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0))
            ours, theirs = torch.empty(flat.numel()), torch.empty(flat.numel())
            module.launch_unpack(*expected, ours)
            reference_unpack(*expected, theirs)
            assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))


def test_the_kernels_as_they_are_give_the_bits_of_the_reference(poisoned: None) -> None:
    check(kernel_module)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x7FFFF + ((magnitude >> 20) & 1)", "0x80000"),
        ("magnitude < 0x3C800000", "magnitude < 0x3B800000"),
        ("| ((bits >> 24) & 0x80)", ""),
        ("magnitude < 8,", "magnitude < 4,"),
        ("codes >= 0x80, -values, values", "codes > 0x80, values, values"),
        ("num_bad > 0", "num_bad > 1"),
        ("blocks = begin // _UNIT + lanes\n    tl.store", "blocks = lanes\n    tl.store"),
        ("tl.where(is_finite, tl.abs(values), 0.0)", "tl.where(is_finite, values, 0.0)"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(mutant: Callable[..., Any], old: str, new: str, poisoned: None) -> None:
    with pytest.raises(AssertionError):
        check(mutant(SOURCE, old, new))


def test_a_kernel_that_writes_its_input_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(
        SOURCE, "tl.store(codes_ptr + elements, nearest_integers", "tl.store(x_ptr + elements, nearest_integers"
    )
    tensor = torch.randn(40)
    before = tensor.clone()
    pack(tensor)
    assert torch.equal(tensor, before)
    monkeypatch.setattr(kernel_module, "launch_pack", wrong.launch_pack)
    pack(tensor)
    assert not torch.equal(tensor, before)


@triton.jit
def _cast_kernel(source_ptr, result_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(result_ptr + lanes, tl.load(source_ptr + lanes).to(tl.float8e4nv))


def test_casts_to_fp8_are_still_wrong() -> None:
    """A canary: when this fails, a newer Triton was repaired; where the devices have e4m3fn a plain cast would do."""
    torch.manual_seed(0)
    values, result = torch.randn(4096), torch.zeros(4096, dtype=torch.float8_e4m3fn)
    _cast_kernel[(1,)](values, result, BLOCK=4096)
    assert not torch.equal(result.view(torch.uint8), values.to(torch.float8_e4m3fn).view(torch.uint8))
