"""The first call of a vector function, made by one thread.

torch hands contiguous float tensors to the vector functions of MKL, each thread its part. MKL chooses the code of a
function at its first call, and where several threads make that at once, one of them may run code of fewer digits, for
this call alone: https://github.com/pytorch/pytorch/issues/188792. The square roots of a first `AdamW.step()` are such a
call. A training run would then differ from itself.
"""

import torch

FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)
"""All that ATen/cpu/vml.h passes on to MKL."""


@torch.no_grad()
def settle_first_calls() -> None:
    """Calls each function on one number of each dtype that MKL computes, which no second thread takes part in."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            function(one)
