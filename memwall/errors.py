"""Holds every error that memwall raises on purpose, each with the exit status that the command line gives it.

The message is for the person who reads it at two in the morning: what was asked, what was found, what to do next.
"""

from typing import Self


class MemwallError(Exception):
    """Is the base of all errors; `exit_status` is what the command line exits with (2 is bad input)."""

    exit_status: int = 2

    def without_frames(self) -> Self:
        """Returns the same error without its traceback, whose frames would keep a step's tensors alive."""
        kept = type(self).__new__(type(self), *self.args)
        kept.__dict__.update(self.__dict__)
        return kept


class UsageError(MemwallError):
    """A value given by the user cannot be understood: a size, a path, an option, a script."""


class NotAvailableError(MemwallError):
    """The installed torch lacks what a technique or a figure needs of its insides, or memwall its library in C.

    Attributes:
        name: what is missing, e.g. "torch._C._storage_Use_Count".
    """

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class TraceError(MemwallError):
    """A trace could not be recorded, or a trace file could not be read."""


class NeedsValuesError(TraceError):
    """A step on fake tensors asked for values that only a real one has."""


class PlanError(MemwallError):
    """A plan file could not be read, or does not belong to the model at hand."""


class InfeasibleError(PlanError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_feasible_bytes: the smallest budget for which a plan exists.
        relaxations: what to allow or lower, cheapest first.
        not_modelled: what that figure leaves out.
    """

    exit_status = 3

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        smallest_feasible_bytes: int,
        relaxations: tuple[str, ...] = (),
        not_modelled: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.relaxations = relaxations
        self.not_modelled = not_modelled

    def because(self, reason: str) -> Self:
        """Returns the same error with a reason for its number, in a line of its own after the first."""
        first, _, rest = str(self).partition("\n")
        return type(self)(
            f"{first}\n{reason}\n{rest}",
            budget_bytes=self.budget_bytes,
            smallest_feasible_bytes=self.smallest_feasible_bytes,
            relaxations=self.relaxations,
            not_modelled=self.not_modelled,
        )


class OutOfMemoryError(MemwallError):
    """Memory ran out, and the run cannot go on from there by itself.

    Attributes:
        phase: what ran: "forward", "backward", "optimizer step", "evaluation", "saving", "between steps".
        asked_bytes: what could not be had; 0 where the failure did not say.
        held_bytes: what the process held at most in that phase.
        next_budget_bytes: the budget to run again with; 0 where training needs no less.
    """

    exit_status = 3

    def __init__(
        self, message: str, *, phase: str, asked_bytes: int, held_bytes: int, next_budget_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.asked_bytes = asked_bytes
        self.held_bytes = held_bytes
        self.next_budget_bytes = next_budget_bytes


class RankError(MemwallError):
    """Another rank of the run has failed or is missing, and no rank can train on alone."""

    exit_status = 1


class ApplyError(MemwallError):
    """An action of a plan cannot be applied here; nothing was changed."""


class NoEffectError(ApplyError):
    """An action was applied, and the steps after it show that it does nothing.

    Attributes:
        action: which one, and where it acts.
        expected: what it should do.
        found: what was seen instead.
    """

    def __init__(self, *, action: str, expected: str, found: str) -> None:
        super().__init__(f"{action} has no effect: expected that {expected}; found that {found}")
        self.action, self.expected, self.found = action, expected, found


class NotExactError(ApplyError):
    """An action gave other bits than it says, and the step could not be put right.

    Attributes:
        action: which one, and where it acts.
        found: what differs.
    """

    def __init__(
        self,
        *,
        action: str,
        found: str,
        effect: str = "changes the training, though it says that it does not",
        way_out: str = "",
    ) -> None:
        """Says so.

        Args:
            effect: what the action does, which is an error.
            way_out: what to do; by default no parameter has changed by it, and the plan is to be made without it.
        """
        super().__init__(
            f"{action} {effect}: {found}. "
            + (
                way_out
                or "The run ends before a gradient of this step is used; make the plan without it, or report it with "
                "the model"
            )
        )
        self.action, self.found = action, found


class StoreError(MemwallError):
    """Host or disk space for offloaded bytes is missing, unsuitable or full."""


class OffloadIOError(StoreError):
    """A transfer did not complete: short, failed, or its bytes came back different. The disk is no bad input.

    Attributes:
        path: the file; offset, wanted_bytes, got_bytes: the transfer; errno: the system's number, 0 if none.
    """

    exit_status = 6

    def __init__(self, message: str, *, path: str, offset: int, wanted_bytes: int, got_bytes: int, errno: int) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.wanted_bytes = wanted_bytes
        self.got_bytes = got_bytes
        self.errno = errno


class IntegrationError(MemwallError):
    """A framework (Trainer, Accelerate) is set up in a way the plan cannot work with."""
