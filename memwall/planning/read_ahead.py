"""Which of the optimizer's state comes back while backward runs: what the peak leaves room for, and what that saves.

Backward frees what it has used, and the room that it leaves until the optimizer has run can hold the state that the
optimizer needs first. More room than the step's peak takes is never asked for: state stays in it, and is not read.
"""

from collections.abc import Sequence

import numpy as np

from memwall.planning.actions import OptimizerPlacement, StateAhead
from memwall.planning.candidate import Candidate
from memwall.predict.curve import live_curve, step_seconds
from memwall.predict.state_on_disk import buffer_sizes, gradient_births
from memwall.trace.records import Step, Trace

__all__ = ["is_worth_it", "may_read_ahead", "state_ahead"]

# Gradients at which more may be read; each is a count in the plan, and between them room is left unused.
_NUM_STEPS = 8
# Of a step's seconds, the least that is worth it.
_LEAST_SAVED_SHARE = 0.005


def may_read_ahead(trace: Trace, placement: OptimizerPlacement, found: Candidate) -> bool:
    """Whether anything can be read before the optimizer runs.

    Not where the CPU steps, nor where parameters or saved tensors come back meanwhile, which the disk is busy with. Of
    several backwards the last one is meant, and gradients are counted in one.
    """
    is_one_backward = found.num_parts == 1 and trace.num_micro_batches == 1
    is_idle = found.place.parameters is None and not found.moved_bytes
    return placement.stepped_on != "cpu" and is_one_backward and is_idle


def is_worth_it(step: Step, placement: OptimizerPlacement, earlier: OptimizerPlacement) -> bool:
    """Whether a step is so much shorter with state read ahead as it is to be."""
    saved_seconds = (placement.cost_seconds or 0.0) - (earlier.cost_seconds or 0.0)
    return saved_seconds > _LEAST_SAVED_SHARE * step_seconds(step)


def state_ahead(
    step: Step, sizes: Sequence[int], device: str, placement: OptimizerPlacement, *, share: float = 1.0
) -> tuple[StateAhead, ...]:
    """From which gradient of a step on, how much of the state may be there, so that its peak stays what it is.

    Args:
        step: as it runs under a plan; of its state no more than the optimizer's own buffers is in memory.
        sizes: the state of each parameter, wherever it is.
        share: of the room, how much is used.
    """
    births = gradient_births(step)
    begin = next((number for number, op in enumerate(step.ops) if op.phase == "optimizer"), 0)
    births = [birth for birth in births if birth < begin]
    if not births:
        return ()
    curve = live_curve(step.storages, len(step.ops), device=device)
    in_optimizer = int(curve[begin:].max()) - sum(buffer_sizes(sizes, placement.bucket_bytes))
    highest_from = np.maximum.accumulate(curve[:begin][::-1])[::-1]
    room = np.minimum(int(curve.max()) - highest_from, int(curve.max()) - in_optimizer)
    most_bytes = min(int(share * int(room[births[-1]])), placement.saved_bytes or 0)
    found: dict[int, int] = {}
    for number in range(1, _NUM_STEPS + 1):
        num_bytes = number * most_bytes // _NUM_STEPS
        first = next(count for count, birth in enumerate(births, start=1) if share * int(room[birth]) >= num_bytes)
        if num_bytes > max(found.values(), default=0):
            found[first] = num_bytes
    return tuple(StateAhead(after_gradients=count, buffer_bytes=num_bytes) for count, num_bytes in found.items())
