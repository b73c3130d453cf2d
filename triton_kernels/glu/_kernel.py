"""The Triton half of `glu`: the product of an activated gate and a linear branch, and its gradients. Needs triton.

One program computes one block of one row, in fp32, and rounds each result once. Contiguous tensors are one long row.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._configs import glu_launch
from .._launch import is_interpreting, on_device, warp_size
from .._store import store_rounded


@triton.jit
def _sigmoids(x) -> tuple[tl.tensor, tl.tensor]:
    """Returns the sigmoid of x and of -x, both exact to fp32 in either tail: no difference from 1, no overflow."""
    e = tl.exp2(tl.abs(x) * -1.4426950408889634)
    larger = 1.0 / (1.0 + e)
    smaller = e * larger
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def _share(gate, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns the factor that activates the gate, and the derivative of that."""
    if KIND == "silu":
        share, rest = _sigmoids(gate)
        slope = share * rest
    elif KIND == "gelu_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z): without libdevice, which has no interpreter.
        square = gate * gate
        share, rest = _sigmoids(1.5957691216057308 * (gate + 0.044715 * square * gate))
        slope = share * rest * (1.5957691216057308 * (1.0 + 3.0 * 0.044715 * square))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp2(gate * gate * -0.7213475204444817)
    return share, slope


@triton.jit
def glu_kernel(
    gate_ptr,
    up_ptr,
    product_ptr,
    num_columns,
    num_blocks,
    gate_row_stride,
    gate_column_stride,
    up_row_stride,
    up_column_stride,
    product_row_stride,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes activation(gate) * up."""
    program = tl.program_id(0).to(tl.int64)
    row = program // num_blocks
    columns = (program - row * num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    gate_ptrs = gate_ptr + row * gate_row_stride + columns * gate_column_stride
    up_ptrs = up_ptr + row * up_row_stride + columns * up_column_stride
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    share, _ = _share(gate, KIND)
    product = gate * share * up
    store_rounded(product_ptr + row * product_row_stride + columns, product, mask, INTERPRETED)


@triton.jit
def glu_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    num_columns,
    num_blocks,
    grad_row_stride,
    grad_column_stride,
    gate_row_stride,
    gate_column_stride,
    up_row_stride,
    up_column_stride,
    result_row_stride,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes gradients of gate and up for the gradient of the product."""
    program = tl.program_id(0).to(tl.int64)
    row = program // num_blocks
    columns = (program - row * num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    grad_ptrs = grad_ptr + row * grad_row_stride + columns * grad_column_stride
    gate_ptrs = gate_ptr + row * gate_row_stride + columns * gate_column_stride
    up_ptrs = up_ptr + row * up_row_stride + columns * up_column_stride
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    share, slope = _share(gate, KIND)
    grad_gate = grad * up * (share + gate * slope)
    results = row * result_row_stride + columns
    store_rounded(grad_gate_ptr + results, grad_gate, mask, INTERPRETED)
    store_rounded(grad_up_ptr + results, grad * (gate * share), mask, INTERPRETED)


def launch_glu(gate: Tensor, up: Tensor, product: Tensor, kind: str) -> None:
    """Fills `product`; all [rows, columns], the columns of `product` without gaps."""
    gate, up, product = _flat(gate, up, product)
    launch = glu_launch(warp_size(gate))
    num_rows, num_columns = gate.shape
    num_blocks = triton.cdiv(num_columns, launch.block)
    with on_device(gate):
        glu_kernel[(num_rows * num_blocks,)](
            gate,
            up,
            product,
            num_columns,
            num_blocks,
            *gate.stride(),
            *up.stride(),
            product.stride(0),
            KIND=kind,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )


def launch_glu_backward(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, kind: str) -> None:
    """Fills `grad_gate` and `grad_up`; all [rows, columns], these two alike and without gaps between columns."""
    grad, gate, up, grad_gate, grad_up = _flat(grad, gate, up, grad_gate, grad_up)
    launch = glu_launch(warp_size(gate))
    num_rows, num_columns = gate.shape
    num_blocks = triton.cdiv(num_columns, launch.block)
    with on_device(gate):
        glu_backward_kernel[(num_rows * num_blocks,)](
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            num_columns,
            num_blocks,
            *grad.stride(),
            *gate.stride(),
            *up.stride(),
            grad_gate.stride(0),
            KIND=kind,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns one long row where that is possible: rows that are no multiple of a block would leave lanes idle."""
    return tuple(t.view(1, -1) for t in tensors) if all(t.is_contiguous() for t in tensors) else tensors
