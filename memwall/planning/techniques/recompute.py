"""Recompute: a block's forward runs again in backward instead of keeping what it saves."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from memwall.planning.action import Action
from memwall.planning.menu import Costs, Menu
from memwall.planning.paths import block_ranges
from memwall.planning.technique import Technique
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.treatment import StepModel
from memwall.trace.records import COMPILED_CODE, ModuleCall, Trace

# What the executor itself costs, measured on two cores with torch 2.13 (benchmarks/executor_cost.py, 2026-11-20).
_CHECKPOINT_SECONDS = 650e-6  # one torch checkpoint of a block: frame, RNG state, hooks
_SELECT_SECONDS_PER_OP = 40e-6  # one operation under selective checkpointing, forward and recomputation together
# Smaller results are not kept on a CPU: malloc puts them into what larger tensors have just left, which the next of
# these then have no place in. Of 514 of 100 bytes, kept from a loop over tensors of 48 KiB, the process grew by 22 MiB.
_LEAST_KEPT_BYTES = 4 << 10
# Selective points of a block: each makes the program slower to solve.
_MOST_POINTS = 6


class Recompute(Action, frozen=True, kw_only=True, tag="recompute"):
    """Runs a block's forward again in backward instead of keeping what it saves."""

    block: str
    """Path of the module."""
    kept_ops: tuple[int, ...] = ()
    """Operations whose results are kept, numbered within the block as selective checkpointing counts; () = none."""
    kept_names: tuple[str, ...] = ()
    """Their names. Where another operation runs in such a place, that call keeps nothing from there on."""
    num_ops: int = 0
    """Operations the block was seen to run."""

    def __post_init__(self) -> None:
        if self.kept_names and len(self.kept_names) != len(self.kept_ops):
            raise ValueError(f"kept_names names {len(self.kept_names)} of {len(self.kept_ops)} kept_ops")


