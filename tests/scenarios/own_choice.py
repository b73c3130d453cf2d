"""The planner's own choice for a script of the corpus: made as if each tensor were a thousand times as large.

At the size that it has no budget is short: a process has a thousand times as much. So the recorded step grows before
the solver sees it, weights and, as of a larger batch, what is computed of them; what the plan says of bytes shrinks
again before it is applied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.errors import InfeasibleError
from memwall.planning.action import Action
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.trace.records import Step, Trace

__all__ = ["planner_choosing"]

WEIGHTS, VALUES = 1 << 10, 8 << 10
"""So many times as large are weights, their gradients and state; and everything else."""
BASE_BYTES = 4 << 30
"""Bytes that the process is said to hold beside tensors: more than it does, so that no step is above its forecast."""
BYTES_PER_SECOND, FLOPS_PER_SECOND, DISK_BYTES_PER_SECOND = 10e9, 50e9, 2e9

_WINDOW_BYTES = 4 << 20
"""The least window of an offload: two blocks of the store, which do not shrink with a step."""
# Fields of actions that count bytes of tensors, and how much larger these are.
_BYTES: dict[type[Action], tuple[int, tuple[str, ...]]] = {
    Offload: (VALUES, ("min_bytes", "window_bytes")),
    OptimizerPlacement: (WEIGHTS, ("resident_bytes", "bucket_bytes", "min_bytes")),
    ParameterPlacement: (WEIGHTS, ("window_bytes", "min_bytes")),
}
_OF_WEIGHTS = ("parameter", "gradient", "optimizer_state", "buffer")


@contextmanager
def planner_choosing(share: float) -> Iterator[None]:
    """Has sessions plan for a share of what the recorded step adds to the process; or the least, where that is more."""

    def choose(trace: Trace, settings: Settings) -> Plan:
        large = _grown(trace)
        inputs = SearchInputs(large, settings)
        added_bytes = inputs.process.untreated(inputs.steady).process_bytes - BASE_BYTES
        settings = replace(settings, budget_bytes=BASE_BYTES + int(share * added_bytes), first_step=None)
        try:
            plan = make_plan(large, settings)
        except InfeasibleError as error:
            plan = make_plan(large, replace(settings, budget_bytes=error.smallest_feasible_bytes))
        return replace(plan, forecast=replace(plan.forecast, actions=tuple(map(_shrunk, plan.actions))))

    def first(trace: Trace, settings: Settings, allocator: AllocatorHandler, **_: Any) -> tuple[Trace, Plan]:
        return trace, choose(trace, settings)

    with patch("memwall.session.live_plan.planned", first), patch("memwall.session.live_plan.make_plan", choose):
        yield


def _grown(trace: Trace) -> Trace:
    """Returns the trace of a step whose tensors are larger, on a machine whose speeds are the same each time."""
    tiers = tuple(
        replace(
            tier,
            write_bytes_per_second=DISK_BYTES_PER_SECOND,
            read_bytes_per_second=DISK_BYTES_PER_SECOND,
            free_bytes=1 << 50,
        )
        for tier in trace.machine.tiers
    )
    machine = replace(
        trace.machine,
        tiers=tiers,
        copy_seconds_per_byte=1 / BYTES_PER_SECOND,
        fault_seconds_per_byte=1 / BYTES_PER_SECOND,
        huge_fault_seconds_per_byte=0.5 / BYTES_PER_SECOND,
    )
    modules = tuple(replace(module, parameter_bytes=WEIGHTS * module.parameter_bytes) for module in trace.modules)
    steps = tuple(map(_grown_step, trace.steps))
    return replace(trace, machine=machine, modules=modules, steps=steps, base_bytes=BASE_BYTES, workspace_bytes=0)


def _grown_step(step: Step) -> Step:
    scales = tuple(WEIGHTS if storage.category in _OF_WEIGHTS else VALUES for storage in step.storages)
    storages = tuple(replace(one, nbytes=scale * one.nbytes) for one, scale in zip(step.storages, scales, strict=True))
    ops = []
    for op in step.ops:
        moved_bytes = sum(storages[index].nbytes for index in {*op.inputs, *op.outputs})
        flops = VALUES * op.flops
        ops.append(replace(op, flops=flops, seconds=moved_bytes / BYTES_PER_SECOND + flops / FLOPS_PER_SECOND))
    saved = tuple(replace(one, nbytes=scales[one.storage] * one.nbytes) for one in step.saved)
    return replace(step, storages=storages, ops=tuple(ops), saved=saved)


def _shrunk(action: Action) -> Action:
    scale, names = _BYTES.get(type(action), (1, ()))
    changes = {name: getattr(action, name) // scale for name in names}
    if isinstance(action, Offload):
        changes["window_bytes"] = max(changes["window_bytes"], _WINDOW_BYTES)
    return replace(action, **changes) if names else action
