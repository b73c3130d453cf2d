"""What `linear_cross_entropy` costs, and the chunk that a headroom allows: pure arithmetic.

With b bytes per element of the buffer that collects the head's gradient, a chunk of C rows reads the head twice and
that buffer once, and writes the buffer: V H (4 + 2 b) bytes in 16-bit dtypes, whatever C is. That is why small chunks
are slow.
"""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from ..cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of
from ._chunks import ROW_ALIGNMENT
from ._ops import weight_gradient_dtype

__all__ = ["LossShape", "chunk_rows_for", "chunks_work", "cost", "losses_work", "rounded_bytes", "scratch_bytes"]

_MIN_CHUNK_ROWS, _MAX_CHUNK_ROWS, _CHUNK_STEP = 256, 4096, 128


class LossShape(Struct, frozen=True, kw_only=True):
    """One call of `linear_cross_entropy`."""

    num_rows: int
    hidden_size: int
    vocabulary_size: int
    chunk_rows: int
    num_used_rows: int | None = None
    """Rows that enter the matmul: `max_valid_rows`; None is all of them."""
    wants_input_gradient: bool = True
    wants_weight_gradient: bool = True
    """False for a frozen head."""
    recompute: bool = False
    """Logits are computed again in backward, as `reduction="none"` does."""
    accum_dtype: torch.dtype = torch.float32

    @property
    def used_rows(self) -> int:
        """Rows that enter the matmul."""
        return self.num_rows if self.num_used_rows is None else min(self.num_rows, self.num_used_rows)

    @property
    def loss_passes(self) -> int:
        """How often logits are read or written for their loss; a second time from the cache at best: counted as not."""
        return 3 if self.wants_input_gradient or self.wants_weight_gradient else 1


