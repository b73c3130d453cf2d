"""Has steps with short batches leave blocks alone, for as long as none takes more than foreseen."""

import logging

from memwall.apply.applied import AppliedPlan
from memwall.session.live_plan import LivePlan
from memwall.session.loop.longer_batch import Shape
from memwall.session.loop.short_batches import ShortBatches
from memwall.session.recovery import excess_bytes
from memwall.session.step_borders import StepBorders
from memwall.units import format_bytes

_log = logging.getLogger(__name__)


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
        if self._borders.had_one_forward:
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
