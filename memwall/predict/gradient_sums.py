"""Sums of gradients as a plain step makes them: in place.

Where a tensor was used twice, autograd adds up the gradients that arrive for it, into the first one if nobody else
holds that; a view, as the backward of a linear layer returns, is held by what it views. Not so while operations are
watched or tensors are fake: then each sum is a tensor of its own, and for its moment there are three where a plain step
has two.

Source: torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`; VariableTypeUtils.h, `as_view`.
"""

from collections.abc import Sequence

import msgspec

from memwall.trace.records import Step, Storage

_SUM = "aten.add.Tensor"
# Results that share memory with an argument and yet are no views to autograd.
_NO_VIEWS = ("aten.detach.default", "aten._unsafe_view.default")


def with_sums_in_place(step: Step, names: Sequence[str]) -> Step:
    """Returns a recorded step whose backward adds to gradients that die of it, instead of making new ones.

    The gradient lives on in place of the sum, whose storage has no bytes: storages of an operation stay in the order in
    which it allocates them.
    """
    storages = list(step.storages)
    first_of: dict[int, int] = {}
    """Storage of the gradient that becomes a sum, by the storage that the sum had."""
    saved = {saving.storage for saving in step.saved}
    is_view: dict[int, bool] = {}
    """Whether a view is the last that was made of a storage, and so the gradient: who has read one since, has it."""
    for number, op in enumerate(step.ops):
        first_is_view = bool(op.inputs) and is_view.get(first_of.get(op.inputs[0], op.inputs[0]), False)
        if names[op.name] not in _NO_VIEWS:
            made = () if op.writes else op.outputs
            is_view |= {first_of.get(index, index): index in made for index in op.inputs}
        if op.phase != "backward" or names[op.name] != _SUM or not op.inputs or not op.outputs:
            continue
        first, result = first_of.get(op.inputs[0], op.inputs[0]), op.outputs[0]
        if first_is_view or {first, result} & saved:
            continue
        if _replaces(step, storages[result], storages[first], number):
            birth = storages[first].birth
            storages[first] = msgspec.structs.replace(storages[result], birth=birth)
            storages[result] = msgspec.structs.replace(storages[result], nbytes=0, dropped=number, death=number)
            first_of[result] = first
    if not first_of:
        return step

    def renamed(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(first_of.get(number, number) for number in numbers))

    ops = tuple(
        msgspec.structs.replace(op, inputs=renamed(op.inputs), outputs=renamed(op.outputs), writes=renamed(op.writes))
        if any(number in first_of for number in (*op.inputs, *op.outputs, *op.writes))
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
