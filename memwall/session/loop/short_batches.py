"""Says which blocks a batch that is shorter than the recorded one leaves alone: it has room for what they save.

A plan is made from the step of the longest batch so far, and what it recomputes or moves costs shorter ones time as
well, though they would fit without. Each step treats as many blocks as its own length calls for: none of it is planned
anew, and no step holds more than the plan foresees. What is recomputed or moved has the same bits as what is kept, so
that training does not depend on the choice.
"""

import logging
from typing import NamedTuple

from memwall.apply.applied import AppliedPlan
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.session.live_plan import LivePlan
from memwall.session.loop.longer_batch import Shape, growth_of
from memwall.session.recovery import excess_bytes
from memwall.session.step_borders import StepBorders
from memwall.trace.records import Trace
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_STANDING = ("parameter", "gradient", "optimizer_state", "buffer")
"""Categories of storages that are there whatever the length of the batch."""


class _Treated(NamedTuple):
    path: str
    saved_bytes: int
    cost_seconds: float


class ShortBatches:
    """Knows of one plan what its blocks save and cost, the one first that costs most for its bytes.

    Args:
        trace: of the step that the plan was made from.
        recorded: shapes of all tensors that the model was called with in that step; () where they are not known.
    """

    def __init__(self, trace: Trace, plan: Plan, recorded: tuple[Shape, ...]) -> None:
        self.plan, self._is_told = plan, False
        # Of a trace that has come back, as that of a stage has, they are not known. Under a plan that divides batches
        # each part is smaller than what was recorded, and the plan counts on that.
        is_divided = any(isinstance(action, Accumulate) for action in plan.actions)
        is_known = bool(recorded) and recorded[0] == trace.input_shape and not is_divided
        self._recorded = recorded if is_known else ()
        fixed = sum(s.nbytes for s in trace.steps[0].storages if s.category in _STANDING)
        # Nor does a length change what the process has beside tensors.
        fixed += trace.base_bytes + trace.workspace_bytes
        self._passing_bytes = max(0, plan.forecast.steady_process_bytes - fixed)
        blocks: dict[str, _Treated] = {}
        for action in plan.actions:
            path = getattr(action, "block", "")
            if path:
                known = blocks.get(path, _Treated(path, 0, 0.0))
                saved_bytes = known.saved_bytes + (action.saved_bytes or self._passing_bytes)  # unknown: all there is
                blocks[path] = _Treated(path, saved_bytes, known.cost_seconds + (action.cost_seconds or 0.0))
        self.blocks = sorted(blocks.values(), key=lambda one: -one.cost_seconds / max(1, one.saved_bytes))

    def spared(self, shapes: tuple[Shape, ...]) -> frozenset[str]:
        """Returns the paths of the blocks that a step with such a batch leaves alone.

        Of several tensors, as the two sequences of a translation, the one that shrinks least counts. What the step
        holds at any instant is a part that no length changes and, at most, its share of all else. What spared blocks
        save beside that has to fit into the share that is missing.
        """
        growth = _growth(shapes, self._recorded)
        if growth is None:
            return frozenset()
        room_bytes = (1.0 / growth - 1.0) * self._passing_bytes
        found = set()
        for block in self.blocks:
            if block.saved_bytes <= room_bytes:
                found.add(block.path)
                room_bytes -= block.saved_bytes
        if found and not self._is_told:
            self._is_told = True
            _log.info("a batch of %s is a short one: %d blocks are left as they are", [*map(list, shapes)], len(found))
        return frozenset(found)


def _growth(shapes: tuple[Shape, ...], recorded: tuple[Shape, ...]) -> float | None:
    """Returns the most that tensors have grown by, of those with more than samples where there are any.

    The first dimension may be the length, as in torch's own transformers: where it grows, it counts as one as well.
    """
    if [*map(len, shapes)] != [*map(len, recorded)] or any(0 in shape for shape in (*shapes, *recorded)):
        return None
    pairs = [*zip(shapes, recorded, strict=True)]
    counted = [pair for pair in pairs if len(pair[0]) > 1] or pairs
    return max((growth_of(now, then) * max(1.0, now[0] / then[0]) for now, then in counted), default=None)


class SparedBlocks:
    """Decides as each step begins, where a step is one forward of one process.

    Ranks have to run blocks equally often, since some wait for each other within. On CUDA it was not tried what is left
    of segments where lengths change.
    """

    def __init__(self, borders: StepBorders, live: LivePlan) -> None:
        self._borders, self._live = borders, live
        self._short: ShortBatches | None = None
        self._recorded: tuple[Shape, ...] = ()
        """Holds the shapes that the model was called with in the last step that was recorded."""
        self._are_there = False
        """Whether the step that goes on leaves blocks alone."""
        self._can_be = True

    def note_recorded(self) -> None:
        """Notes what the model is called with in a step that is recorded."""
        self._recorded = self._borders.batch_shapes

    def begin_step(self, applied: AppliedPlan) -> None:
        """Has a batch that is shorter than the plan's leave blocks alone."""
        plan, trace, self._are_there = self._live.plan, self._live.trace, False
        if plan is None or trace is None or trace.device != "cpu" or self._live.ranks is not None or not self._can_be:
            return
        if self._short is None or self._short.plan is not plan:
            self._short = ShortBatches(trace, plan, self._recorded)
        if self._short.blocks and self._borders.had_one_forward:
            applied.spare(self._short.spared(self._borders.batch_shapes))
            self._are_there = bool(applied.blocks.spared)

    def were_misjudged(self, peak_bytes: int) -> bool:
        """Tells whether a step that left blocks alone took more than foreseen; then no further one does."""
        plan = self._live.plan
        num_bytes = excess_bytes(plan, peak_bytes) if self._are_there and plan is not None else 0
        if num_bytes:
            self._can_be = False
            _log.warning(
                "a step with a short batch used %s more than foreseen; all of the plan is done in every step again",
                format_bytes(num_bytes),
            )
        return num_bytes > 0
