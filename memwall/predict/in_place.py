"""Results that take an argument's place in a plain step, and have storages of their own while somebody watches.

Where a tensor was used twice, autograd adds up the gradients that arrive for it, into the first one if nobody else
holds that; a view, as the backward of a linear layer returns, is held by what it views. Not so while operations are
watched or tensors are fake: then each sum is a tensor of its own, and for its moment there are three where a plain step
has two. Source: torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`; VariableTypeUtils.h,
`as_view`.

Nor does a linear layer whose input is not contiguous add its bias in place then. Written by hand, as a product and a
sum, that is so in a plain step as well. Source: aten/src/ATen/native/Linear.cpp, `linear` (`isTensorSubclassLike` holds
under any dispatch mode; torch 2.13).
"""

from collections.abc import Sequence

import msgspec

from memwall.trace.records import Module, Step, Storage


class InPlace:
    """Rewrites a recorded step, in which arguments live on as results.

    A result's own storage stays without bytes: storages of an operation stay in the order in which it allocates them.
    """

    def __init__(self, step: Step) -> None:
        self.storages = list(step.storages)
        self._recorded = step
        self._stands_for: dict[int, int] = {}
        """Storage of the argument, by the storage that the result had."""

    def of(self, index: int) -> int:
        """Returns the storage that stands for a recorded one."""
        return self._stands_for.get(index, index)

    def is_possible(self, argument: int, result: int, number: int) -> bool:
        """Tells whether an operation's result is new, and as large as an argument that dies of it."""
        old, new = self.storages[argument], self.storages[result]
        alike = (old.nbytes, old.dtype, old.device) == (new.nbytes, new.dtype, new.device)
        return alike and new.birth == number and old.death == number + 1

    def let_live(self, argument: int, result: int, number: int) -> None:
        """Has the argument of an operation live on as its result."""
        old, new = self.storages[argument], self.storages[result]
        self.storages[argument] = msgspec.structs.replace(new, birth=old.birth)
        self.storages[result] = msgspec.structs.replace(new, nbytes=0, dropped=number, death=number)
        self._stands_for[result] = argument

    def step(self) -> Step:
        """Returns the step as it is then."""
        if not self._stands_for:
            return self._recorded
        replace = msgspec.structs.replace
        return replace(
            self._recorded,
            storages=tuple(self.storages),
            ops=tuple(
                replace(
                    op, inputs=self._named(op.inputs), outputs=self._named(op.outputs), writes=self._named(op.writes)
                )
                if any(number in self._stands_for for number in (*op.inputs, *op.outputs, *op.writes))
                else op
                for op in self._recorded.ops
            ),
            saved=tuple(
                replace(saving, storage=self.of(saving.storage)) if saving.storage in self._stands_for else saving
                for saving in self._recorded.saved
            ),
            calls=tuple(
                replace(call, inputs=self._named(call.inputs), outputs=self._named(call.outputs))
                if any(number in self._stands_for for number in (*call.inputs, *call.outputs))
                else call
                for call in self._recorded.calls
            ),
        )

    def _named(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self.of, numbers)))


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
