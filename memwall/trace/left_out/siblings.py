"""Blocks that a recorded step left out while it ran others that are alike, as stochastic depth does."""

from collections.abc import Sequence
from typing import NamedTuple

from memwall.trace.records import Module, ModuleCall


class Stretch(NamedTuple):
    """Describes the calls that a block has left out, by those of its like that follow each other without a gap."""

    first: ModuleCall
    last: ModuleCall
    is_whole: bool
    """Whether it is one call of the like itself, and not some that it makes."""


class LeftOut(NamedTuple):
    """Names a block that was left out, in whole or in part, and one that is alike and was not."""

    module: int
    like: int
    runs: tuple[Stretch, ...]


class Siblings:
    """Knows which modules of a trace are alike: of one parent, one class, and with equal parameters below them."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = modules
        self.sizes = [1] * len(modules)
        """Modules in the subtree of each, itself included, which are numbered one after the other from it on."""
        for index in range(len(modules) - 1, 0, -1):
            if modules[index].parent >= 0:
                self.sizes[modules[index].parent] += self.sizes[index]
        self._has_parameters = [self._parameter_bytes(index) > 0 for index in range(len(modules))]

    def groups(self) -> list[list[int]]:
        """Returns groups of two and more that are alike, in order; those deepest in the tree come first."""
        found: dict[tuple[int, object], list[int]] = {}
        depths = [0] * len(self._modules)
        for index, module in enumerate(self._modules):
            if module.parent >= 0:
                depths[index] = depths[module.parent] + 1
            if self._has_parameters[index] and module.parent >= 0:
                found.setdefault((module.parent, self._form(index)), []).append(index)
        groups = [group for group in found.values() if len(group) > 1]
        return sorted(groups, key=lambda group: -depths[group[0]])

    def left_out(self, calls: Sequence[ModuleCall], group: Sequence[int]) -> list[LeftOut]:
        """Returns the members of a group that were left out where these calls were made.

        Each is alike the nearest member that has run most of what is in it, and before it rather than after it.
        """
        called = {call.module for call in calls}
        trained = {call.module for call in calls if call.backward_start >= 0}
        ran = {member: self._among(member, called) for member in group}
        most = max((ran[member] for member in group if member in trained), key=len, default=frozenset())
        whole = [member for member in group if ran[member] == most and member in trained]
        found = []
        for member in group:
            missing = most - ran[member]
            if not missing or not ran[member] < most:
                continue
            like = min(whole, key=lambda one: (one > member, abs(one - member)))
            if ran[member] <= {0}:  # it was not called, or has returned before it did anything
                missing = most
            runs = self._runs(calls, like, missing)
            if runs:
                found.append(LeftOut(member, like, tuple(runs)))
        return found

    def _runs(self, calls: Sequence[ModuleCall], like: int, missing: frozenset[int]) -> list[Stretch]:
        if 0 in missing:
            return [Stretch(call, call, True) for call in calls if call.module == like]
        runs: list[Stretch] = []
        is_open, inside = False, -1
        for call in calls:
            place = call.module - like
            if not 0 < place < self.sizes[like] or call.start < inside:
                continue
            if place not in missing:
                is_open = False
                continue
            inside = call.end
            runs.append(Stretch(runs.pop().first if is_open else call, call, False))
            is_open = True
        return runs

    def _among(self, index: int, called: set[int]) -> frozenset[int]:
        return frozenset(place for place in range(self.sizes[index]) if index + place in called)

    def _form(self, index: int) -> tuple[tuple[str, int, int], ...]:
        """Returns what is equal of modules that are alike: classes and parameters, in order, and how they nest."""
        members = range(index, index + self.sizes[index])
        parts = (self._modules[member] for member in members)
        return tuple((part.class_name, part.parameter_bytes, max(part.parent - index, -1)) for part in parts)

    def _parameter_bytes(self, index: int) -> int:
        members = range(index, index + self.sizes[index])
        return sum(self._modules[member].parameter_bytes for member in members)
