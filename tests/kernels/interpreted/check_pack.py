"""Run by test_interpreter.py, with TRITON_INTERPRET=1: kernels of packing with one thing wrong must be caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall.triton_kernels.pack import _kernel as kernel_module
from memwall.triton_kernels.pack import pack
from memwall.triton_kernels.pack._reference import reference_pack, reference_unpack

SOURCE = Path(kernel_module.__file__)


def check(module: Any) -> None:
    torch.manual_seed(0)
    for flat in (torch.randn(3000) ** 5, torch.randn(1320)):
        flat[3], flat[-20:] = float("inf"), 1e-3 * flat[-20:]
        num_blocks = -(-flat.numel() // 128)
        found, expected = ((torch.empty(flat.numel(), dtype=torch.int8), torch.empty(num_blocks)) for _ in range(2))
        module.launch_pack(flat, *found)
        reference_pack(flat, *expected)
        assert torch.equal(found[0], expected[0])
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
