"""Parameters and gradients below memory, a few blocks at a time there: forward, backward and step give the same bits.

A block's forward brings its parameters in and lets them go. In backward the gradient of a block's output brings them
back, the block before it is read ahead, and each gradient leaves as soon as autograd has accumulated it. A step
has a few parameters, their gradients and their state in memory at a time; `OptimizerState` asks for them.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.step import StreamedStep
from memwall.apply.streaming.stream_units import Call, Unit, find_units, hooked_parameters, repeated_blocks, tensors_in
from memwall.apply.streaming.streamed_parameter import StreamedParameter
from memwall.errors import ApplyError, MemwallError
from memwall.machine.limits import free_memory_bytes
from memwall.patches import Patches
from memwall.store.scratch import Slot
from memwall.torch_internals.autograd import after_backward, current_node
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.attached import wrap_forward
from memwall.units import format_bytes

_log = logging.getLogger(__name__)


class ParameterStreaming:
    """Keeps the parameters and gradients of a model away until `undo`.

    Args:
        model: on the device of the tier's place.
        tier: where parameters go; those of the model that are in it already stay there.
        blocks: paths of the modules that are brought in as one; None finds what is repeated in the model.
        has_root: whether the model's own parameters leave too, those that are in none of its children. Where its
            forward has begun they cannot.

    Raises:
        ApplyError: a block is missing or cannot be wrapped; nothing has changed then.
        StoreError: no room on disk, or a transfer failed; the parameters are in memory as before then.
    """

    def __init__(
        self, model: nn.Module, tier: ParameterTier, *, blocks: Sequence[str] | None = None, has_root: bool = True
    ) -> None:
        self.tier = tier
        self.failure: MemwallError | None = None
        """Is the first error in a backward: autograd passes it through the caller's code, which may drop it."""
        self._unwrap: list[Callable[[], None]] = []
        # Forward: which unit follows which, as seen last time.
        self._following: dict[tuple[bool, Unit | None, Unit], Unit | None] = {}
        self._path: tuple[Unit | None, Unit | None] = (None, None)
        self._ahead: Unit | None = None
        self._kept: Unit | None = None
        # Backward.
        self._numbers = itertools.count()
        self._last_call: Call | None = None
        self._held: dict[Unit, object] = {}
        self.why_given_up = ""
        """Says why all parameters stay in memory for good; "" where they do not."""
        self._step = StreamedStep(tier)
        units = find_units(model, repeated_blocks(model) if blocks is None else blocks)
        units = units if has_root else tuple(unit for unit in units if unit.module is not model)
        self._unit_names = frozenset(unit.name for unit in units)
        _refuse_hooked(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._order: list[Unit] = []
        self._adopted: dict[StreamedParameter, None] = {}
        used = {id(parameter) for unit in units for parameter in unit.parameters}
        try:
            for member in [member for member in tier if id(member.parameter) in names.keys() - used]:
                tier.give_up(member)  # built on disk, and nobody brings it in
            for unit in units:
                found = [tier.adopt(parameter, names[id(parameter)]) for parameter in unit.parameters]
                unit.members = [member for member in found if member is not None]
                self._adopted.update(dict.fromkeys(unit.members))
                tier.put_away(unit.members)
                if unit.members:
                    self._order.append(unit)
            tier.writes.drain()
            for unit in self._order:
                self._wrap(unit)
            for member in self._members():
                self._watch_gradient(member)
        except BaseException:
            self.undo()
            raise

    def stored(self) -> list[tuple[nn.Parameter, Slot, int]]:
        """Returns each parameter with where its newest elements are on disk, and how many bytes they take there.

        To be called between a step and the next forward.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        with torch.no_grad(), without_subclass_functions():
            self.tier.settle()
        members = [(member, member.values.slot) for member in self._members()]
        for member, _ in members:
            if member.is_aliased:
                member.values.changed()  # as far as anyone can tell: who shares its memory may write there
        return [(member.parameter, slot, member.values.num_bytes) for member, slot in members if slot is not None]

    def let_stay(self, names: Collection[str]) -> None:
        """Has the parameters of these units in memory from now on, and all others on disk between their uses.

        Raises:
            ApplyError: there is no such unit.
            StoreError: no room on disk, or a transfer failed.
        """
        for name in names:
            if name not in self._unit_names:
                raise ApplyError(
                    f"the plan keeps the parameters of '{name}' in memory, but the model has no such module with "
                    "parameters to be moved: make the plan again with `memwall plan`"
                )
        staying = {member for unit in self._order if unit.name in names for member in unit.members}
        for member in self._members():
            member.stays = member in staying
            if member.stays:
                member.values.want()
            else:
                self.tier.put_away([member])

    @property
    def away_bytes(self) -> int:
        """Counts the bytes of the parameters that are on disk between their uses."""
        return sum(member.values.num_bytes for member in self._members() if not member.stays)

    @property
    def others_absent_bytes(self) -> int:
        """Counts the bytes of the tier's parameters that are no part of the model and not in memory now."""
        others = (member.values for member in self.tier if member not in self._adopted)
        return sum(values.num_bytes for values in others if not values.is_resident)

    @property
    def resident_bytes(self) -> int:
        """Counts the memory that these and their gradients take now."""
        return sum(member.resident_bytes for member in self._members() if not member.stays)

    @property
    def bytes_written(self) -> int:
        """Counts the bytes that went to their place so far."""
        return self.tier.place.bytes_written

    @property
    def bytes_read(self) -> int:
        """Counts the bytes fetched from there so far."""
        return self.tier.place.bytes_read

    def end_showing(self) -> None:
        """Lets go of what is shown, between a step and the next forward."""
        with torch.no_grad(), without_subclass_functions():
            self.tier.end_showing()

    def undo(self) -> None:
        """Brings everything back into memory and takes all hooks away.

        Raises:
            StoreError: bytes cannot be read back; those parameters raise when they are used.
        """
        for unwrap in reversed(self._unwrap):
            unwrap()
        self._unwrap = []
        self._let_go_of_backward()
        for member in self._members():
            self.tier.give_up(member)

    def _members(self) -> list[StreamedParameter]:
        """Returns the parameters of this model that are on disk."""
        return [member for member in self._adopted if self.tier.get(member.parameter) is not None]

    def _wrap(self, unit: Unit) -> None:
        self._unwrap.append(wrap_forward(unit.module, partial(self._run, unit), unit.name))

    def _run(self, unit: Unit, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_in_backward = current_node() is not None
        begin = next(self._numbers)
        self._enter(unit, is_in_backward)
        try:
            out = original(*args, **kwargs)
            if torch.is_grad_enabled():
                self._watch_outputs(unit, out, (args, kwargs), None if is_in_backward else begin)
        finally:
            self._leave(unit)
        return out

    def _enter(self, unit: Unit, is_in_backward: bool) -> None:
        if is_in_backward:
            self._hold_recomputed(unit)
        else:
            if self.failure is not None:
                raise self.failure.without_frames()
            self._let_go_of_backward()
            self._step.end()
        self.tier.hold(unit.members, is_exposed=True)
        if not is_in_backward:
            self._read_ahead_of(unit)

    def _read_ahead_of(self, unit: Unit) -> None:
        is_grad, (before_last, last) = torch.is_grad_enabled(), self._path
        if last is not None:
            self._following[is_grad, before_last, last] = unit
        self._path = (last, unit)
        ahead = self._following.get((is_grad, last, unit), self._after(unit))
        if self._kept is not None and self._kept is not unit:
            self.tier.put_away(self._kept.members)
        self._stop_reading_ahead_but(ahead, unit)
        # Where a backward follows the forward's last unit, that unit's is the next to come.
        self._kept = unit if ahead is None else None
        self._ahead = ahead
        if ahead is not None:
            self.tier.begin_read(ahead.members)

    def _after(self, unit: Unit) -> Unit | None:
        """Returns the next in the order of the model, for the time when nothing was seen yet."""
        place = self._order.index(unit) + 1
        return self._order[place] if place < len(self._order) else None

    def _stop_reading_ahead_but(self, *units: Unit | None) -> None:
        """Lets go of what was read ahead, if it was for none of these."""
        if self._ahead is not None and self._ahead not in units:
            self.tier.put_away(self._ahead.members)
            for member in self._ahead.members:
                member.gradient.unload()
            self._ahead = None

    def _leave(self, unit: Unit) -> None:
        if torch.is_grad_enabled():
            for member in unit.members:
                member.has_graph = True
        self.tier.release(unit.members, is_exposed=True, is_kept=unit is self._kept)

    def _watch_outputs(self, unit: Unit, out: Any, given: Any, begin: int | None) -> None:
        """Has the gradient of an output bring the unit back.

        Args:
            begin: the number of the moment when the forward began; None for one that runs again in backward.
        """
        taken = {id(tensor) for tensor in tensors_in(given)}
        outputs = [t for t in tensors_in(out) if t.grad_fn is not None and id(t) not in taken]
        begins: Callable[[Tensor], None] = partial(self._begin_recomputed, unit)
        if outputs and begin is not None:
            self._last_call = Call(unit, begin, next(self._numbers), self._last_call)
            begins = partial(self._begin_backward, self._last_call)
        for tensor in outputs:
            tensor.register_hook(begins)
        if not outputs and any(member.parameter.requires_grad for member in unit.members):
            _log.warning(
                "the plan finds no output of %s that a backward could begin at; its parameters stay in memory, "
                "which may pass the budget: return tensors from its forward, or give a larger budget",
                unit.name or "the model",
            )
            for member in unit.members:
                self.tier.give_up(member)

    def _begin_backward(self, call: Call, _: Tensor) -> None:
        """Brings a unit back, lets go of those that autograd is done with, and begins to read the one before it."""
        if self._last_call is not None:
            self._last_call = None
            before_last, last = self._path
            if last is not None:
                # What the forward did last is followed by its own backward.
                self._following[True, before_last, last] = None
            self._path = (None, None)
        with self._noting_failure():
            if torch.is_grad_enabled():
                self._stay_for_graph_of_backward(call.unit)
                return
            self._hold(call.unit, call.begin)
            # Autograd runs what was computed later first, so units whose call began after this one's end are done.
            for unit, reason in list(self._held.items()):
                if isinstance(reason, int) and reason > call.end:
                    self._release_held(unit)
            before = call.previous() if call.previous is not None else None
            ahead = before.unit if before is not None else None
            self._stop_reading_ahead_but(ahead, call.unit)
            self._ahead = ahead
            if ahead is not None and ahead is not call.unit:
                self.tier.begin_read(ahead.members)
                for member in ahead.members:
                    member.gradient.begin_load()

    def _begin_recomputed(self, unit: Unit, _: Tensor) -> None:
        with self._noting_failure():
            if torch.is_grad_enabled():
                self._stay_for_graph_of_backward(unit)
                return
            self._hold(unit, self._held.get(unit))

    def _stay_for_graph_of_backward(self, unit: Unit) -> None:
        """Has all in memory for good: what a backward through the backward uses, no output's gradient announces."""
        members = self._members()
        if not members:
            return
        what = f"backward through '{unit.name}' was asked for with create_graph=True (as gradient penalties do)"
        absent = [m.values for m in members if m.parameter.device.type == "cpu" and not m.values.is_resident]
        absent_bytes = sum(values.num_bytes for values in absent)
        if absent_bytes > free_memory_bytes():
            raise ApplyError(
                f"{what}, which needs all parameters in memory, and there is no room for {format_bytes(absent_bytes)} "
                "of them that are on disk; a smaller model has room"
            )
        _log.warning("%s: parameters and gradients stay in memory, which may pass the budget", what)
        self.why_given_up = what
        for member in members:
            self.tier.give_up(member)

    def _hold_recomputed(self, unit: Unit) -> None:
        """Has a unit in memory that runs again in backward, with the others that the same node has made run again."""
        node = current_node()
        for other, reason in list(self._held.items()):
            if not isinstance(reason, int) and reason is not node:
                self._release_held(other)
        self._hold(unit, self._held.get(unit, node))

    def _hold(self, unit: Unit, reason: object) -> None:
        """Has a unit in memory until its backward is over.

        Args:
            reason: when the call began whose backward begins, or the node that needs it to run again.
        """
        if not self._held:
            after_backward(self._let_go_of_backward)
        if unit not in self._held:
            self.tier.hold(unit.members)
            for member in unit.members:
                member.has_graph = True
        self._held[unit] = reason

    def _release_held(self, unit: Unit) -> None:
        del self._held[unit]
        self.tier.release(unit.members)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except MemwallError as error:
            self.failure = self.failure or error.without_frames()
            raise

    def _let_go_of_backward(self) -> None:
        """Ends a backward, or what is left of one that failed."""
        if not self._held:
            return
        for member in self._members():
            member.has_graph = False
        for unit in list(self._held):
            self._release_held(unit)
        self._stop_reading_ahead_but()
        self.tier.end_phase()

    def _watch_gradient(self, member: StreamedParameter) -> None:
        def accumulated(_: Tensor) -> None:
            if self.tier.get(member.parameter) is None:
                return
            with self._noting_failure():
                if not member.values.is_here:
                    raise ApplyError(
                        f"backward used {member.name} before the gradient of its block's output was there, when its "
                        "elements were away: an intermediate result left the block on another way than as its "
                        "output; return it from forward, or plan without streaming parameters"
                    )
                with torch.no_grad(), without_subclass_functions():
                    member.spill_gradient()

        if member.parameter.requires_grad:
            register = member.parameter.register_post_accumulate_grad_hook
            member.gradient_hook = Patches("sends gradients away").hook(register, accumulated)

    def around_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an optimizer's step below its hooks that has a window of parameters and gradients in memory.

        Args:
            inner: the step, of an optimizer that may be stepped a few parameters at a time (`inner_step_of`).
        """
        return self._step.around(inner)


def _refuse_hooked(model: nn.Module) -> None:
    for name, _ in hooked_parameters(model):
        raise ApplyError(
            f"{name} has a hook that runs when its gradient is accumulated, as steps inside backward do; with "
            "gradients away it would not see them; remove it, or plan without streaming parameters"
        )
