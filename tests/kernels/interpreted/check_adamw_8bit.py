"""Run by test_interpreter.py, with TRITON_INTERPRET=1: the kernel gives the CPU path's bits, and no others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.triton_kernels.adamw_8bit import _kernel as kernel_module
from memwall.triton_kernels.adamw_8bit import adamw_8bit_, new_moments
from memwall.triton_kernels.adamw_8bit._kernel import launch_adamw_8bit
from memwall.triton_kernels.adamw_8bit._reference import reference_adamw_8bit
from memwall.triton_kernels.adamw_8bit._terms import Moments, Scalars

SOURCE = Path(kernel_module.__file__)
Arguments = tuple[Tensor, Tensor, Moments, Scalars]


def arguments(dtype: torch.dtype, grad_dtype: torch.dtype, num_elements: int) -> Arguments:
    """Of a step from state that two steps have left, with values of many sizes, zeros, infinity and NaN."""
    torch.manual_seed(0)
    param = torch.randn(num_elements).to(dtype)
    moments = new_moments(param)
    for step in range(3):
        grad = (torch.randn(num_elements) ** 5).to(grad_dtype)
        grad[::9] = 0.0
        scalars = Scalars(0.99, 0.1, 0.999, 0.001, 0.01, 3.0 / (step + 1), 1e-8)
        if step < 2:
            reference_adamw_8bit(param, grad, moments, scalars)
    if num_elements > 1000:
        grad[900], grad[20] = torch.nan, torch.inf
    return param, grad, moments, scalars


def assert_same_bits(launch: Callable[..., None], found: Arguments) -> None:
    """Of parameter and moments, by the kernel and by the reference."""
    param, grad, moments, scalars = found
    results = []
    for run in (launch, reference_adamw_8bit):
        own = param.clone(), Moments(*(part.clone() for part in moments))
        run(own[0], grad, own[1], scalars)
        results.append((own[0], *own[1]))
    for name, mine, theirs in zip(("param", *Moments._fields), *results, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan()), name
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num()), name


@pytest.mark.parametrize("num_elements", [1, 255, 4096, 4097, 16_400])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_bits_are_those_of_the_reference(num_elements: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    assert_same_bits(launch_adamw_8bit, arguments(dtype, grad_dtype, num_elements))


def test_the_operation_launches_it(launches: list[str], poisoned: None) -> None:
    torch.manual_seed(0)
    param, grad = torch.randn(64, 65).bfloat16(), torch.randn(64, 65).bfloat16()
    moments = new_moments(param)
    adamw_8bit_(param, grad, moments, step=1)
    assert launches == ["launch_adamw_8bit"]
    assert param.isfinite().all()
    assert all(units.isfinite().all() for units in moments[2:])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("param * decay", "param"),
        ("first + (grad - first)", "first + (grad + first)"),
        ("+ grad * grad * second_share", "- grad * grad * second_share"),
        ("root * root_factor + eps", "root * root_factor"),
        ("root = tl.sqrt_rn(second)", "root = second"),
        ("codes < _ROOT_CEILING", "codes < 0.0"),
        ('tl.where(num_bad > 0, float("nan"), units)', "units"),
        ("blocks = begin // _UNIT + lanes", "blocks = lanes"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(mutant: Callable[..., Any], old: str, new: str) -> None:
    wrong = mutant(SOURCE, old, new)
    with pytest.raises(AssertionError):
        assert_same_bits(wrong.launch_adamw_8bit, arguments(torch.bfloat16, torch.bfloat16, 16_400))
