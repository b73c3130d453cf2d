"""A plan in effect: every action applied by its handler, and undone in reverse."""

from dataclasses import dataclass, field
from typing import Any

import torch

from memwall.apply.effect import Effect, Effects
from memwall.apply.optimizer_state.kept_space import kept_space
from memwall.apply.state_technique import StateHandler
from memwall.apply.technique import Handler, Target, handler_of, registered, tag_of
from memwall.errors import NotExactError
from memwall.trace.optimizers import replaces, steps_alike

PROOF_STEPS = 1000
"""Every so many steps actions prove themselves, from the first one under a plan on."""


@dataclass(eq=False, repr=False)
class AppliedPlan(Target):
    """Applies a plan's actions to a model; `undo` leaves no trace of them. `Target` describes what it is given."""

    effects: Effects = field(default_factory=lambda: Effects(()), init=False)
    """To be checked after each optimizer step."""
    _watched: list[tuple[Handler[Any], Effect]] = field(default_factory=list, init=False)
    _num_steps: int = field(default=0, init=False)

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
                found = [(each, each.effect(self)) for each in self.handlers]
                self._watched = [(handler, effect) for handler, effect in found if effect is not None]
                self.effects = Effects([effect for _, effect in self._watched])
                self.on_undo(self._end_watch)
        except BaseException as error:
            try:
                self.undo()
            except BaseException as further:
                error.add_note(f"taking the plan back failed as well: {further!r}")
            raise

    def _end_watch(self) -> None:
        self.effects.close()
        self._watched = []  # effects refer to forwards, and by them to parameters, which would seem to be in use

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

    def can_replace(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells whether an optimizer can go on under the plan in place of the present ones: it trains all they did.

        It cannot where the backward has stepped parameters by the present one already, or commits name its state.
        """
        others = (each for each in self.handlers if not isinstance(each, StateHandler))
        is_free = all(type(each).optimizer_known is Handler.optimizer_known for each in others)
        return is_free and kept_space() is None and all(replaces(optimizer, one) for one in self.optimizers)

    def is_alike(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells whether the plan is as good for an optimizer as for one of the present ones, and does nothing to it."""
        are_untouched = all(type(each).optimizer_known is Handler.optimizer_known for each in self.handlers)
        return are_untouched and kept_space() is None and any(steps_alike(optimizer, one) for one in self.optimizers)

    def begin_step(self) -> None:
        """Prepares a step; to be called before its first forward."""
        self.allocator.begin_step()
        self.blocks.begin_step()
        if self._num_steps % PROOF_STEPS <= 1:
            for handler in self.handlers:
                handler.set_proving(self, is_proving=self._num_steps % PROOF_STEPS == 0)
        self._num_steps += 1

    @property
    def num_steps(self) -> int:
        """Returns how many steps have begun under this plan."""
        return self._num_steps

    @property
    def is_proving(self) -> bool:
        """Tells whether actions prove themselves in the present step."""
        return self._num_steps % PROOF_STEPS == 1

    def is_proof_due(self, proven_at: int) -> bool:
        """Tells whether so many steps have begun since a proof that the next one proves itself again.

        Args:
            proven_at: `num_steps` at that proof.
        """
        return self._num_steps >= proven_at + PROOF_STEPS

    def spare(self, blocks: frozenset[str]) -> None:
        """Has these blocks run as they are from the next forward on, but in steps in which actions prove themselves."""
        is_proven = not self.is_proving and self.effects.are_seen
        self.blocks.spared = blocks if is_proven else frozenset()

    def prove_again(self) -> None:
        """Has actions prove themselves once more in a first step, whose forwards so far were no part of it."""
        if self.is_proving:
            for handler in self.handlers:
                handler.set_proving(self, is_proving=True)

    def check_proofs(self) -> None:
        """Checks that no action has made the gradients others than they are without it; before they are used.

        Raises:
            NotExactError: one has, and could not put it right.
        """
        for handler in self.handlers:
            if found := handler.disproof(self):
                raise NotExactError(action=_name_of(handler), found=found)

    def check_effects(self) -> None:
        """Checks that actions do something; to be called after each optimizer step.

        Raises:
            NoEffectError: one does not, and nobody has been told so.
        """
        for handler, effect in self._watched:
            if handler.lost(self):
                self.effects.forget(effect)
        self.effects.check()

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes of saved tensors moved to the next tier, and back, so far."""
        return (0, 0) if self.engine is None else (self.engine.bytes_written, self.engine.bytes_read)

    @property
    def lost(self) -> dict[tuple[str, str], str]:
        """Returns the reason for each action that was found to change the training, by its tag and block."""
        lost = ((handler, handler.lost(self)) for handler in self.handlers)
        return {(tag_of(one.action), getattr(one.action, "block", "")): reason for one, reason in lost if reason}


def _name_of(handler: Handler[Any]) -> str:
    block = getattr(handler.action, "block", "")
    return f"{tag_of(handler.action)} of '{block}'" if block else tag_of(handler.action)
