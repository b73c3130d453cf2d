"""Computes what `linear_cross_entropy` reads, writes and takes for itself, and the chunk that a headroom allows.

With b bytes per element of the buffer that collects the head's gradient, a chunk of C rows reads the head twice and
that buffer once, and writes the buffer: V H (4 + 2 b) bytes in 16-bit dtypes, whatever C is. That is why small chunks
are slow.
"""

import torch

from memwall.trace.op_work import KernelWork

from ._chunks import ROW_ALIGNMENT, LossCall, weight_gradient_dtype

_MIN_CHUNK_ROWS, _MAX_CHUNK_ROWS, _CHUNK_STEP = 256, 4096, 128


def chunk_rows_for(headroom_bytes: int, vocabulary_size: int, dtype: torch.dtype) -> int:
    """Returns the largest chunk whose logits fit into `headroom_bytes`: a multiple of 128, from 256 to 4,096 rows.

    Beyond 4,096 rows nothing is won, and below 256 the head is read too often to be worth it: 256 rows may not fit.
    """
    rows = headroom_bytes // (_padded(vocabulary_size) * dtype.itemsize)
    return max(_MIN_CHUNK_ROWS, min(_MAX_CHUNK_ROWS, rows // _CHUNK_STEP * _CHUNK_STEP))


def scratch_bytes(call: LossCall) -> int:
    """Returns the bytes of one chunk's logits, and of two figures for each row."""
    num_rows, element = call.x.shape[0], call.x.dtype.itemsize
    slab_bytes = min(call.chunk_rows, num_rows) * _padded(call.w.shape[0]) * element
    return slab_bytes + 2 * num_rows * max(4, element)


def rounded_bytes(call: LossCall) -> tuple[int, int]:
    """Returns the head's gradient as it is added up, and in the head's dtype; 0 and 0 for a frozen one."""
    head = call.w.numel() if call.want_w else 0
    return head * weight_gradient_dtype(call).itemsize, head * call.x.dtype.itemsize


def chunks_work(call: LossCall) -> list[KernelWork]:
    """Returns the work of loss and gradients: for each chunk logits, their gradient in place, then the two GEMMs."""
    head, element, buffer = call.w.numel(), call.x.dtype.itemsize, weight_gradient_dtype(call).itemsize
    # Logits are read for their loss a second time from the cache at best: counted as not.
    loss_passes = 3 if call.want_x or call.want_w else 1
    work: list[KernelWork] = []
    for index, (slab_bytes, x_bytes, flops) in enumerate(_chunks(call)):
        work += [KernelWork(head * element + x_bytes + slab_bytes, flops), KernelWork(loss_passes * slab_bytes, 0)]
        if call.want_x:
            work.append(KernelWork(slab_bytes + head * element + x_bytes, flops))
        if call.want_w:
            work.append(KernelWork(slab_bytes + x_bytes + (1 if index == 0 else 2) * head * buffer, flops))
    return work


def losses_work(call: LossCall) -> list[KernelWork]:
    """Returns the work of the loss alone, chunk by chunk."""
    head_bytes = call.w.numel() * call.x.dtype.itemsize
    return [
        part
        for slab_bytes, x_bytes, flops in _chunks(call)
        for part in (KernelWork(head_bytes + x_bytes + slab_bytes, flops), KernelWork(slab_bytes, 0))
    ]


def _chunks(call: LossCall) -> list[tuple[int, int, int]]:
    """Returns of each chunk the bytes of its logits, of its hidden states, and the FLOPs of a product with the head."""
    num_rows, num_columns, element = call.x.shape[0], call.w.shape[0], call.x.dtype.itemsize
    sizes = [min(call.chunk_rows, num_rows - begin) for begin in range(0, num_rows, call.chunk_rows)]
    return [
        (size * num_columns * element, size * call.x.shape[1] * element, 2 * size * call.w.numel()) for size in sizes
    ]


def _padded(vocabulary_size: int) -> int:
    return -(-vocabulary_size // ROW_ALIGNMENT) * ROW_ALIGNMENT
