"""Every error memwall raises on purpose, each with the exit status the command line gives it.

The message is for the person who reads it at two in the morning: what was asked, what was found, what to do next.
"""

from typing import Self


class MemwallError(Exception):
    """Base of all errors; `exit_status` is what the command line exits with (DESIGN: 2 is bad input)."""

    exit_status: int = 2

    def without_frames(self) -> Self:
        """The same error without its traceback: to be kept, where the frames would keep a step's tensors alive."""
        kept = type(self).__new__(type(self), *self.args)
        kept.__dict__.update(self.__dict__)
        return kept


class UsageError(MemwallError):
    """A value given by the user cannot be understood: a size, a path, an option, a script."""


class TraceError(MemwallError):
    """A trace could not be recorded, or a trace file could not be read."""


class PlanError(MemwallError):
    """A plan file could not be read, or does not belong to the model at hand."""


class InfeasibleError(PlanError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_feasible_bytes: the smallest budget for which a plan exists.
        relaxations: what to allow or lower, cheapest first.
    """

    exit_status = 3

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        smallest_feasible_bytes: int,
        relaxations: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.relaxations = relaxations


class ApplyError(MemwallError):
    """An action of a plan cannot be applied here; nothing was changed."""


class StoreError(MemwallError):
    """Host or disk space for offloaded bytes is missing, unsuitable or full."""


class OffloadIOError(StoreError):
    """A transfer did not complete: short, failed, or its bytes came back different.

    Attributes:
        path: the file; offset, wanted_bytes, got_bytes: the transfer; errno: the system's number, 0 if none.
    """

    def __init__(self, message: str, *, path: str, offset: int, wanted_bytes: int, got_bytes: int, errno: int) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.wanted_bytes = wanted_bytes
        self.got_bytes = got_bytes
        self.errno = errno


class IntegrationError(MemwallError):
    """A framework (Trainer, Accelerate) is set up in a way the plan cannot work with."""
