"""Sums of gradients as a plain step makes them: in place.

Where a tensor was used twice, autograd adds up the gradients that arrive for it, into the first one if nobody else
holds that; a view, as the backward of a linear layer returns, is held by what it views. Not so while operations are
watched or tensors are fake: then each sum is a tensor of its own, and for its moment there are three where a plain step
has two.

Source: torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`; VariableTypeUtils.h, `as_view`.
"""

from collections.abc import Sequence

from memwall.predict.in_place import InPlace
from memwall.trace.records import Step, Storage

_SUM = "aten.add.Tensor"
# Results that share memory with an argument and yet are no views to autograd.
_NO_VIEWS = ("aten.detach.default", "aten._unsafe_view.default")


def with_sums_in_place(step: Step, names: Sequence[str]) -> Step:
    """Returns a recorded step whose backward adds to gradients that die of it, instead of making new ones."""
    places = InPlace(step)
    saved = {saving.storage for saving in step.saved}
    is_view: dict[int, bool] = {}
    """Whether a view is the last that was made of a storage, and so the gradient: who has read one since, has it."""
    for number, op in enumerate(step.ops):
        first_is_view = bool(op.inputs) and is_view.get(places.of(op.inputs[0]), False)
        if names[op.name] not in _NO_VIEWS:
            made = () if op.writes else op.outputs
            is_view |= {places.of(index): index in made for index in op.inputs}
        if op.phase != "backward" or names[op.name] != _SUM or not op.inputs or not op.outputs:
            continue
        first, result = places.of(op.inputs[0]), op.outputs[0]
        if first_is_view or {first, result} & saved or not _is_gradient(step, places.storages[first]):
            continue
        if places.is_possible(first, result, number):
            places.let_live(first, result, number)
    return places.step()


def _is_gradient(step: Step, storage: Storage) -> bool:
    return storage.category == "gradient" or (storage.birth >= 0 and step.ops[storage.birth].phase == "backward")
