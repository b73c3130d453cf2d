"""Divides a sequence of single layers into runs of layers: blocks that are no modules of their own.

The features of a convolutional network often lie in one flat `nn.Sequential`. Computed again, or read back, as one
block, they would be in memory all at once, as if nothing had been done. A run is named `features.0:6`: the layers from
0 to 6, which torch calls `features[0:7]`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memwall.trace.records import Module, ModuleCall, Step

# A run saves at least this share of what its sequence does, so that there are no more than eight of them.
_LEAST_SHARE = 1 / 8
_FEWEST_LAYERS = 8
"""A shorter sequence, such as the two convolutions of a stage with their norms, is a block that a person would name."""


class LayerRun(NamedTuple):
    """Names consecutive layers of a sequence, with the runs' calls in the order of the sequence's."""

    path: str
    layers: tuple[int, ...]
    """Indexes of their modules."""
    calls: tuple[ModuleCall, ...]


def layer_runs(
    modules: Sequence[Module],
    step: Step,
    sequence: int,
    layers: Sequence[int],
    *,
    calls: dict[int, list[ModuleCall]],
    saved_bytes: Sequence[int],
) -> tuple[LayerRun, ...]:
    """Returns the runs of a sequence's layers, from the first to the last; () where it cannot be divided.

    Args:
        sequence: index of its module.
        layers: indexes of its layers.
        calls: by module.
        saved_bytes: what is saved in each module.
    """
    is_plain = all(modules[layer].is_leaf and modules[layer].container == "sequential" for layer in layers)
    if not is_plain or len(layers) < _FEWEST_LAYERS:
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
    if any(_is_among(calls[other], wholes) for other in calls.keys() - {sequence, *layers}):
        return ()
    written = {index for op in step.ops for index in op.writes}
    least_bytes = _LEAST_SHARE * saved_bytes[sequence]
    bounds, held_bytes = [0], 0
    for place, layer in enumerate(layers):
        if place and held_bytes >= least_bytes and not any(_writes(step, row[place], written) for row in rows):
            bounds.append(place)
            held_bytes = 0
        held_bytes += saved_bytes[layer]
    if len(bounds) < 2:
        return ()
    return tuple(
        LayerRun(
            path=_path(modules, layers[begin], layers[end - 1]),
            layers=tuple(layers[begin:end]),
            calls=tuple(_joined(row[begin:end]) for row in rows),
        )
        for begin, end in zip(bounds, [*bounds[1:], len(layers)], strict=True)
    )


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
