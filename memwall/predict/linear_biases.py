"""Biases of linear layers as a plain step adds them where the input is not contiguous: in place.

While operations are watched the layer adds its bias into a new tensor, and for its moment there are two activations
where a plain step has one. Written by hand, as a product and a sum, that is so in a plain step as well.

Source: aten/src/ATen/native/Linear.cpp, `linear` (`isTensorSubclassLike` holds under any dispatch mode; torch 2.13).
"""

from collections.abc import Sequence

from memwall.predict.in_place import InPlace
from memwall.trace.records import Module, Step

_SUM = "aten.add.Tensor"
_PRODUCTS = ("aten.mm.default", "aten.bmm.default")
_CAST = "aten._to_copy.default"
_LAYER = "Linear"


def with_biases_in_place(step: Step, names: Sequence[str], modules: Sequence[Module]) -> Step:
    """Returns a recorded step whose linear layers add their biases to products, instead of making new tensors."""
    layers = {number for number, module in enumerate(modules) if module.class_name == _LAYER}
    places = InPlace(step)
    saved = {saving.storage for saving in step.saved}

    def is_bias(index: int) -> bool:
        """Tells whether a parameter is added, or what autocast has cast one to."""
        storage = step.storages[index]
        if storage.birth >= 0 and names[step.ops[storage.birth].name] == _CAST:
            return any(step.storages[each].category == "parameter" for each in step.ops[storage.birth].inputs)
        return storage.category == "parameter"

    for number, op in enumerate(step.ops):
        if op.module not in layers or names[op.name] != _SUM or len(op.inputs) != 2 or len(op.outputs) != 1:
            continue
        (product, bias), (result,) = op.inputs, op.outputs
        birth = step.storages[product].birth
        is_product = birth >= 0 and names[step.ops[birth].name] in _PRODUCTS and product not in saved
        if is_product and is_bias(bias) and places.is_possible(product, result, number):
            places.let_live(product, result, number)
    return places.step()
