"""Turns the log of a recorded step into records, and a first step into the steady one that follows it."""

from collections.abc import Sequence

import msgspec

from memwall.trace.event_log import EventLog
from memwall.trace.modules import ModuleTable
from memwall.trace.records import Category, ModuleCall, Op, SavedTensor, Step, Storage, Trace

__all__ = ["build_step", "steady_after", "steady_step"]


def build_step(
    log: EventLog,
    table: ModuleTable,
    names: dict[str, int],
    *,
    kind: str,
    wall_seconds: float,
    process_peak_bytes: int,
) -> Step:
    """Records of a step as it would be without parking.

    Args:
        names: operator names seen so far and their indices; new ones are added.
        kind: "first" if the optimizer created its state in this step, else "steady".
    """
    num_ops = len(log.op_name)
    released = [at if at >= 0 else num_ops for at in log.saved_released_at]
    last_release = [0] * len(log.storage_bytes)
    is_saved = [False] * len(log.storage_bytes)
    for storage, at in zip(log.saved_storage, released, strict=True):
        if storage >= 0:
            last_release[storage] = max(last_release[storage], at)
            is_saved[storage] = True
    call_of_op = [
        log.call_of_node(log.op_sequence[op]) if 0 <= log.op_sequence[op] < 1 << 63 else log.op_call[op]
        for op in range(num_ops)
    ]
    died = [at if at >= 0 else num_ops for at in log.storage_died]
    dropped = _drops(log, died)
    batched = _batched(log)
    storages = tuple(
        Storage(
            nbytes=log.storage_bytes[i],
            device=log.storage_device[i],
            category=_category(log, i, is_saved[i]),
            birth=log.storage_birth[i],
            dropped=dropped[i],
            death=max(died[i], last_release[i]),
            module=_module(log, call_of_op[log.storage_birth[i]] if log.storage_birth[i] >= 0 else -1),
            phase=log.op_phase[log.storage_birth[i]] if 0 <= log.storage_birth[i] < num_ops else "other",
            batched=batched[i],
            line=log.storage_line[i],
            dtype=log.storage_dtype[i],
        )
        for i in range(len(log.storage_bytes))
    )
    ops = tuple(
        Op(
            name=names.setdefault(log.op_name[i], len(names)),
            module=_module(log, call_of_op[i]),
            phase=log.op_phase[i],
            seconds=log.op_seconds[i],
            flops=log.op_flops[i],
            inputs=log.op_inputs[i],
            outputs=log.op_outputs[i],
            writes=log.op_writes[i],
        )
        for i in range(num_ops)
    )
    saved = tuple(
        SavedTensor(
            storage=log.saved_storage[i],
            module=_module(log, log.saved_call[i]),
            nbytes=log.saved_bytes[i],
            packed=log.saved_packed[i],
            unpacked=log.saved_unpacked_at[i] if log.saved_unpacked_at[i] >= 0 else num_ops,
            released=released[i],
        )
        for i in range(len(log.saved_storage))
        if log.saved_storage[i] >= 0
    )
    return Step(
        kind="first" if kind == "first" else "steady",
        ops=ops,
        storages=storages,
        saved=saved,
        calls=_calls(log, call_of_op),
        marks=tuple(log.marks),
        wall_seconds=wall_seconds,
        process_peak_bytes=process_peak_bytes,
    )


def steady_after(first: Step, *, gradients_persist: bool) -> Step:
    """The step that follows a first one: the optimizer's state, and gradients that were not freed, are there already.

    Temporaries of the optimizer that only creating the state needs are kept: an upper bound, and a small one.
    """
    if first.kind == "steady":
        return first
    standing: tuple[Category, ...] = ("optimizer_state", "gradient") if gradients_persist else ("optimizer_state",)
    storages = tuple(
        msgspec.structs.replace(s, birth=-1) if s.category in standing and s.death >= len(first.ops) else s
        for s in first.storages
    )
    return msgspec.structs.replace(first, kind="steady", storages=storages, process_peak_bytes=0)


