"""Turns the log of a recorded step into records, and a first step into the steady one that follows it."""

from collections.abc import Mapping, Sequence

import msgspec

from memwall.trace.event_log import EventLog, LoggedStorage
from memwall.trace.modules import ModuleTable
from memwall.trace.records import Category, GradientUse, ModuleCall, Op, SavedTensor, Step, Storage, Trace


def build_step(
    log: EventLog,
    table: ModuleTable,
    names: dict[str, int],
    *,
    kind: str,
    wall_seconds: float,
    process_peak_bytes: int,
    gradient_use: GradientUse | None = None,
) -> Step:
    """Returns the records of a step as it would be without parking.

    Args:
        names: operator names seen so far and their indices; new ones are added.
        kind: "first" if the optimizer created its state in this step, else "steady".
    """
    num_ops = len(log.ops)

    def until_end(at: int) -> int:
        return at if at >= 0 else num_ops

    last_release: dict[int, int] = {}
    """Operations at which storages that were saved are released, by storage."""
    for saving in log.savings:
        last_release[saving.storage] = max(last_release.get(saving.storage, 0), until_end(saving.released))
    call_of_op = [log.call_of_node(op.sequence) if 0 <= op.sequence < 1 << 63 else op.call for op in log.ops]
    kept = _kept(log, last_release)
    dropped = _drops(log) | dict.fromkeys(kept, num_ops)
    batched = _batched(log)
    storages = tuple(
        Storage(
            nbytes=storage.nbytes,
            device=storage.device,
            category=_category(storage, is_saved=index in last_release),
            birth=storage.birth,
            dropped=dropped.get(index, until_end(storage.died)),
            death=max(until_end(storage.died), last_release.get(index, 0)),
            module=_module(log, call_of_op[storage.birth] if 0 <= storage.birth < num_ops else -1),
            phase=log.ops[storage.birth].phase if 0 <= storage.birth < num_ops else "other",
            batched=batched[index],
            line=storage.line,
            dtype=storage.dtype,
            copied=storage.copied,
            stream=storage.stream,
            unit=storage.unit,
            is_kept=index in kept,
        )
        for index, storage in enumerate(log.storages)
    )
    ops = tuple(
        Op(
            name=names.setdefault(op.name, len(names)),
            module=_module(log, call),
            phase=op.phase,
            seconds=op.seconds,
            flops=op.flops,
            inputs=op.inputs,
            outputs=op.outputs,
            writes=op.writes,
        )
        for op, call in zip(log.ops, call_of_op, strict=True)
    )
    saved = tuple(
        SavedTensor(
            storage=saving.storage,
            module=_module(log, saving.call),
            nbytes=saving.nbytes,
            packed=saving.packed,
            unpacked=until_end(saving.unpacked),
            released=until_end(saving.released),
        )
        for saving in log.savings
        if saving.storage >= 0
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
        launch_seconds=log.launch_seconds,
        gradient_use=gradient_use,
    )


def steady_after(first: Step, *, gradients_persist: bool) -> Step:
    """Returns the step that follows a first one.

    The optimizer's state is there already, as are gradients that are not freed, what libraries hold, and graphs that
    the loop holds until it has made the next ones.

    Temporaries of the optimizer that only creating the state needs are kept: an upper bound, and a small one.
    """
    if first.kind == "steady":
        return _with_held_over(first)
    standing: tuple[Category, ...] = ("optimizer_state", "gradient") if gradients_persist else ("optimizer_state",)
    made = {index for op in first.ops for index in (*op.outputs, *op.writes)}

    def stays(index: int, storage: Storage) -> bool:
        if storage.death < len(first.ops):
            return False
        # What no operation returns and outlives the step is a library's.
        return storage.category in standing or (storage.category == "temporary" and index not in made)

    storages = tuple(msgspec.structs.replace(s, birth=-1) if stays(i, s) else s for i, s in enumerate(first.storages))
    return _with_held_over(msgspec.structs.replace(first, kind="steady", storages=storages, process_peak_bytes=0))


def _with_held_over(step: Step) -> Step:
    """Returns a steady step with what a loop holds of the step before until its variables get what this one makes.

    That is what a model has returned, until it returns again. After `backward(retain_graph=True)` it is the graph as
    well: until the next step's backward begins everything is there twice.
    """
    if any(storage.held_over >= 0 for storage in step.storages):
        return step
    end, begin = len(step.ops), next((at for name, at in step.marks if name == "backward"), 0)
    held = {save.storage: begin for save in step.saved if save.unpacked < end <= save.released}
    ends = {index: _end_of_call(step, one.birth) for index, one in enumerate(step.storages) if one.is_kept}
    again = [
        msgspec.structs.replace(
            step.storages[index], birth=-1, dropped=until, death=until, held_over=index, is_kept=False
        )
        for index, until in (held | ends).items()
        if step.storages[index].is_kept
        or (step.storages[index].birth >= 0 and step.storages[index].category == "activation")
    ]
    return msgspec.structs.replace(step, storages=(*step.storages, *again)) if again else step


