"""Gradients that arrive for one tensor from several uses: a plain step adds them up in place."""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from memwall.predict.curve import live_peak_bytes
from memwall.predict.in_place import with_sums_in_place
from memwall.trace.records import Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload


class Residual(nn.Module):
    """Uses its input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer, self.other = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + torch.tanh(self.layer(x)) + torch.tanh(self.other(x))


def sums_of(trace: Trace) -> list[int]:
    """Operations of backward that add."""
    step = trace.steps[-1]
    return [n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.add.Tensor" and op.phase == "backward"]


def test_a_sum_takes_the_place_of_the_gradient_that_dies_of_it(workload_of: Callable[..., Workload]) -> None:
    """Two sums of 1000 x 64 float32 are made where nothing is in place; in place they are the gradient itself."""
    trace = record(workload_of(Residual, lambda: torch.ones(1000, 64)))
    step, changed = trace.steps[-1], with_sums_in_place(trace.steps[-1], trace.names)
    sums = sums_of(trace)
    assert len(sums) == 2
    for number in sums:
        op = changed.ops[number]
        assert op.outputs[0] in op.inputs
        assert changed.storages[op.outputs[0]].birth < number
    assert sum(s.nbytes for s in step.storages) - sum(s.nbytes for s in changed.storages) == 2 * 1000 * 64 * 4
    assert live_peak_bytes(changed, "cpu") <= live_peak_bytes(step, "cpu")
    assert with_sums_in_place(changed, trace.names) == changed


def test_a_gradient_that_somebody_else_holds_is_left_alone(workload_of: Callable[..., Workload]) -> None:
    """It lives on after what is added to it: a sum of its own is made, as in a plain step."""
    trace = record(workload_of(Residual, lambda: torch.ones(1000, 64)))
    step = trace.steps[-1]
    storages = list(step.storages)
    for number in sums_of(trace):
        first = step.ops[number].inputs[0]
        storages[first] = msgspec.structs.replace(storages[first], death=number + 2)
    held = msgspec.structs.replace(step, storages=tuple(storages))
    assert with_sums_in_place(held, trace.names) == held


class Attending(nn.Module):
    """Multiplies rows of several samples by two matrices: gradients of such products are views."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.query, self.key = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return torch.tanh(self.query(x)) + torch.tanh(self.key(x))


def test_nothing_is_added_to_a_view(workload_of: Callable[..., Workload]) -> None:
    trace = record(workload_of(Attending, lambda: torch.ones(10, 100, 64)))
    assert len(sums_of(trace)) == 1
    assert with_sums_in_place(trace.steps[-1], trace.names) == trace.steps[-1]


def test_a_sum_keeps_the_place_of_its_gradient_among_what_an_operation_allocates(
    workload_of: Callable[..., Workload],
) -> None:
    """The storage that lives on is that of the gradient, so that it is not moved behind the operation's others."""
    trace = record(workload_of(Residual, lambda: torch.ones(1000, 64)))
    step, changed = trace.steps[-1], with_sums_in_place(trace.steps[-1], trace.names)
    first = sums_of(trace)[0]
    gradient, result = step.ops[first].inputs[0], step.ops[first].outputs[0]
    assert changed.ops[first].outputs == (gradient,)
    assert changed.storages[gradient].death > step.storages[gradient].death
    assert changed.storages[result].nbytes == 0
