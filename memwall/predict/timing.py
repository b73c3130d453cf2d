"""Seconds per operation from recorded times, with the noise of a single recording taken out where blocks repeat."""

from collections.abc import Sequence
from statistics import median

import msgspec

from memwall.predict.call_rules import BlockCalls
from memwall.trace.records import COMPILED_CODE, Step


def smoothed(step: Step, blocks: Sequence[BlockCalls]) -> Step:
    """Returns the step with each operation's seconds replaced by the median over equal blocks at the same place.

    Calls are equal when they run the same operations in forward, and in backward, in the same order. A first step
    meets cold caches and lazily initialised libraries: one slow outlier must not decide what is recomputed.
    """
    seconds = [op.seconds for op in step.ops]
    for is_backward in (False, True):
        groups: dict[tuple[int, ...], list[int]] = {}
        for block in blocks:
            for call in block.calls:
                start, end = (call.backward_start, call.backward_end) if is_backward else (call.start, call.end)
                if start >= 0:
                    signature = tuple(op.name for op in step.ops[start:end])
                    groups.setdefault(signature, []).append(start)
        for signature, starts in groups.items():
            if len(starts) < 2:
                continue
            for offset in range(len(signature)):
                typical = median(step.ops[start + offset].seconds for start in starts)
                for start in starts:
                    seconds[start + offset] = typical
    ops = tuple(
        op if op.seconds == new else msgspec.structs.replace(op, seconds=new)
        for op, new in zip(step.ops, seconds, strict=True)
    )
    return msgspec.structs.replace(step, ops=ops)


def first_touch_seconds(step: Step, names: Sequence[str], fault_seconds_per_byte: float) -> float:
    """Returns the most that pages becoming resident can have cost in a recorded step.

    An operation touches what it allocates, so a page fault's time is part of the recorded time of such an operation. Of
    compiled code it is not: that is recorded without.
    """
    born_bytes = [0] * len(step.ops)
    for storage in step.storages:
        if 0 <= storage.birth < len(step.ops) and storage.device == "cpu":
            born_bytes[storage.birth] += storage.nbytes
    return sum(
        min(op.seconds, num_bytes * fault_seconds_per_byte)
        for op, num_bytes in zip(step.ops, born_bytes, strict=True)
        if names[op.name] != COMPILED_CODE
    )
