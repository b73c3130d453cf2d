"""The scratch that a sum, a mean or another reduction takes on a CUDA device while it runs.

Where few results are left of many numbers, the kernel has several blocks of threads work on each result. What each
found is written to memory that comes from the caching allocator, beside a counter per column of blocks: hundreds of
MiB in the backward of a linear layer's bias. How many blocks there are depends on the device's multiprocessors.

Source: aten/src/ATen/native/cuda/Reduce.cuh (torch 2.13 wheel), `setReduceConfig`, `global_memory_size`,
`AccumulationBuffer`; aten/src/ATen/TensorIterator.cpp, `reorder_dimensions`, `coalesce_dimensions`,
`with_32bit_indexing`; which types a reduction works in: ReduceSumProdKernel.cu, ReduceMomentKernel.cu and their kin.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

_WARP = 32
_MOST_THREADS = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values per thread: fewer are no work for one more block, more are too many for one."""
_COUNTER_BYTES = 4
_MOST_INDEX = 2**31 - 1


class Multiprocessors(NamedTuple):
    """Describes what of a device decides how a reduction is split."""

    number: int
    threads: int
    """Threads resident on each at once."""


class ReductionKernel(NamedTuple):
    """Describes the types that a reduction is compiled for."""

    element_bytes: int
    """Bytes of one element of the input."""
    partial_bytes: int
    """Bytes of what one thread has found so far."""
    vector: int = 4
    """Numbers that a thread loads at once."""
    sums_in_result: bool = True
    """Whether partial results can be kept in the result, where the input is too large for 32-bit offsets."""


class _Layout(NamedTuple):
    """Describes an input and its result as the iterator has them: dimensions from the fastest, strides in elements."""

    shape: tuple[int, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]
    """0 where the dimension is reduced; those come first."""

    @property
    def num_reduced(self) -> int:
        return sum(stride == 0 for stride in self.output)


def reduction_blocks(
    device: Multiprocessors,
    kernel: ReductionKernel,
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Sequence[int],
    *,
    offset: int = 0,
) -> tuple[int, ...]:
    """Returns the bytes of each block that a reduction allocates for itself, in order; () for none.

    Args:
        shape, strides: of the input, in elements.
        dims: reduced ones; none stand for all.
        offset: elements between the input and the beginning of its storage.
    """
    if math.prod(shape) <= _MOST_VALUES:
        return ()
    layout = _coalesced(
        _ordered(shape, strides, {dim % len(shape) for dim in dims} if dims else set(range(len(shape))))
    )
    element_bytes = kernel.element_bytes
    if not _is_small(layout, element_bytes):
        held = () if kernel.sums_in_result else (kernel.partial_bytes * _num_outputs(layout),)
        while not _is_small(layout, element_bytes):  # halves, one after the other
            layout = _halved(layout)
        return held + _scratch(device, kernel, layout, offset)
    return _scratch(device, kernel, layout, offset)


# -- the iterator ------------------------------------------------------------------------------------------------------


def _ordered(shape: Sequence[int], strides: Sequence[int], reduced: set[int]) -> _Layout:
    """Puts reduced dimensions first, then by stride."""
    output, size = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        if dim not in reduced:
            output[dim] = size
            size *= shape[dim]

    def order(first: int, second: int) -> int:
        """Says which of two dimensions is the slower: 1 for the first, -1 for the second, 0 if nothing tells."""
        if (output[first] == 0) != (output[second] == 0):
            return 1 if output[second] == 0 else -1
        for operand in (output, strides):
            one, other = operand[first], operand[second]
            if one == 0 or other == 0:
                continue
            if one != other:
                return 1 if one > other else -1
            if shape[first] > shape[second]:
                return 1
        return 0

    order_of = list(reversed(range(len(shape))))
    for begin in range(1, len(order_of)):
        at = begin
        for before in reversed(range(begin)):
            found = order(order_of[before], order_of[at])
            if found > 0:
                order_of[before], order_of[at] = order_of[at], order_of[before]
                at = before
            elif found < 0:
                break
    return _Layout(
        tuple(shape[dim] for dim in order_of),
        tuple(strides[dim] for dim in order_of),
        tuple(output[dim] for dim in order_of),
    )


