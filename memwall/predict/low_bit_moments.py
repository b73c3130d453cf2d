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
_MIN_ELEMENTS = 4096
_ITEMSIZE = 4
_TABLE_BYTES = 256 * _ITEMSIZE
# For each element of a slice while it is stepped: the moments opened, three of them with AMSGrad, and the search for
# the codes of one. tests/apply/optimizer_state/test_low_bit.py counts what torch allocates.
_OPEN_BYTES_PER_ELEMENT = 37


def can_be_low_bit(num_elements: int) -> bool:
    """Tells whether a moment with so many elements is kept in 8 bits, and not as it is."""
    return num_elements >= _MIN_ELEMENTS and num_elements % BLOCK_ELEMENTS == 0


def low_bit_bytes(num_elements: int) -> int:
    """Returns the bytes of a moment's codes, scales and table."""
    return num_elements + num_elements // BLOCK_ELEMENTS * _ITEMSIZE + _TABLE_BYTES


def low_bit_elements(step: Step) -> tuple[int, ...]:
    """Returns the elements of each moment of the optimizer that can be in 8 bits."""
    return tuple(storage.nbytes // _ITEMSIZE for storage in step.storages if _is_moment(storage))


def with_low_bit_state(step: Step) -> Step:
    """Returns the step with its moments in 8 bits, and while the optimizer runs one slice of them open."""
    ops = [number for number, op in enumerate(step.ops) if op.phase == "optimizer"]
    moments = [storage for storage in step.storages if _is_moment(storage)]
    if not ops or not moments:
        return step
    begin, end = ops[0], ops[-1] + 1
    slice_elements = min(SLICE_ELEMENTS, max(storage.nbytes for storage in moments) // _ITEMSIZE)

    def changed(storage: Storage) -> Storage:
        if _is_moment(storage):
            return msgspec.structs.replace(storage, nbytes=low_bit_bytes(storage.nbytes // _ITEMSIZE))
        if storage.category == "temporary" and storage.birth >= begin:
            # What the update of a parameter takes, that of a slice takes now.
            return msgspec.structs.replace(storage, nbytes=min(storage.nbytes, slice_elements * _ITEMSIZE))
        return storage

    opened = msgspec.structs.replace(
        moments[0],
        nbytes=slice_elements * _OPEN_BYTES_PER_ELEMENT,
        category="temporary",
        birth=begin,
        dropped=end,
        death=end,
        phase="optimizer",
        batched=False,
    )
    # At the end, so that the numbers operations refer to stay.
    return msgspec.structs.replace(step, storages=(*map(changed, step.storages), opened))


def _is_moment(storage: Storage) -> bool:
    return (
        storage.category == "optimizer_state"
        and storage.device == "cpu"
        and storage.dtype == "float32"
        and can_be_low_bit(storage.nbytes // _ITEMSIZE)
    )
