"""Canaries: what is wrong in Triton's interpreter, and why the kernels are written as they are.

When one of these fails, a newer Triton was repaired: relax the rule it stands for (_store.py, test_rules.py).
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(source_ptr, result_ptr, BLOCK: tl.constexpr):
    values = tl.load(source_ptr + tl.arange(0, BLOCK))
    tl.store(result_ptr, tl.sum(values, 0).to(tl.float32))


@triton.jit
def _cast_kernel(source_ptr, result_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(result_ptr + lanes, tl.load(source_ptr + lanes).to(tl.bfloat16))


def test_sums_in_bf16_are_still_wrong() -> None:
    torch.manual_seed(0)
    values, result = torch.randn(256).bfloat16(), torch.zeros(1)
    _sum_kernel[(1,)](values, result, BLOCK=256)
    assert not (abs(result.item() - values.float().sum().item()) < 1.0)


def test_casts_to_bf16_still_truncate() -> None:
    torch.manual_seed(0)
    values, result = torch.randn(1024), torch.zeros(1024, dtype=torch.bfloat16)
    _cast_kernel[(1,)](values, result, BLOCK=1024)
    wrong = (result != values.bfloat16()).float().mean().item()
    assert 0.3 < wrong < 0.7