def _coalesced(layout: _Layout) -> _Layout:
    """Joins neighbouring dimensions that lie in memory like one."""
    shape: list[int] = []
    inputs: list[int] = []
    outputs: list[int] = []
    for size, *strides in zip(*layout, strict=True):
        if shape and (
            shape[-1] == 1
            or size == 1
            or (strides[0] == shape[-1] * inputs[-1] and strides[1] == shape[-1] * outputs[-1])
        ):
            if shape[-1] == 1:
                inputs[-1], outputs[-1] = strides
            shape[-1] *= size
        else:
            shape.append(size)
            inputs.append(strides[0])
            outputs.append(strides[1])
    return _Layout(tuple(shape), tuple(inputs), tuple(outputs))


def _num_outputs(layout: _Layout) -> int:
    return math.prod(size for size, stride in zip(layout.shape, layout.output, strict=True) if stride)


def _is_small(layout: _Layout, element_bytes: int) -> bool:
    """Tells whether offsets into the input fit into 32 bits."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.input, strict=True))
    return math.prod(layout.shape) <= _MOST_INDEX and 1 + last * element_bytes <= _MOST_INDEX


def _halved(layout: _Layout) -> _Layout:
    """Returns the larger half along the dimension that reaches farthest."""
    extents = [(size - 1) * abs(stride) for size, stride in zip(layout.shape, layout.input, strict=True)]
    farthest = max(reversed(range(len(extents))), key=extents.__getitem__)
    shape = list(layout.shape)
    shape[farthest] -= shape[farthest] // 2
    return layout._replace(shape=tuple(shape))


# -- the launch --------------------------------------------------------------------------------------------------------


def _scratch(device: Multiprocessors, kernel: ReductionKernel, layout: _Layout, offset: int) -> tuple[int, ...]:
    """Returns the bytes of partial results and of counters; () where one block of threads sees each result through."""
    num_outputs = _num_outputs(layout)
    num_inputs = math.prod(layout.shape) // num_outputs
    num_reduced = layout.num_reduced
    reduces_fastest = num_reduced == len(layout.shape) or layout.input[0] < layout.input[num_reduced]
    fastest = layout.input[0] if reduces_fastest else layout.input[num_reduced]
    across, along = (num_inputs, num_outputs) if reduces_fastest else (num_outputs, num_inputs)
    output_vector = 1
    if fastest == 1:
        if reduces_fastest and across >= 128 and num_reduced == 1:
            across //= kernel.vector
        elif not reduces_fastest:
            output_vector = _output_vector(layout, offset)
            across //= output_vector
    width, height = _threads(across, along, _MOST_THREADS // output_vector)
    step_input, step_output = (width, 1) if reduces_fastest else (1, width)
    splits_warps = _up(num_inputs, step_input) >= min(height * 16, _MOST_VALUES)
    if splits_warps:
        step_input *= height
    else:
        step_output *= height
    values = _up(num_inputs, step_input)
    num_columns = _up(num_outputs // output_vector, step_output)
    num_wanted = device.number * (device.threads // (width * height))
    if not splits_warps or values < _MOST_VALUES or num_columns > num_wanted:
        return ()
    num_rows = max(min(_up(num_wanted, num_columns), _up(values, _LEAST_VALUES)), _up(values, _MOST_VALUES))
    if num_rows <= 1:
        return ()
    partial_bytes = kernel.partial_bytes * num_outputs * num_rows
    if not reduces_fastest:
        partial_bytes *= width * output_vector
    return partial_bytes, _COUNTER_BYTES * num_columns


def _output_vector(layout: _Layout, offset: int) -> int:
    """Returns how many neighbouring results one thread can see to: all that it loads has to be aligned."""
    at = layout.num_reduced
    others = [stride for dim, stride in enumerate(layout.input) if dim != at]
    vector = 4
    for number in (offset, layout.shape[at], *others):
        while number % vector:
            vector //= 2
    return vector


def _threads(across: int, along: int, most: int) -> tuple[int, int]:
    """Returns width and height of a block of threads."""
    widest = _power_of_two(across) if across < most else most
    highest = _power_of_two(along) if along < most else most
    height = min(highest, most // min(widest, _WARP))
    return min(widest, most // height), height


def _power_of_two(number: int) -> int:
    """Returns the largest power of two up to a number, and 1 for 0."""
    return 1 << (number.bit_length() - 1) if number else 1


def _up(size: int, step: int) -> int:
    return -(-size // step)
