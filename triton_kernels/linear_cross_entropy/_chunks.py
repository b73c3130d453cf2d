"""The loop of `linear_cross_entropy` over chunks of rows: library GEMMs around the loss of each row.

One slab holds the logits of one chunk, then their gradient; the next chunk overwrites it. It is freed on return.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import half_for, on_device
from .._rows import compute_dtype
from ._reference import Rows
from ._terms import LossTerms

# Rows of the slab start at multiples of this many elements: one 128-byte line of a 16-bit dtype.
ROW_ALIGNMENT = 64
# Columns of the head that the CPU widens at a time: it has no GEMM of 16-bit inputs into fp32.
_CPU_COLUMNS = 8192


class LossCall(NamedTuple):
    """Holds the arguments of the operators, in their order."""

    x: Tensor
    w: Tensor
    target: Tensor
    bias: Tensor | None
    ignore_index: int
    label_smoothing: float
    softcap: float
    logit_scale: float
    chunk_rows: int
    want_x: bool
    want_w: bool
    want_bias: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns what autograd may save."""
        return (self.x, self.w, self.target, self.bias)

    @property
    def terms(self) -> LossTerms:
        """Returns what a row's loss consists of."""
        return LossTerms(self.ignore_index, self.label_smoothing, self.softcap, self.logit_scale)

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        """Tells whether a gradient is wanted for input, weight and bias."""
        return (self.want_x, self.want_w, self.want_bias)


class Gradients(NamedTuple):
    """Holds gradients of input, weight and bias; an empty tensor where none is wanted."""

    x: Tensor
    w: Tensor
    bias: Tensor


def weight_gradient_dtype(call: LossCall) -> torch.dtype:
    """Returns what the head's gradient is added up in: fp32, unless one chunk of bf16 has nothing to add up.

    In fp16 a single chunk needs fp32 as well: a sum over rows, not yet divided by their number, exceeds 65,504.
    """
    dtype = call.w.dtype
    is_narrow = dtype == torch.float16 or (dtype == torch.bfloat16 and call.x.shape[0] > call.chunk_rows)
    return torch.float32 if is_narrow else dtype


def empty_gradients(call: LossCall) -> Gradients:
    """Returns room for the wanted gradients."""
    x, w, dtype = call.x, call.w, weight_gradient_dtype(call)
    return Gradients(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if call.want_x else x.new_empty(0),
        torch.empty(w.shape, dtype=dtype, device=w.device) if call.want_w else w.new_empty(0, dtype=dtype),
        x.new_empty(w.shape[0] if call.want_bias else 0, dtype=compute_dtype(x.dtype)),
    )


def chunked_loss(call: LossCall, coefficient: Tensor, rows: Tensor | None, gradients: Gradients) -> Tensor:
    """Returns the loss of every row of `x @ w.T`, 0 where ignored, and fills in gradients of its sum.

    Args:
        call: what the loss is taken of, and in which chunks.
        coefficient: [M], factor of each row's loss.
        rows: int64, the rows to look at, distinct; the others count as ignored. None is all of them.
        gradients: tensors to fill; empty ones are skipped.
    """
    x, w, target, bias = call.tensors
    chunk_rows, terms = call.chunk_rows, call.terms
    num_rows, num_columns = x.shape[0], w.shape[0]
    writes_gradient = any(gradient.numel() > 0 for gradient in gradients)
    # Zero, and NaN where the coefficient is: also of rows that are not among `rows`.
    found = coefficient.to(compute_dtype(x.dtype)) * 0.0
    if rows is not None:
        gradients.x.zero_()
    num_used = num_rows if rows is None else rows.shape[0]
    if num_used == 0:
        gradients.w.zero_()
        gradients.bias.zero_()
        return found
    w = _matrix(w)
    row_loss = half_for(x, __package__, "row_loss")
    stride = -(-num_columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    slab = x.new_empty(min(chunk_rows, num_used), stride)
    # oneDNN's products in bfloat16 read what lies between the rows, and a NaN there is one in the gradient.
    slab[:, num_columns:].zero_()
    with on_device(x):
        for begin in range(0, num_used, chunk_rows):
            end = min(begin + chunk_rows, num_used)
            part = slice(begin, end) if rows is None else rows[begin:end]
            x_part, logits = x[part], slab[: end - begin, :num_columns]
            if bias is None:
                torch.mm(x_part, w.t(), out=logits)
            else:
                torch.addmm(bias, x_part, w.t(), out=logits)
            # Copies where rows are gathered, views of the results where not.
            found_part = Rows(logits, target[part].contiguous(), coefficient[part], found[part])
            row_loss(found_part, terms, writes_gradient=writes_gradient)
            if rows is not None:
                found.index_copy_(0, rows[begin:end], found_part.loss)
            if gradients.x.numel() > 0:
                if rows is None:
                    torch.mm(logits, w, out=gradients.x[part])
                else:
                    gradients.x.index_copy_(0, rows[begin:end], logits @ w)
            _add_to_head(gradients, logits, x_part, is_first=begin == 0)
    return found


def _matrix(w: Tensor) -> Tensor:
    """Returns `w` as GEMMs take it, row- or column-major; another layout is copied once here, not once per chunk."""
    rows, columns = w.shape
    is_row_major = w.stride(1) == 1 and w.stride(0) >= columns
    is_column_major = w.stride(0) == 1 and w.stride(1) >= rows
    return w if is_row_major or is_column_major else w.contiguous()


def _add_to_head(gradients: Gradients, dlogits: Tensor, x: Tensor, *, is_first: bool) -> None:
    """Adds one chunk to the gradients of weight and bias; the first chunk overwrites."""
    if gradients.bias.numel() > 0:
        total = dlogits.sum(0, dtype=gradients.bias.dtype)
        gradients.bias.copy_(total if is_first else gradients.bias + total)
    w = gradients.w
    if w.numel() == 0:
        return
    if w.dtype == x.dtype:
        if is_first:
            torch.mm(dlogits.t(), x, out=w)
        else:
            torch.addmm(w, dlogits.t(), x, out=w)
    elif x.device.type == "cpu":
        wide = x.to(w.dtype)
        for begin in range(0, w.shape[0], _CPU_COLUMNS):
            part = slice(begin, begin + _CPU_COLUMNS)
            torch.addmm(w[part], dlogits[:, part].t().to(w.dtype), wide, beta=0 if is_first else 1, out=w[part])
    elif is_first:
        torch.mm(dlogits.t(), x, out_dtype=w.dtype, out=w)
    else:
        torch.addmm(w, dlogits.t(), x, out_dtype=w.dtype, out=w)
