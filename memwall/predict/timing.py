"""Seconds per operation from recorded times, with the noise of a single recording taken out where blocks repeat."""

from collections.abc import Sequence
from statistics import median

import msgspec

from memwall.predict.call_rules import BlockCalls
from memwall.trace.records import Step


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