def _end_of_call(step: Step, number: int) -> int:
    """Returns the operation before which the outermost module call that contains one ends; the next one if none."""
    return max((call.end for call in step.calls if call.start <= number < call.end), default=number + 1)


def steady_step(trace: Trace) -> Step:
    """Returns the step that repeats: recorded as such, or derived from the first."""
    for step in reversed(trace.steps):
        if step.kind == "steady":
            return _with_held_over(step)
    return steady_after(trace.steps[-1], gradients_persist=trace.gradients_persist)


def _module(log: EventLog, call: int) -> int:
    return log.calls[call].module if call >= 0 else -1


def _category(storage: LoggedStorage, *, is_saved: bool) -> Category:
    if storage.category is not None:
        return storage.category
    if storage.birth < 0:
        return "input"
    return "activation" if is_saved else "temporary"


def _kept(log: EventLog, last_release: Mapping[int, int]) -> set[int]:
    """Returns the storages that forward has made and that the loop, not autograd, holds when the recording ends."""
    returned = {index for op in log.ops if op.phase in ("forward", "loss") for index in op.outputs}
    return {
        index
        for index in returned
        if log.storages[index].died < 0 <= log.storages[index].birth
        and log.storages[index].category is None
        and last_release.get(index, 0) < len(log.ops)
    }


def _drops(log: EventLog) -> dict[int, int]:
    """Returns when all but autograd let go of a storage, by storage; of those that autograd kept where they were.

    Measured it is where savings moved away, so that others are left out; here it is estimated. A value is held by the
    Python frame that passes it on: so from its last use in forward until the end of the outermost module call that
    contains that use but not its birth.
    """
    last_use = {
        saving.storage: log.storages[saving.storage].birth
        for saving in log.savings
        if saving.storage >= 0 and not saving.was_moved and log.storages[saving.storage].birth >= 0
    }
    for number, op in enumerate(log.ops):
        if op.phase in ("forward", "loss"):
            for index in (*op.inputs, *op.outputs):
                if index in last_use:
                    last_use[index] = number
    drops = {}
    for index, number in last_use.items():
        storage, end = log.storages[index], number + 1
        call = log.ops[number].call
        while call >= 0 and log.calls[call].start > storage.birth:
            end = log.calls[call].end
            call = log.calls[call].parent
        drops[index] = min(storage.died if storage.died >= 0 else len(log.ops), end)
    return drops


def _batched(log: EventLog) -> list[bool]:
    """Returns which storages grow with the micro-batch: reached from the inputs, and shaped like no parameter."""
    size = log.micro_batch
    if size <= 0:
        return [False] * len(log.storages)
    fixed_shapes: set[tuple[int, ...]] = set()
    for storage in log.storages:
        if storage.category in ("parameter", "buffer", "optimizer_state", "gradient"):
            fixed_shapes.update({storage.shape, storage.shape[::-1], (1, *storage.shape)})
    fed = [s.birth < 0 and s.category is None and s.shape[:1] == (size,) for s in log.storages]
    for op in log.ops:
        if op.phase != "optimizer" and any(fed[index] for index in op.inputs):
            for output in (*op.outputs, *op.workspaces):
                fed[output] = fed[output] or log.storages[output].birth >= 0
    return [
        is_fed
        and storage.category in (None, "activation", "temporary", "input")
        and storage.shape not in fixed_shapes
        and len(storage.shape) > 0
        and storage.shape[0] % size == 0
        for is_fed, storage in zip(fed, log.storages, strict=True)
    ]


def _calls(log: EventLog, call_of_op: Sequence[int]) -> tuple[ModuleCall, ...]:
    starts = [-1] * len(log.calls)
    ends = [-1] * len(log.calls)
    for number, (op, call) in enumerate(zip(log.ops, call_of_op, strict=True)):
        if op.phase != "backward":
            continue
        while call >= 0:
            starts[call] = number if starts[call] < 0 else starts[call]
            ends[call] = number + 1
            call = log.calls[call].parent
    return tuple(
        ModuleCall(
            module=call.module,
            start=call.start,
            end=call.end if call.end >= 0 else len(log.ops),
            backward_start=starts[index],
            backward_end=ends[index],
            inputs=call.inputs,
            outputs=call.outputs,
        )
        for index, call in enumerate(log.calls)
    )
