"""The user's wishes for a plan, and what the run says about itself."""

from msgspec import Struct
from msgspec.structs import replace

from memwall.machine.hardware import Hardware
from memwall.planning.action import Action
from memwall.planning.recordings import Recordings
from memwall.predict.cuda_allocator.held_blocks import Held
from memwall.predict.first_step import FirstStep


class Settings(Struct, frozen=True, kw_only=True):
    """Holds what the user asked for, and what a run that has begun knows besides."""

    budget_bytes: int
    disk: str | None = None
    """Directory for bytes that leave memory; None for the one the trace was recorded with."""
    tier_capacity_bytes: int | None = None
    """The most bytes to take of the next tier; None for all that are free there."""
    no_disk: bool = False
    """Whether a step may write nothing to the disk."""
    allow: tuple[str, ...] = ()
    allow_accumulation: bool = False
    """Whether the loop can be given smaller micro-batches."""
    can_move_state: bool = True
    """Whether the optimizer, as far as it is known, can be stepped a few parameters at a time."""
    is_torchao_loaded: bool = False
    """Whether the process had torchao loaded when the step was recorded."""
    parameters_stay: str = ""
    """Why the model's parameters cannot be on disk between their uses; "" where nothing is known against it."""
    not_here: tuple[tuple[str, str], ...] = ()
    """Techniques, by tag, that what steps the model rules out, and why."""
    is_built_on_disk: bool = False
    """Whether parameters go to disk as they are made, so that building the model needs no room for all of them."""
    lost: tuple[tuple[str, str], ...] = ()
    """Actions, by tag and block, that a run found to change the training."""
    hardware: Hardware | None = None
    """The device to plan for where it is not here; the trace is translated to it."""
    first_step: FirstStep | None = None
    """Needs of the step that a running session has recorded; None where the plan is not for a run that has begun."""
    held: Held | None = None
    """Holds what a CUDA allocator has between two steps of such a session; None where that is not known."""
    standing: tuple[Action, ...] = ()
    """Actions that the recorded step ran under, memwall having been allowed to."""
    recordings: Recordings | None = None
    """Records the same step in other forms; None where that is not possible from here."""

    def with_standing(self, record: type[Action], action: Action | None) -> "Settings":
        """Returns these with the action as the one of its record that the recorded step ran under; None for none."""
        others = tuple(one for one in self.standing if not isinstance(one, record))
        return replace(self, standing=others if action is None else (*others, action))

    def without_evaluation(self) -> "Settings":
        """Returns these for a plan that need not have room for an evaluation."""
        first = self.first_step
        return self if first is None else replace(self, first_step=replace(first, evaluation_batch=0, called_batch=0))
