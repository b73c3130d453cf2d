"""The budget of a CUDA device: torch's allocator is held to it, and gives way where a step would end the run."""

import logging
from collections.abc import Callable

import torch

from memwall.apply.memory.yielding import Yielding
from memwall.machine.meter import CudaMeter, Meter
from memwall.store.room import CudaLimit, cuda_segment_room_bytes
from memwall.torch_internals.sharding import local_part
from memwall.torch_internals.storages import dense_parts
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# The first step under a plan proves actions, for which tensors live longer than they will; the second one begins with
# the segments that are in use, as is foreseen, and the third with those that a step under the plan has left.
_NUM_FIRST_STEPS = 2
# What an optimizer may have besides its state at once, as a multiple of its gradients: torch's need two, for an update
# and its denominators. Where segments have less room its operations are watched, which costs time for each; what lies
# free in segments is in pieces, and does not count.
_OPTIMIZER_COPIES = 4


class DeviceBudget:
    """Is told of plans and steps; does nothing where the model is not on a CUDA device."""

    def __init__(self) -> None:
        self._limit = CudaLimit()
        self._yielding: Yielding | None = None
        self._recording: Yielding | None = None
        self._meter: CudaMeter | None = None
        self._num_steps_to_watch = self._num_retries = self._num_steps = 0
        self._limit_bytes = self._budget_bytes = 0

    @property
    def is_kept(self) -> bool:
        """Tells whether the allocator was held to the budget under the present plan, and has not passed it.

        What it holds then is no more than it may keep, whatever was foreseen. What it gave way to in the first step
        under the plan, which proves actions, no other step needs.
        """
        return self._limit.place is not None and (self._num_steps < _NUM_FIRST_STEPS or not self._limit.has_yielded)

    def hold(self, meter: Meter, budget_bytes: int) -> None:
        """Holds the allocator to a budget under a new plan, or in the step that is recorded for one.

        Args:
            budget_bytes: of the process, as the meter counts it: what lies beside segments is not torch's to take.
        """
        if not isinstance(meter, CudaMeter) or not budget_bytes:
            return
        self._meter, self._budget_bytes = meter, budget_bytes
        self._limit_bytes = budget_bytes - meter.base_bytes(0)
        if meter.others_bytes():
            _log.warning(
                "other processes hold %s of %s: that is not counted as this run's, and this run cannot have it",
                format_bytes(meter.others_bytes() or 0),
                meter.place,
            )
        self._limit.hold(meter.place, self._limit_bytes)
        self._num_steps_to_watch, self._num_retries = _NUM_FIRST_STEPS, _num_retries(self._limit.place)
        self._num_steps = 0

    def begin_recording(self) -> None:
        """Has the limit give way in the step that is recorded, which cannot be done again: a refusal follows it.

        To be called before anything records, which then sees an operation that is repeated once.
        """
        if self._limit.place is not None and self._recording is None:
            self._recording = Yielding(self._limit)

    def look_beside(self) -> None:
        """Holds that step to less where the process has grown beside segments, as by kernels that are loaded."""
        if self._recording is None or self._meter is None or self._limit.place is None or self._limit.has_yielded:
            return
        left_bytes = self._budget_bytes - self._meter.base_bytes(0)
        if left_bytes < self._limit_bytes:
            self._limit_bytes = left_bytes
            self._limit.hold(self._meter.place, left_bytes)
            if torch.cuda.memory_reserved(self._meter.place) > left_bytes:
                torch.cuda.empty_cache()

    def end_recording(self) -> None:
        """Lets go of the allocator until there is a plan. Safe to call twice."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        self._limit.lift()

    def begin_step(self) -> None:
        """Gives back what the steps before have left free, where the next one is foreseen without it.

        To be called before the step is measured: what it finds is the last one's.
        """
        self.end_step()
        if self._limit.place is None:
            return
        num_retries = _num_retries(self._limit.place)
        self._num_steps += 1
        if num_retries > self._num_retries:
            self._num_retries, self._num_steps_to_watch = num_retries, max(1, self._num_steps_to_watch)
            torch.cuda.empty_cache()
        elif self._num_steps == _NUM_FIRST_STEPS:
            torch.cuda.empty_cache()
        if self._num_steps == _NUM_FIRST_STEPS and self._limit.has_yielded:
            self._limit.hold(self._limit.place, self._limit_bytes)

    def saving_begins(self) -> None:
        """Gives back what the last step has left free: copies of a state dict that stay get segments of their own then.

        In pieces of what steps need they would take what these are foreseen to find.
        """
        if self._limit.place is not None:
            self._num_steps_to_watch = max(1, self._num_steps_to_watch)
            torch.cuda.empty_cache()

    def watch_step(self, *, can_be_redone: bool) -> None:
        """Has the limit give way in a step that may not fit, unless that is done again under a plan that needs less.

        It may not fit while none has run under the plan, and after one that filled the budget: free memory lies in
        pieces then, in other ones each time.
        """
        if self._limit.place is not None and self._num_steps_to_watch and not can_be_redone:
            self._num_steps_to_watch -= 1
            self._yielding = Yielding(self._limit)

    def optimizer_begins(
        self, optimizer: torch.optim.Optimizer, make_room: Callable[[torch.OutOfMemoryError], bool]
    ) -> None:
        """Has operations of an optimizer's step repeated where that may find no memory: it cannot be done again.

        Args:
            make_room: called where an operation found none; tells whether to repeat it.
        """
        if self._limit.place is None or self._recording is not None:
            return
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        parts = (part for gradient in gradients for part in dense_parts(local_part(gradient)))
        needed_bytes = _OPTIMIZER_COPIES * sum(part.nbytes for part in parts)
        if cuda_segment_room_bytes(self._limit.place) < needed_bytes:
            gives = self._yielding is not None
            self.end_step()
            self._yielding = Yielding(self._limit, gives=gives, make_room=make_room)

    def end_step(self) -> None:
        """Notes that a step's first optimizer has stepped, or that the step will not end."""
        if self._yielding is not None:
            self._yielding.stop()
            self._yielding = None

    def lift(self) -> None:
        """Lets torch take what it needs, and leaves the process as it was before."""
        self.end_step()
        self.end_recording()


def _num_retries(device: torch.device | None) -> int:
    """Returns how often torch gave free segments back to find room for others."""
    return 0 if device is None else int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
