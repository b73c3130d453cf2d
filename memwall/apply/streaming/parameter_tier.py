"""Parameters that live below memory, and come there for as long as somebody holds or uses them.

A parameter keeps its identity: the optimizer's groups, tied modules and hooks refer to the same object as before. Its
storage stays too, so that what autograd has saved of it is valid again as soon as the bytes are back.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.streaming.gradients import Reductions, StandsFor
from memwall.apply.streaming.guard import guarded, unguarded
from memwall.apply.streaming.places import StreamingPlace
from memwall.apply.streaming.streamed_parameter import StreamedParameter, num_references_of, usual_references
from memwall.errors import ApplyError
from memwall.patches import Patch, Patches
from memwall.store.buckets import can_move
from memwall.store.page_map import is_only_for_tensors
from memwall.store.paged import WriteBehind
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.trees import tree_leaves
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# The member's own, and that of the call which counts.
_OWN_REFERENCES = 2
_OTHERS = " (others that follow are not named; MEMWALL_LOG=info shows each)"


class ParameterTier:
    """Keeps parameters below memory: on disk, or in the host's memory below a device.

    Args:
        place: the disk, or the host's memory below a device.
        window_bytes: memory for parameters that are used outside blocks, and again for what waits to be written.
        min_bytes: smaller parameters are not taken.
        values_place: the place of parameters, if not that of gradients.
    """

    def __init__(
        self,
        place: StreamingPlace,
        *,
        window_bytes: int,
        min_bytes: int,
        values_place: StreamingPlace | None = None,
    ) -> None:
        self.place, self.window_bytes, self.min_bytes = place, window_bytes, min_bytes
        self.values_place = place if values_place is None else values_place
        self.writes = WriteBehind(window_bytes)
        self.reductions = Reductions()
        self.stands_for: StandsFor | None = None
        """Is told, while a step is recorded, what stands for a gradient that has left."""
        self.num_spilled = 0
        """Says how many gradients have left memory, or terms of them."""
        self.on_replaced: Callable[[StreamedParameter], None] | None = None
        """Is told, while models are built, that a parameter has left the tier, to be given other memory."""
        self._members: dict[int, StreamedParameter] = {}
        self._has_told = False
        self._patch: Patch | None = None  # one for all of them: each is exposed and guarded again in every step
        # Used outside blocks, the longest ago first; in memory until the window is full.
        self._used: dict[StreamedParameter, None] = {}

    def __iter__(self) -> Iterator[StreamedParameter]:
        return iter(self._members.values())

    def set_window(self, window_bytes: int) -> None:
        """Sets how much memory, see the class; to be called while nothing is in use."""
        self.window_bytes = self.writes.window_bytes = window_bytes

    def get(self, parameter: Tensor) -> StreamedParameter | None:
        """Returns the record of a parameter; None if it stays in memory."""
        return self._members.get(id(parameter))

    @property
    def resident_bytes(self) -> int:
        """Counts the memory that parameters and gradients of the tier take now."""
        return sum(member.resident_bytes for member in self)

    @property
    def num_bytes(self) -> int:
        """Counts the bytes of the parameters that have their place on disk."""
        return sum(member.values.num_bytes for member in self)

    @torch.no_grad()
    def adopt(self, parameter: nn.Parameter, name: str) -> StreamedParameter | None:
        """Takes a parameter, unless it is small, no plain one of the place's device, or shares its memory with another.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        if id(parameter) in self._members:
            return self._members[id(parameter)]
        if type(parameter) is not nn.Parameter or parameter.is_inference():
            return None
        if num_references_of(parameter) > usual_references() or not can_move(
            parameter.detach(), self.min_bytes, self.place.device
        ):
            return None
        if parameter.untyped_storage().nbytes() != parameter.nbytes or _is_shared(parameter):
            return None
        if not (parameter.untyped_storage().resizable() or is_only_for_tensors(parameter.data_ptr())):
            return None
        member = StreamedParameter(self, parameter, name)
        self._members[id(parameter)] = member
        if self._patch is None:
            where = "torch.nn.Parameter.__class__ and .data, of parameters that are away"
            self._patch = Patches("keeps parameters away").add("class", where, lambda: None)
        return member

    def begin_read(self, members: Iterable[StreamedParameter]) -> None:
        """Begins to bring parameters back."""
        for member in members:
            member.values.begin_read()

    def hold(self, members: Sequence[StreamedParameter], *, is_exposed: bool = False) -> None:
        """Returns with parameters in memory, until `release`.

        Args:
            is_exposed: as plain ones, which code may use in a graph; `parameter.grad` is then what lies in memory.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        self.begin_read(members)
        for member in members:
            member.values.want()
            _ = member.is_aliased  # as it is before a graph adds references
            member.num_holders += 1
            if is_exposed:
                member.num_exposures += 1
                unguarded(member.parameter)

    def release(self, members: Sequence[StreamedParameter], *, is_exposed: bool = False, is_kept: bool = False) -> None:
        """Undoes a `hold`; parameters that nobody holds leave memory, unless they are kept until `put_away`."""
        for member in members:
            member.num_holders -= 1
            if is_exposed:
                member.num_exposures -= 1
                if member.num_exposures == 0 and id(member.parameter) in self._members:
                    guarded(member.parameter, member)
        if not is_kept:
            self.put_away(members)

    def put_away(self, members: Iterable[StreamedParameter]) -> None:
        """Lets parameters leave memory that nobody holds or refers to."""
        for member in members:
            if member.num_holders == 0 and id(member.parameter) in self._members and not member.is_aliased:
                self._used.pop(member, None)
                if not member.stays:
                    self.writes.put_away(member.values)

    def end_phase(self) -> None:
        """Lets go of what is being written, where nobody has to wait for that: before a step, and before a forward."""
        if self.place.waits_in_order:
            self.writes.drain()

    def use(self, members: Sequence[StreamedParameter], run: Callable[[], Any]) -> Any:
        """Runs code that uses parameters outside their blocks, and may change them.

        A graph that this makes needs them whenever its backward runs: they stay in memory from now on.
        """
        for member in members:
            member.values.want()
            member.values.finish_write()
            self._used.pop(member, None)
        versions = [version_of(member.parameter) for member in members]
        try:
            result = run()
        finally:
            for member, version in zip(members, versions, strict=True):
                is_held = member.num_holders > 0
                # Some operations on lists of tensors change them and leave their versions as they were.
                if not is_held or version_of(member.parameter) != version:
                    member.values.changed()
                if not is_held:
                    self._used[member] = None
        if torch.is_grad_enabled() and any(
            isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(result)
        ):
            # One that its block holds is used by a recomputation within the block's own forward.
            for member in [member for member in members if member.num_holders == 0]:
                self._tell_that_stays(
                    member,
                    "is used outside the block that it belongs to",
                    "use it through its own module to have it leave",
                )
                self.give_up(member)
        self._shrink()
        return result

    def show(self, member: StreamedParameter, run: Callable[[], Any]) -> Any:
        """Runs code that makes another tensor over a parameter's memory, as a state dict has one of each.

        One that is away takes no room for that: what reads or writes the tensor does so by way of the system's cache.
        """
        if not member.values.show():
            return self.use([member], run)
        self._used[member] = None
        result = run()
        self._shrink()
        return result

    @property
    def shown_bytes(self) -> int:
        """Counts the bytes that the system has in memory to `show` parameters, and can take back at any time."""
        return sum(member.values.shown_bytes for member in list(self))

    def end_showing(self) -> None:
        """Lets go of parameters that are shown, unless somebody still holds tensors over their memory."""
        self.put_away([member for member in self if member.values.is_shown])

    def replace(self, member: StreamedParameter, run: Callable[[], Any], new: Any, *, is_passing: bool) -> Any:
        """Runs code that gives a parameter other memory: while models are built, of one that has left.

        Later, what a script makes anew in each step, as an average of weights, goes to where the parameter lies.
        Memory that the script holds as well becomes the parameter's, which stays in memory then.

        Args:
            new, is_passing: see `Guard`.

        Raises:
            ApplyError: it would be of another kind, and what is on disk is in use.
        """
        if self.on_replaced is not None:
            self.give_up(member)
            result = run()
            self.on_replaced(member)
            return result
        if new is None or not _is_alike(new, member.parameter):
            raise ApplyError(
                f"{member.name} was given other memory (as .to() and .half() do) while memwall keeps it away; "
                "change the model before its first step"
            )
        is_passing = is_passing and _is_alone_on_its_memory(new)
        if is_passing and not member.num_holders and not member.is_aliased and not member.has_graph:
            return self.use([member], lambda: self._overwrite(member, new))
        self._tell_that_stays(member, "is given memory that the script holds as well", "assign a new tensor to .data")
        self.give_up(member)
        return run()

    @staticmethod
    @torch.no_grad()
    def _overwrite(member: StreamedParameter, new: Tensor) -> None:
        member.values.tensor.copy_(new)

    def _tell_that_stays(self, member: StreamedParameter, why: str, advice: str) -> None:
        """Says of the first parameter, and in the log of each, why it stays in memory from now on."""
        level, others = logging.INFO if self._has_told else logging.WARNING, "" if self._has_told else _OTHERS
        size = format_bytes(member.values.num_bytes)
        _log.log(level, "%s %s; its %s stay in memory from now on; %s%s", member.name, why, size, advice, others)
        self._has_told = True

    def _shrink(self) -> None:
        """Lets go of parameters used longest ago, until the window holds the rest."""
        in_use_bytes = sum(member.values.num_bytes for member in self._used)
        for member in list(self._used):
            if in_use_bytes <= self.window_bytes:
                return
            if member.values.is_shown and not member.is_aliased and member.values.is_stored:
                del self._used[member]  # takes nothing that the system would not give to others
            else:
                self.put_away([member])
            if member not in self._used:
                in_use_bytes -= member.values.num_bytes

    def settle(self) -> None:
        """Returns once the newest elements of every parameter are on disk; they stay in memory where they are needed.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        changed = [member for member in self if not member.values.is_stored]
        for member in changed:
            if member.is_aliased:
                member.values.want()  # until it is put away: who looks at it goes on
            member.values.begin_write()
        self.writes.drain()
        for member in changed:
            member.values.finish_write()

    def close(self) -> None:
        """Brings back whatever is there, and closes files and threads.

        Raises:
            StoreError: bytes cannot be read back.
        """
        try:
            for member in list(self):
                self.give_up(member)
        finally:
            self.place.close()

    def forget_unused(self) -> None:
        """Gives back the place of parameters that nobody else has: of a model that was built in vain, or made anew.

        Raises:
            StoreError: a transfer under way failed.
        """
        for member in list(self):
            if sys.getrefcount(member.parameter) <= _OWN_REFERENCES and not member.is_aliased:
                self._used.pop(member, None)
                self.writes.drain()
                member.values.forget()
                self._leave(member)

    def give_up(self, member: StreamedParameter) -> None:
        """Leaves a parameter and its gradient in memory for good.

        Raises:
            StoreError: its bytes cannot be had; then it stays guarded, so that nothing computes without them.
        """
        if id(member.parameter) not in self._members:
            return
        with without_subclass_functions():
            member.values.stay()
            if member.gradient.handle is not None:
                member.gradient.take()
            member.gradient.forget()
        if member.gradient_hook is not None:
            member.gradient_hook.undo()
        self._used.pop(member, None)
        self._leave(member)

    def _leave(self, member: StreamedParameter) -> None:
        del self._members[id(member.parameter)]
        unguarded(member.parameter)
        if not self._members and self._patch is not None:
            self._patch.undo()
            self._patch = None


def _is_shared(parameter: nn.Parameter) -> bool:
    """Tells whether other processes may see its memory: of a device's torch says that always."""
    return parameter.device.type == "cpu" and parameter.is_shared()


def _is_alike(new: Tensor, parameter: nn.Parameter) -> bool:
    """Tells whether a tensor's elements can lie where a parameter's do."""
    is_there = (new.shape, new.stride()) == (parameter.shape, parameter.stride())
    return type(new) is Tensor and is_there and (new.dtype, new.device) == (parameter.dtype, parameter.device)


def _is_alone_on_its_memory(new: Tensor) -> bool:
    """Tells whether no other tensor lies over a tensor's memory, and no array: that of arrays cannot be resized."""
    return new.untyped_storage().resizable() and num_references_of(new) <= usual_references()
