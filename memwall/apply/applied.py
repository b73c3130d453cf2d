"""A plan in effect: every action applied by its handler, and undone in reverse."""

from dataclasses import dataclass, field

import torch

from memwall.apply.effect import Effects
from memwall.apply.technique import Target, handler_of, registered, tag_of

__all__ = ["AppliedPlan"]


@dataclass(eq=False, repr=False)
class AppliedPlan(Target):
    """Applies a plan's actions to a model; `undo` leaves no trace of them. `Target` describes what it is given."""

    effects: Effects = field(default_factory=lambda: Effects(()), init=False)
    """To be checked after each optimizer step."""

    def apply(self) -> None:
        """Applies every action, or none.

        Raises:
            MemwallError: an action cannot be applied here; nothing has changed then.
        """
        try:
            present = {tag_of(action) for action in self.actions}
            self.handlers = tuple(handler_of(action) for action in self.actions)
            for tag, handler in registered().items():
                if tag not in present:
                    handler.absent(self)
            for each in sorted(self.handlers, key=lambda handler: handler.applies_last):
                if not self.is_set_by_loop(each):
                    each.apply(self)
            if self.is_watched:
                found = (each.effect(self) for each in self.handlers)
                self.effects = Effects([effect for effect in found if effect is not None])
                self.on_undo(self.effects.close)
        except BaseException as error:
            try:
                self.undo()
            except BaseException as further:
                error.add_note(f"taking the plan back failed as well: {further!r}")
            raise

    def undo(self, *, keeps_state: bool = False) -> None:
        """Takes everything back, last first, whatever of it fails.

        Args:
            keeps_state: leave the optimizer's state and the parameters where they are, for the plan that follows.

        Raises:
            BaseException: the first thing that failed, after all else was taken back; its notes name the others.
        """
        failures: list[BaseException] = []
        while self._undo:
            undo, is_state = self._undo.pop()
            if is_state and keeps_state:
                continue
            try:
                undo()
            except BaseException as error:
                failures.append(error)
        if not failures:
            return
        # An interrupt is not to be lost behind an error.
        first = next((error for error in failures if not isinstance(error, Exception)), failures[0])
        for other in failures:
            if other is not first:
                first.add_note(f"taking the plan back failed in another place as well: {other!r}")
        raise first

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, before its first step; what waited for that is applied.

        Raises:
            MemwallError: an action cannot be applied to this optimizer, or not to several.
        """
        if optimizer in self.optimizers:
            return
        self.optimizers = (*self.optimizers, optimizer)
        for handler in self.handlers:
            if not self.is_set_by_loop(handler):
                handler.optimizer_known(self, optimizer)

    def begin_step(self) -> None:
        """Prepares a step; to be called before its first forward."""
        self.allocator.hold_limit()
        self.blocks.begin_step()

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes of saved tensors moved to the next tier, and back, so far."""
        return (0, 0) if self.engine is None else (self.engine.bytes_written, self.engine.bytes_read)

    @property
    def not_recomputed(self) -> dict[str, str]:
        """Returns blocks that gave other results when they ran again, each with the reason; they run plainly now."""
        return self.blocks.not_recomputed() if "blocks" in vars(self) else {}