def chunk_rows_for(headroom_bytes: int, vocabulary_size: int, dtype: torch.dtype) -> int:
    """The largest chunk whose slab of logits fits into `headroom_bytes`: a multiple of 128, from 256 to 4,096 rows.

    Beyond 4,096 rows nothing is won, and below 256 the head is read too often to be worth it: 256 rows may not fit.
    """
    rows = headroom_bytes // (_padded(vocabulary_size) * dtype.itemsize)
    return max(_MIN_CHUNK_ROWS, min(_MAX_CHUNK_ROWS, rows // _CHUNK_STEP * _CHUNK_STEP))


def cost(
    shape: LossShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Forward and backward of the loss, beside eager `F.cross_entropy(F.linear(x, w).float(), target)`.

    Raises:
        UsageError: a size is negative or zero where it cannot be, or the device has no rate for the dtype.
    """
    if min(shape.num_rows, shape.hidden_size) < 0 or min(shape.vocabulary_size, shape.chunk_rows) < 1:
        raise UsageError(f"linear_cross_entropy has no cost for {shape}; sizes must be positive")
    element = dtype.itemsize
    chunks = _chunks(shape.used_rows, shape.chunk_rows)
    buffer = weight_gradient_dtype(dtype, shape.accum_dtype, len(chunks)).itemsize
    head = shape.vocabulary_size * shape.hidden_size
    grad_x_bytes = shape.num_rows * shape.hidden_size * element if shape.wants_input_gradient else 0
    grad_w_bytes = head * buffer if shape.wants_weight_gradient else 0
    # Rounded to the head's dtype in backward.
    cast_bytes = head * element if shape.wants_weight_gradient and (not shape.recompute or buffer != element) else 0
    own_bytes = scratch_bytes(shape, dtype)

    work = chunks_work(shape, dtype)
    if shape.recompute:
        work += losses_work(shape, dtype)
        saved_bytes = 0
        # The slab is gone when the head's gradient is rounded.
        later_bytes = max(own_bytes, cast_bytes)
        transient_bytes = grad_x_bytes + grad_w_bytes + later_bytes
    else:
        saved_bytes = grad_x_bytes + grad_w_bytes
        forward_bytes = saved_bytes + own_bytes
        transient_bytes = max(forward_bytes, saved_bytes + grad_x_bytes + cast_bytes)
        work.append(Work(bytes_moved=2 * grad_x_bytes))
    work.append(Work(bytes_moved=grad_w_bytes + cast_bytes if cast_bytes else 0))
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=sum(part.flops for part in work),
        saved_bytes=saved_bytes,
        transient_bytes=transient_bytes,
        seconds=seconds_of(work, dtype, device, calibration),
        eager=_eager(shape, dtype, device, calibration),
    )


def scratch_bytes(shape: LossShape, dtype: torch.dtype) -> int:
    """One chunk's logits, copies of rows where some are left out, and two figures for each row."""
    chunk = min(shape.chunk_rows, shape.used_rows)
    slab_bytes = chunk * _padded(shape.vocabulary_size) * dtype.itemsize
    gathered_bytes = 2 * chunk * shape.hidden_size * dtype.itemsize if shape.used_rows < shape.num_rows else 0
    return slab_bytes + gathered_bytes + 2 * shape.num_rows * max(4, dtype.itemsize)


def chunks_work(shape: LossShape, dtype: torch.dtype) -> list[Work]:
    """Loss and gradients, chunk by chunk."""
    chunks = _chunks(shape.used_rows, shape.chunk_rows)
    buffer = weight_gradient_dtype(dtype, shape.accum_dtype, len(chunks)).itemsize
    element = dtype.itemsize
    return [part for index, size in enumerate(chunks) for part in _chunk_work(shape, size, element, buffer, index == 0)]


def rounded_bytes(shape: LossShape, dtype: torch.dtype) -> tuple[int, int]:
    """The head's gradient as it is added up, and in the head's dtype; 0 and 0 for a frozen one."""
    chunks = _chunks(shape.used_rows, shape.chunk_rows)
    buffer = weight_gradient_dtype(dtype, shape.accum_dtype, len(chunks)).itemsize
    head = shape.vocabulary_size * shape.hidden_size if shape.wants_weight_gradient else 0
    return head * buffer, head * dtype.itemsize


def losses_work(shape: LossShape, dtype: torch.dtype) -> list[Work]:
    """Loss alone, chunk by chunk."""
    chunks = _chunks(shape.used_rows, shape.chunk_rows)
    return [part for size in chunks for part in _loss_only_work(shape, size, dtype.itemsize)]


def _chunk_work(shape: LossShape, rows: int, element: int, buffer: int, is_first: bool) -> list[Work]:
    """Logits, their loss and gradient in place, then the two gradient GEMMs of one chunk."""
    head = shape.vocabulary_size * shape.hidden_size
    slab_bytes, x_bytes = rows * shape.vocabulary_size * element, rows * shape.hidden_size * element
    flops = 2 * rows * head
    work = [
        Work(bytes_moved=head * element + x_bytes + slab_bytes, flops=flops),
        Work(bytes_moved=shape.loss_passes * slab_bytes),
    ]
    if shape.wants_input_gradient:
        work.append(Work(bytes_moved=slab_bytes + head * element + x_bytes, flops=flops))
    if shape.wants_weight_gradient:
        passes = 1 if is_first else 2
        work.append(Work(bytes_moved=slab_bytes + x_bytes + passes * head * buffer, flops=flops))
    return work


def _loss_only_work(shape: LossShape, rows: int, element: int) -> list[Work]:
    head = shape.vocabulary_size * shape.hidden_size
    slab_bytes, x_bytes = rows * shape.vocabulary_size * element, rows * shape.hidden_size * element
    return [
        Work(bytes_moved=head * element + x_bytes + slab_bytes, flops=2 * rows * head),
        Work(bytes_moved=slab_bytes),
    ]


def _eager(shape: LossShape, dtype: torch.dtype, device: Hardware, calibration: Calibration) -> KernelCost:
    """Logits whole, an fp32 copy of them, its log-softmax, and the gradients of both."""
    element = dtype.itemsize
    num_logits = shape.num_rows * shape.vocabulary_size
    head, x = shape.vocabulary_size * shape.hidden_size, shape.num_rows * shape.hidden_size
    gemm = Work(bytes_moved=(head + x + num_logits) * element, flops=2 * shape.num_rows * head)
    num_gemms = 1 + shape.wants_input_gradient + shape.wants_weight_gradient
    copies = num_logits * (element + 4) if element < 4 else 0
    # Forward: cast, log-softmax. Backward: its gradient (read twice, written once), cast back.
    work = [gemm] * num_gemms + [Work(bytes_moved=2 * copies + num_logits * 20, num_launches=4)]
    grad_w_bytes = head * element if shape.wants_weight_gradient else 0
    saved_bytes = num_logits * 4
    # The log-softmax, its gradient, and that gradient in the logits' dtype exist together.
    transient_bytes = saved_bytes + num_logits * 4 + (num_logits * element if element < 4 else 0)
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=sum(part.flops for part in work),
        saved_bytes=saved_bytes,
        transient_bytes=max(transient_bytes, saved_bytes + grad_w_bytes),
        seconds=seconds_of(work, dtype, device, calibration),
    )


def _chunks(rows: int, chunk_rows: int) -> list[int]:
    return [min(chunk_rows, rows - begin) for begin in range(0, rows, chunk_rows)]


def _padded(vocabulary_size: int) -> int:
    return -(-vocabulary_size // ROW_ALIGNMENT) * ROW_ALIGNMENT
