"""Divides a sequence of single layers into runs of layers: blocks that are no modules of their own.

The features of a convolutional network often lie in one flat `nn.Sequential`. Computed again, or read back, as one
block, they would be in memory all at once, as if nothing had been done. A run is named `features.0:6`: the layers from
0 to 6, which torch calls `features[0:7]`.

A module of a few layers counts as a layer where it saves little but what it is called with and what it returns, as a
linear layer with its ReLU: computed again by itself, it would free nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from memwall.trace.records import Module, ModuleCall, Step

# A run saves at least this share of what its sequence does, so that there are no more than eight of them.
_LEAST_SHARE = 1 / 8
_LEAST_WITHIN = 1 / 4
"""Part of what a run saves that it saves beside what it is called with and returns: that alone is freed."""
_MOST_WITHIN = 1 / 8
"""Part of what a sequence saves that may lie within modules that count as layers."""
_FEWEST_LAYERS = 8
"""A shorter sequence, such as the two convolutions of a stage with their norms, is a block that a person would name."""


class LayerRun(NamedTuple):
    """Names consecutive layers of a sequence, with the runs' calls in the order of the sequence's."""

    path: str
    layers: tuple[int, ...]
    """Indexes of their modules, and of those in them."""
    calls: tuple[ModuleCall, ...]


def layer_runs(
    modules: Sequence[Module],
    step: Step,
    sequence: int,
    layers: Mapping[int, Collection[int]],
    *,
    calls: dict[int, list[ModuleCall]],
    saves_of: Mapping[int, Sequence[int]],
    saved_bytes: Sequence[int],
) -> tuple[LayerRun, ...]:
    """Returns the runs of a sequence's layers, from the first to the last; () where it cannot be divided.

    Args:
        sequence: index of its module.
        layers: indexes of its layers, with those of all modules in each, itself among them.
        calls: by module.
        saves_of: numbers of what each module has saved itself.
        saved_bytes: what is saved in each module.
    """
    within = [member for members in layers.values() for member in members]
    num_single = sum(modules[member].is_leaf for member in within)
    if num_single < _FEWEST_LAYERS or any(modules[layer].container != "sequential" for layer in layers):
        return ()
    nested = [layer for layer in layers if len(layers[layer]) > 1]
    if not all(_holds_its_calls(calls.get(layer, ()), layers[layer], calls) for layer in nested):
        return ()
    saved = {layer: {step.saved[n].storage for m in layers[layer] for n in saves_of.get(m, ())} for layer in layers}
    within_bytes = sum(_bytes_within(step, calls.get(layer, ()), saved[layer]) for layer in nested)
    if within_bytes > _MOST_WITHIN * saved_bytes[sequence]:
        return ()
    # A recording that ends as the sequence is called once more, for an evaluation, has that call without operations.
    wholes = [call for call in calls[sequence] if call.start < call.end]
    if any(len(calls.get(layer, ())) != len(wholes) for layer in layers):
        return ()
    rows = [[calls[layer][number] for layer in layers] for number in range(len(wholes))]
    for whole, row in zip(wholes, rows, strict=True):
        ends = [whole.start, *(call.end for call in row)]
        starts = [*(call.start for call in row), whole.end]
        if any(end > start for end, start in zip(ends, starts, strict=True)):
            return ()
    if any(_is_among(calls[other], wholes) for other in calls.keys() - {sequence, *within}):
        return ()
    written = {index for op in step.ops for index in op.writes}
    least_bytes = _LEAST_SHARE * saved_bytes[sequence]
    in_turn, bounds, held = list(layers), [0], set[int]()
    kept = set().union(*saved.values())
    for place, layer in enumerate(in_turn):
        run = [_joined(row[bounds[-1] : place]) for row in rows] if place else []
        held_bytes = sum(saved_bytes[one] for one in in_turn[bounds[-1] : place])
        is_full = held_bytes >= least_bytes and _bytes_within(step, run, held) >= _LEAST_WITHIN * held_bytes
        # What a run is called with is held until its backward: at no cost where that is saved anyway.
        begins_well = all(kept.issuperset(row[place].inputs) for row in rows)
        if place and is_full and begins_well and not any(_writes(step, row[place], written) for row in rows):
            bounds.append(place)
            held = set()
        held |= saved[layer]
    if len(bounds) < 2:
        return ()
    return tuple(
        LayerRun(
            path=_path(modules, in_turn[begin], in_turn[end - 1]),
            layers=tuple(member for layer in in_turn[begin:end] for member in layers[layer]),
            calls=tuple(_joined(row[begin:end]) for row in rows),
        )
        for begin, end in zip(bounds, [*bounds[1:], len(in_turn)], strict=True)
    )


def _holds_its_calls(
    calls: Sequence[ModuleCall], members: Collection[int], calls_of: Mapping[int, Sequence[ModuleCall]]
) -> bool:
    """Tells whether the modules in a layer are called within its calls alone."""
    inner = [call for member in members for call in calls_of.get(member, ())]
    return all(any(call.start <= one.start and one.end <= call.end for call in calls) for one in inner)


def _bytes_within(step: Step, calls: Sequence[ModuleCall], saved: Collection[int]) -> int:
    """Returns the bytes of what is saved in calls, beside what they are called with and return."""
    ends = {index for call in calls for index in (*call.inputs, *call.outputs)}
    kept = (step.storages[index] for index in saved if index not in ends)
    return sum(one.nbytes for one in kept if one.category == "activation" and one.birth >= 0)


def _is_among(calls: Sequence[ModuleCall], wholes: Sequence[ModuleCall]) -> bool:
    """Tells whether a module that stands elsewhere, and is a layer here too, is called within the sequence's calls."""
    spans = [(call.start, call.end) for call in calls]
    within = [(whole.start, whole.end) for whole in wholes]
    return any(
        whole_start <= start and end <= whole_end and (start, end) != (whole_start, whole_end)
        for start, end in spans
        for whole_start, whole_end in within
        if start < end
    )


def _writes(step: Step, call: ModuleCall, written: set[int]) -> bool:
    """Tells whether a layer writes to what it is called with, as a ReLU in place: no run that begins so runs again."""
    inputs = written.intersection(call.inputs)
    return bool(inputs) and any(inputs.intersection(op.writes) for op in step.ops[call.start : call.end])


def _path(modules: Sequence[Module], first: int, last: int) -> str:
    name = modules[last].path.rpartition(".")[2]
    return modules[first].path if first == last else f"{modules[first].path}:{name}"


def _joined(calls: Sequence[ModuleCall]) -> ModuleCall:
    """Returns the calls of consecutive layers as one: their backwards come in the other order."""
    backward = [call for call in calls if call.backward_start >= 0]
    return ModuleCall(
        module=-1,
        start=calls[0].start,
        end=calls[-1].end,
        backward_start=min((call.backward_start for call in backward), default=-1),
        backward_end=max((call.backward_end for call in backward), default=-1),
        inputs=calls[0].inputs,
        outputs=calls[-1].outputs,
    )