def steady_step(trace: Trace) -> Step:
    """The step that repeats: recorded as such, or derived from the first."""
    for step in reversed(trace.steps):
        if step.kind == "steady":
            return step
    return steady_after(trace.steps[-1], gradients_persist=trace.gradients_persist)


def _module(log: EventLog, call: int) -> int:
    return log.call_module[call] if call >= 0 else -1


def _category(log: EventLog, index: int, is_saved: bool) -> Category:
    known = log.storage_category[index]
    if known is not None:
        return known
    if log.storage_birth[index] < 0:
        return "input"
    return "activation" if is_saved else "temporary"


def _drops(log: EventLog, died: Sequence[int]) -> list[int]:
    """When all but autograd let go of each storage: measured if its savings moved away, estimated if they kept it.

    A value is held by the Python frame that passes it on: so from its last use in forward until the end of the
    outermost module call that contains that use but not its birth.
    """
    drops = list(died)
    num_ops = len(log.op_name)
    saved_storages = {s for s, moved in zip(log.saved_storage, log.saved_moved, strict=True) if s >= 0 and not moved}
    last_use = {s: log.storage_birth[s] for s in saved_storages if log.storage_birth[s] >= 0}
    for op in range(num_ops):
        if log.op_phase[op] in ("forward", "loss"):
            for storage in (*log.op_inputs[op], *log.op_outputs[op]):
                if storage in last_use:
                    last_use[storage] = op
    for storage, op in last_use.items():
        birth, end = log.storage_birth[storage], op + 1
        call = log.op_call[op]
        while call >= 0 and log.call_start[call] > birth:
            end = log.call_end[call]
            call = log.call_parent[call]
        drops[storage] = min(died[storage], end)
    return drops


def _batched(log: EventLog) -> list[bool]:
    """Which storages grow with the micro-batch: reached from the inputs, and shaped like no parameter."""
    num = len(log.storage_bytes)
    size = log.micro_batch
    if size <= 0:
        return [False] * num
    fixed_shapes: set[tuple[int, ...]] = set()
    for i in range(num):
        if log.storage_category[i] in ("parameter", "buffer", "optimizer_state", "gradient"):
            fixed_shapes.update({log.storage_shape[i], log.storage_shape[i][::-1], (1, *log.storage_shape[i])})
    fed = [
        log.storage_birth[i] < 0 and log.storage_category[i] is None and log.storage_shape[i][:1] == (size,)
        for i in range(num)
    ]
    for op in range(len(log.op_name)):
        if log.op_phase[op] != "optimizer" and any(fed[i] for i in log.op_inputs[op]):
            for output in (*log.op_outputs[op], *([log.op_workspace[op]] if op in log.op_workspace else [])):
                fed[output] = fed[output] or log.storage_birth[output] >= 0
    return [
        fed[i]
        and log.storage_category[i] in (None, "activation", "temporary", "input")
        and log.storage_shape[i] not in fixed_shapes
        and len(log.storage_shape[i]) > 0
        and log.storage_shape[i][0] % size == 0
        for i in range(num)
    ]


def _calls(log: EventLog, call_of_op: Sequence[int]) -> tuple[ModuleCall, ...]:
    starts = [-1] * len(log.call_module)
    ends = [-1] * len(log.call_module)
    for op, call in enumerate(call_of_op):
        if log.op_phase[op] != "backward":
            continue
        while call >= 0:
            starts[call] = op if starts[call] < 0 else starts[call]
            ends[call] = op + 1
            call = log.call_parent[call]
    return tuple(
        ModuleCall(
            module=log.call_module[i],
            start=log.call_start[i],
            end=log.call_end[i] if log.call_end[i] >= 0 else len(log.op_name),
            backward_start=starts[i],
            backward_end=ends[i],
            inputs=log.call_inputs[i],
            outputs=log.call_outputs[i],
        )
        for i in range(len(log.call_module))
    )
