"""Finds the blocks of a model in its trace: the sub-modules that are kept, recomputed or moved as one.

Repeated classes in lists and sequences come first (transformer layers, ResNet stages); what they leave uncovered is
divided by size, a large sequence of single layers into runs of them. Everything is read from the trace, so the model
itself is not needed.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from memwall.planning.layer_runs import LayerRun, layer_runs
from memwall.predict.call_rules import BlockCalls
from memwall.trace.records import ModuleCall, Step, Trace

# A block that saves more than this share of the whole is divided, if its children allow it: rematerialising one large
# block at once would set the peak.
_LARGE_SHARE = 1 / 6
# A module that saves less than this share, its like in the same list included, is not worth an action.
_SMALL_SHARE = 0.01
# Repeated children must hold this much of what their parent saves to stand for it.
_COVER_SHARE = 0.8


def find_blocks(trace: Trace, step: Step) -> tuple[BlockCalls, ...]:
    """Returns the blocks of a step in forward order, disjoint, each with its calls and the tensors saved in them."""
    return _Finder(trace, step).find()


class _Finder:
    def __init__(self, trace: Trace, step: Step) -> None:
        self.trace, self.step = trace, step
        self.children: dict[int, list[int]] = {}
        for index, module in enumerate(trace.modules):
            self.children.setdefault(module.parent, []).append(index)
        self.calls: dict[int, list[ModuleCall]] = {}
        for call in step.calls:
            self.calls.setdefault(call.module, []).append(call)
        self.saved_bytes = [0] * len(trace.modules)
        self.subtree: dict[int, frozenset[int]] = {}
        self.saves_of: dict[int, list[int]] = {}
        counted: set[int] = set()
        for number, save in enumerate(step.saved):
            self.saves_of.setdefault(save.module, []).append(number)
            storage = step.storages[save.storage]
            if save.storage in counted or storage.category not in ("activation", "input") or storage.birth < 0:
                continue
            counted.add(save.storage)
            holder = save.module
            while holder >= 0:
                self.saved_bytes[holder] += storage.nbytes
                holder = trace.modules[holder].parent
        self.total = max(self.saved_bytes[0], 1) if trace.modules else 1

    def find(self) -> tuple[BlockCalls, ...]:
        chosen = [index for index in self._divide(0, is_root=True) if self._is_usable(index, self.calls.get(index, ()))]
        chosen.sort(key=lambda index: (self.calls[index][0].start, index))
        return tuple(block for index in chosen for block in self._blocks(index))

    def _divide(self, index: int, *, is_root: bool = False) -> list[int]:
        """Returns the blocks that stand for a module: itself, or a division of it."""
        module = self.trace.modules[index]
        if self._saved_by_its_like(index) < _SMALL_SHARE * self.total:
            return []
        descendants = [child for child in self.children.get(index, []) if not self.trace.modules[child].is_leaf]
        if self._runs(index):
            return [index]
        must = is_root or not self.calls.get(index) or not module.is_wrappable
        if not must and self._is_repeated(index) and not self._has_repeated_cover(index):
            return [index]
        if not must and (self.saved_bytes[index] <= _LARGE_SHARE * self.total or not descendants):
            return [index]
        if not must and sum(self.saved_bytes[child] for child in descendants) < _COVER_SHARE * self.saved_bytes[index]:
            return [index]
        found: list[int] = []
        for child in self.children.get(index, []):
            found.extend(self._divide(child))
        return found

    def _is_repeated(self, index: int) -> bool:
        return len(self._its_like(index)) >= 2

    def _saved_by_its_like(self, index: int) -> int:
        """Returns the bytes that its like save together: each of a hundred layers saves little."""
        return sum(self.saved_bytes[sibling] for sibling in self._its_like(index))

    def _its_like(self, index: int) -> list[int]:
        """Returns the modules of its class in the same list or sequence; the module alone where it is in none."""
        module = self.trace.modules[index]
        if module.container == "none" or module.is_leaf:
            return [index]
        siblings = self.children[module.parent]
        return [s for s in siblings if self.trace.modules[s].class_name == module.class_name]

    def _has_repeated_cover(self, index: int) -> bool:
        """Tells whether a large block consists of repeated blocks, as a stage of a hierarchical model does."""
        if self.saved_bytes[index] <= _LARGE_SHARE * self.total:
            return False
        inner = [i for i in self._below(index) if i != index and self._is_repeated(i)]
        outermost = [i for i in inner if not any(self._contains(j, i) for j in inner if j != i)]
        return sum(self.saved_bytes[i] for i in outermost) >= _COVER_SHARE * self.saved_bytes[index]

    def _below(self, index: int) -> frozenset[int]:
        if index not in self.subtree:
            members = {index}
            for child in self.children.get(index, []):
                members |= self._below(child)
            self.subtree[index] = frozenset(members)
        return self.subtree[index]

    def _contains(self, outer: int, inner: int) -> bool:
        return inner in self._below(outer)

    def _is_usable(self, index: int, calls: Sequence[ModuleCall]) -> bool:
        return (
            bool(calls)
            and self.trace.modules[index].is_wrappable
            and all(call.backward_start >= call.end for call in calls if call.backward_start >= 0)
            and any(call.backward_start >= 0 for call in calls)
        )

    def _blocks(self, index: int) -> Iterator[BlockCalls]:
        """Yields a module as a block; of a large sequence of single layers its runs of layers."""
        runs = self._runs(index)
        for run in runs:
            if self._is_usable(index, run.calls):
                yield self._block(run.path, index, run.layers, run.calls)
        if not runs:
            path = self.trace.modules[index].path or self.trace.modules[index].class_name
            yield self._block(path, index, self._below(index), self.calls[index])

    def _runs(self, index: int) -> tuple[LayerRun, ...]:
        """Returns the runs of layers that a large sequence is divided into; () where it is not."""
        is_large = self.saved_bytes[index] > _LARGE_SHARE * self.total
        if not is_large or not self.calls.get(index) or not self.trace.modules[index].is_wrappable:
            return ()
        return layer_runs(
            self.trace.modules,
            self.step,
            index,
            {child: sorted(self._below(child)) for child in self.children.get(index, [])},
            calls=self.calls,
            saves_of=self.saves_of,
            saved_bytes=self.saved_bytes,
        )

    def _block(self, path: str, index: int, members: Collection[int], calls: Sequence[ModuleCall]) -> BlockCalls:
        saved: list[list[int]] = [[] for _ in calls]
        ends = [call.end for call in calls]
        is_in_order = ends == sorted(ends)  # else it calls itself
        for number in sorted(number for member in members for number in self.saves_of.get(member, ())):
            packed = self.step.saved[number].packed
            for place in range(bisect_left(ends, packed) if is_in_order else 0, len(calls)):
                if calls[place].start <= packed <= ends[place]:
                    saved[place].append(number)
                    break
        return BlockCalls(
            path=path,
            module=index,
            calls=tuple(calls),
            saved=tuple(tuple(numbers) for numbers in saved),
        )
