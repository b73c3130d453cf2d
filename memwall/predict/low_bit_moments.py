"""A step whose optimizer keeps its moments in 8 bits: what they take then, and what opening a slice of them takes.

The rules for what is kept so are torchao's (torchao/optim/adam.py, `_new_buffer`, and subclass_8bit.py, 0.18): a tensor
of 4096 elements or more, in whole blocks of 256. A code is a byte, each block has a scale in float32, each tensor the
table of the 256 values that codes stand for.
"""

import msgspec

from memwall.trace.records import Step, Storage

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""
SLICE_ELEMENTS = 128 << 10
"""Elements of a parameter that are opened, stepped and closed at a time: whole blocks, enough to keep cores busy."""
DEVICE_SLICE_ELEMENTS = 1 << 20
"""The same on a CUDA device, where a slice has to be worth the launches of its kernels."""
_MIN_ELEMENTS = 4096
_ITEMSIZE = 4
_TABLE_BYTES = 256 * _ITEMSIZE
# For each element of a slice while it is stepped: the moments opened, three of them with AMSGrad, and the search for
# the codes of one. tests/apply/optimizer_state/test_low_bit.py counts what torch allocates.
_OPEN_BYTES_PER_ELEMENT = 37
# The same on a CUDA device, in tensors of float32, beside two for each moment (test_low_bit_cuda.py counts those).
_SEARCH_TENSORS = 3
# What opening and closing an element of a moment reads and writes there, and how many kernels a slice of one takes
# beside those of the whole update (the same test).
_PASSED_BYTES_PER_ELEMENT, _LAUNCHES_PER_SLICE = 117, 23


def can_be_low_bit(num_elements: int) -> bool:
    """Tells whether a moment with so many elements is kept in 8 bits, and not as it is."""
    return num_elements >= _MIN_ELEMENTS and num_elements % BLOCK_ELEMENTS == 0


def low_bit_bytes(num_elements: int) -> int:
    """Returns the bytes of a moment's codes, scales and table."""
    return sum(_parts(num_elements))


def low_bit_elements(step: Step) -> tuple[int, ...]:
    """Returns the elements of each moment of the optimizer that can be in 8 bits."""
    return tuple(storage.nbytes // _ITEMSIZE for storage in step.storages if _is_moment(storage))


def device_seconds(step: Step) -> float:
    """Returns how much longer a CUDA device takes for a step that opens and closes its moments.

    Its kernels pass over bytes as fast as those of the recorded update, and are launched as the recorded ones are.
    """
    updates = [(number, op) for number, op in enumerate(step.ops) if op.phase == "optimizer"]
    passed_bytes = sum(
        step.storages[index].nbytes
        for number, op in updates
        for indices in (op.inputs, {*op.writes, *(i for i in op.outputs if step.storages[i].birth == number)})
        for index in indices
    )
    seconds_per_byte = sum(op.seconds for _, op in updates) / max(1, passed_bytes)
    elements = low_bit_elements(step)
    num_launches = _LAUNCHES_PER_SLICE * sum(-(-number // DEVICE_SLICE_ELEMENTS) for number in elements)
    return sum(elements) * _PASSED_BYTES_PER_ELEMENT * seconds_per_byte + num_launches * step.launch_seconds


def with_low_bit_state(step: Step) -> Step:
    """Returns the step with its moments in 8 bits, and while the optimizer runs one slice of them open."""
    ops = [number for number, op in enumerate(step.ops) if op.phase == "optimizer"]
    moments = [storage for storage in step.storages if _is_moment(storage)]
    if not ops or not moments:
        return step
    begin, end = ops[0], ops[-1] + 1
    is_on_cpu = moments[0].device_type == "cpu"
    slice_elements = min(
        SLICE_ELEMENTS if is_on_cpu else DEVICE_SLICE_ELEMENTS,
        max(storage.nbytes for storage in moments) // _ITEMSIZE,
    )
    storages, parts = [], []
    for storage in step.storages:
        if _is_moment(storage):
            codes, *others = _parts(storage.nbytes // _ITEMSIZE)
            parts += [msgspec.structs.replace(storage, nbytes=nbytes) for nbytes in others]
            storage = msgspec.structs.replace(storage, nbytes=codes)
        elif storage.category == "temporary" and storage.birth >= begin:
            # What the update of a parameter takes, that of a slice takes now.
            is_sliced = not is_on_cpu and storage.dtype == "float32" and can_be_low_bit(storage.nbytes // _ITEMSIZE)
            left_bytes = 0 if is_sliced else slice_elements * _ITEMSIZE
            storage = msgspec.structs.replace(storage, nbytes=min(storage.nbytes, left_bytes))
        storages.append(storage)
    slice_bytes = slice_elements * _ITEMSIZE
    num_gradients = sum(storage.category == "gradient" and _is_large(storage) for storage in step.storages)
    num_open = _SEARCH_TENSORS + 2 * -(-len(moments) // max(1, num_gradients))
    opened = msgspec.structs.replace(
        moments[0], category="temporary", birth=begin, dropped=end, death=end, phase="optimizer", batched=False
    )
    sizes = (slice_elements * _OPEN_BYTES_PER_ELEMENT,) if is_on_cpu else (slice_bytes,) * num_open
    # At the end, so that the numbers operations refer to stay.
    storages += parts + [msgspec.structs.replace(opened, nbytes=nbytes) for nbytes in sizes]
    return msgspec.structs.replace(step, storages=tuple(storages))


def _parts(num_elements: int) -> tuple[int, int, int]:
    """Returns the bytes of a moment's codes, of its scales and of its table, each of which is a tensor."""
    return num_elements, num_elements // BLOCK_ELEMENTS * _ITEMSIZE, _TABLE_BYTES


def _is_moment(storage: Storage) -> bool:
    return storage.category == "optimizer_state" and _is_large(storage)


def _is_large(storage: Storage) -> bool:
    """Returns whether it holds as many numbers of float32 as a moment that is kept in 8 bits."""
    is_in_reach = storage.device_type in ("cpu", "cuda") and storage.dtype == "float32"
    return is_in_reach and can_be_low_bit(storage.nbytes // _ITEMSIZE)
