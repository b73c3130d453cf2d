"""Sums of gradients as a plain step makes them: in place.

Where a tensor was used twice, autograd adds up the gradients that arrive for it, into the first one if nobody else
holds that. Not so while operations are watched or tensors are fake: then each sum is a tensor of its own, and for its
moment there are three where a plain step has two.

Source: torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`.
"""

from collections.abc import Sequence

import msgspec

from memwall.trace.records import Step, Storage

__all__ = ["with_sums_in_place"]

_SUM = "aten.add.Tensor"


def with_sums_in_place(step: Step, names: Sequence[str]) -> Step:
    """Returns a recorded step whose backward adds to gradients that die of it, instead of making new ones."""
    storages = list(step.storages)
    sum_of: dict[int, int] = {}
    """Storage of the sum that takes a gradient's place, by the storage of the gradient."""
    saved = {saving.storage for saving in step.saved}
    for number, op in enumerate(step.ops):
        if op.phase != "backward" or names[op.name] != _SUM or not op.inputs or not op.outputs:
            continue
        first, result = sum_of.get(op.inputs[0], op.inputs[0]), op.outputs[0]
        if first not in saved and _replaces(step, storages[result], storages[first], number):
            birth = storages[first].birth
            storages[result] = msgspec.structs.replace(storages[result], birth=birth)
            storages[first] = msgspec.structs.replace(storages[first], nbytes=0, death=max(birth, 0))
            sum_of = {old: result if new == first else new for old, new in sum_of.items()} | {first: result}
    if not sum_of:
        return step

    def renamed(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(sum_of.get(number, number) for number in numbers))

    ops = tuple(
        msgspec.structs.replace(op, inputs=renamed(op.inputs), outputs=renamed(op.outputs), writes=renamed(op.writes))
        if any(number in sum_of for number in (*op.inputs, *op.outputs, *op.writes))
        else op
        for op in step.ops
    )
    return msgspec.structs.replace(step, ops=ops, storages=tuple(storages))


def _replaces(step: Step, result: Storage, first: Storage, number: int) -> bool:
    """Tells whether a sum is new, and the first of what it adds up a gradient that nobody holds after it."""
    is_gradient = first.category == "gradient" or (first.birth >= 0 and step.ops[first.birth].phase == "backward")
    return (
        result.birth == number
        and is_gradient
        and first.death == number + 1
        and (first.nbytes, first.dtype, first.device) == (result.nbytes, result.dtype, result.device)
    )