class _Recompute(Technique[Recompute]):
    record = Recompute
    order = 40
    block_levers = {"full": "recompute", "select": "recompute, keep some"}  # noqa: RUF012

    def block_options(
        self, trace: Trace, model: StepModel, block: BlockCalls, costs: Costs, offered: Sequence[str]
    ) -> Iterator[tuple[str, Treatment, str]]:
        if can_recompute(trace, model, block) is not None:
            return
        yield "full", Treatment(recompute=True, min_bytes=costs.min_bytes), ""
        for number, kept in enumerate(_selective_points(model, block), start=1):
            yield f"select-{number}", Treatment(recompute=True, kept_ops=kept, min_bytes=costs.min_bytes), ""

    def host_seconds(self, model: StepModel, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> float:
        if not treatment.recompute:
            return 0.0
        selecting_seconds = _SELECT_SECONDS_PER_OP * len(model.counted_ops(call)) if treatment.kept_ops else 0.0
        return _CHECKPOINT_SECONDS + selecting_seconds

    def block_action(self, menu: Menu, number: int, device: str) -> Recompute | None:
        treatment = menu.treatments[number]
        if treatment is None or not treatment.recompute:
            return None
        return Recompute(
            block=menu.block.path,
            kept_ops=treatment.kept_ops,
            kept_names=tuple(menu.op_names[op] for op in treatment.kept_ops),
            num_ops=len(menu.op_names),
            saved_bytes=menu.freed_bytes[number],
            cost_seconds=menu.options[number].extra_seconds,
        )

    def treatment(self, action: Recompute, other: Treatment) -> Treatment:
        return other.but(recompute=True, kept_ops=action.kept_ops)

    def what(self, action: Recompute) -> str:
        return f"recompute, keep {len(action.kept_ops)} of {action.num_ops} ops" if action.kept_ops else "recompute"

    def where(self, actions: Sequence[Recompute]) -> str:
        return block_ranges([action.block for action in actions])

    def row_key(self, action: Recompute) -> tuple[object, ...]:
        return action.kept_ops, action.num_ops, action.exactness


TECHNIQUE = _Recompute()


def can_recompute(trace: Trace, model: StepModel, block: BlockCalls) -> str | None:
    """Returns None if recomputing the block is legal and frees something, else why not.

    A forward that writes to a buffer would write twice, and read what it wrote. The executor spares the running
    statistics of BatchNorm layers, of which a trace shows the counter; it knows no other. And what the block was called
    with must still be the same when backward calls it again.
    """
    if model.is_leaf_like(block):
        return f"'{block.path}' saves nothing but what it was called with"
    for call in block.calls:
        if any(model.is_written(i, call.start, call.backward_start) for i in call.inputs):
            return f"what '{block.path}' is called with is modified in place before its backward"
        for op in model.step.ops[call.start : call.end]:
            if any(model.step.storages[i].category in ("buffer", "parameter") for i in op.writes):
                writer = trace.modules[op.module]
                if not (writer.is_leaf and writer.has_batch_norm):
                    return f"'{writer.path or writer.class_name}' writes to a buffer of its own in forward"
    return None


def _selective_points(model: StepModel, block: BlockCalls) -> list[tuple[int, ...]]:
    """Returns sets of operations whose results are worth keeping: the front of seconds saved per byte kept.

    Candidates make new storages that nobody writes to later; views and in-place operations always run again. A random
    operation that is kept draws nothing when the others run again, so none may come after it.
    """
    step, call, saved = model.step, block.calls[block.first_trained], block.saved[block.first_trained]
    if any(model.names[op.name] == COMPILED_CODE for op in step.ops[call.start : call.end]):
        return []  # compiled code runs as a whole
    again = set(model.recomputed_ops(call, saved, Treatment(recompute=True)))
    last_random = max((op for op in again if _is_random(model.names[step.ops[op].name])), default=-1)
    candidates: list[tuple[float, int, int, float]] = []
    total_seconds = 0.0
    for number, op in enumerate(model.counted_ops(call)):
        if op not in again:
            continue
        record = step.ops[op]
        total_seconds += record.seconds
        fresh = [i for i in record.outputs if step.storages[i].birth == op]
        if not fresh or len(fresh) != len(record.outputs) or record.writes:
            continue
        if any(model.is_written(i, op + 1, call.backward_start) for i in fresh):
            continue
        if op < last_random and _is_random(model.names[record.name]):
            continue
        num_bytes = sum(step.storages[i].nbytes for i in fresh)
        if step.storages[fresh[0]].device == "cpu" and num_bytes < _LEAST_KEPT_BYTES:
            continue
        if num_bytes > 0 and record.seconds > 0:
            candidates.append((-record.seconds / num_bytes, number, num_bytes, record.seconds))
    candidates.sort()
    kept_in_full = sum(step.storages[i].nbytes for i in {step.saved[s].storage for s in saved})
    points: list[tuple[int, ...]] = []
    chosen: list[int] = []
    num_bytes, seconds, next_seconds, next_bytes = 0, 0.0, 0.15 * total_seconds, 0.17 * kept_in_full
    for _, number, size, gain in candidates:
        num_bytes += size
        seconds += gain
        chosen.append(number)
        if num_bytes >= kept_in_full:
            break
        # By seconds and by bytes: where one operation takes most of the time, the bytes still come in parts.
        if (seconds >= next_seconds or num_bytes >= next_bytes) and len(points) < _MOST_POINTS:
            points.append(tuple(sorted(chosen)))
            next_seconds, next_bytes = seconds + 0.17 * total_seconds, num_bytes + 0.17 * kept_in_full
    return points


@cache
def _is_random(name: str) -> bool:
    """Tells whether an operator draws random numbers; one that is unknown here may."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    tags = getattr(operator, "tags", None)
    return tags is None or torch.Tag.nondeterministic_seeded in tags
