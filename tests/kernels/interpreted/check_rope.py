"""Run by test_interpreter.py, with TRITON_INTERPRET=1: kernels of `rope` that are wrong in one place must be caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memwall.triton_kernels._rope_kernel as kernel_module
from memwall.triton_kernels import rope

SOURCE = Path(kernel_module.__file__)


def check(operation: Any, interleaved: bool) -> None:
    torch.manual_seed(0)
    angles = torch.randn(3, 5)
    cos, sin = angles.cos(), angles.sin()

    def plain(x: Tensor) -> Tensor:
        first, second = (x[..., :10:2], x[..., 1:10:2]) if interleaved else (x[..., :5], x[..., 5:10])
        turned = first * cos - second * sin, second * cos + first * sin
        rotary = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return torch.cat((rotary, x[..., 10:]), -1)

    operation(lambda x: rope(x, cos, sin, interleaved=interleaved), plain).check(torch.randn(2, 4, 3, 17))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_as_it_is_passes(operation: Any, interleaved: bool, poisoned: None) -> None:
    check(operation, interleaved)


@pytest.mark.parametrize(
    ("interleaved", "old", "new"),
    [
        (False, "tl.float32)[None, :] * sin_sign", "tl.float32)[None, :]"),
        (False, "result_column_stride, first * cos - second", "result_column_stride, first * cos + second"),
        (False, "store_rounded(others, second * cos + first", "store_rounded(others, second * cos - first"),
        (True, "tl.join(first * cos - second * sin", "tl.join(first * cos + second * sin"),
        (True, "second * cos + first * sin)\n        results", "first * cos + second * sin)\n        results"),
        (False, "(2 * num_pairs + tl.arange(0, REST))", "(num_pairs + tl.arange(0, REST))"),
        (False, "batch * cos_batch_stride + token", "batch * cos_batch_stride + 0 * token"),
        (False, "token = position - batch * num_tokens", "token = position * 0"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(
    operation: Any,
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    interleaved: bool,
    old: str,
    new: str,
    poisoned: None,
) -> None:
    monkeypatch.setattr(kernel_module, "launch_rope", mutant(SOURCE, old, new).launch_rope)
    with pytest.raises(AssertionError):
        check(operation, interleaved)
