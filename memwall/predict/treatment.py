"""What a step becomes when some module calls recompute or move their saved tensors: a step in, a step out.

A storage lives as long as somebody holds it: the code itself until `dropped`, autograd until each saving is released,
a checkpoint its inputs until its backward ends. A treatment takes holders away and adds second lives: rematerialised
storages before backward, reloaded ones. Recomputed operations are inserted before the block's backward.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from memwall.predict.lives import LAST, Life, Time, rebuilt
from memwall.predict.packing import PACKED_ITEMSIZES, num_packed_bytes, scratch_bytes
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.trace.records import ModuleCall, Step, Storage

__all__ = ["REBUILDABLE_OPS", "BlockCalls", "Moved", "Rebuilt", "StepModel", "Treatment"]

# Selective checkpointing does not ask its policy about these (torch.utils.checkpoint.SAC_IGNORED_OPS, torch 2.13).
UNCOUNTED_OPS = frozenset({"aten.detach.default", "prim.device.default"})
# What torch.get_rng_state() returns on a CPU: every checkpoint holds one, and one more while it recomputes.
RNG_STATE_BYTES = 5056
# Operations whose first result recompute handles can rebuild from what their own backward keeps
# (memwall.triton_kernels.recompute; a test compares this with what they publish).
REBUILDABLE_OPS = frozenset(f"memwall.{name}.default" for name in ("glu", "packed_glu", "norm", "add_norm"))


class Treatment(Struct, frozen=True, kw_only=True):
    """How every call of one block treats what autograd saves in it."""

    recompute: bool = False
    kept_ops: tuple[int, ...] = ()
    """With recompute: operations whose results are kept, numbered within the call without `UNCOUNTED_OPS`."""
    rebuild: bool = False
    """Without recompute: results of `REBUILDABLE_OPS` are rebuilt for backward, one by one, instead of kept."""
    offload: bool = False
    """Saved tensors (with recompute: the block's inputs) move to the next tier; what is rebuilt does not."""
    is_packed: bool = False
    """With offload, without recompute: floating-point numbers do so in a byte each."""
    min_bytes: int = 1 << 20
    """Tensors below this stay where they are."""


class BlockCalls(Struct, frozen=True, kw_only=True):
    """A block, its calls in forward order, and per call the numbers of the tensors saved inside it."""

    path: str
    module: int
    calls: tuple[ModuleCall, ...]
    saved: tuple[tuple[int, ...], ...]


class Rebuilt(NamedTuple):
    """A result that is rebuilt when backward first asks for it, and held until it asked for the last time."""

    op: int
    """The operation that runs again."""
    storage: int
    recipe: tuple[int, ...]
    """Storages that it is rebuilt from."""
    at: int
    """The operation of backward before which it does."""
    end: int
    """The operation before which backward lets go of it."""
    saves: tuple[int, ...]
    """Numbers of the saved tensors that became a recipe."""


class Moved(NamedTuple):
    """What of a storage leaves the device and comes back."""

    nbytes: int
    """Of the device's memory."""
    num_packed: int = 0
    """Elements that leave packed; 0 where bytes leave as they are."""

    @property
    def link_bytes(self) -> int:
        """Bytes on their way, and on the tier."""
        return num_packed_bytes(self.num_packed) if self.num_packed else self.nbytes


class _Reload(NamedTuple):
    """One call's need of bytes that were moved away."""

    call_start: int
    moved: Moved
    prefetch: Time
    """When they come if this call was the first to send them away: then they belong to its group."""
    demand: Time
    """When the call asks for them."""
    end: Time


class StepModel:
    """A step, indexed for asking what treatments would make of it."""

    def __init__(self, step: Step, names: Sequence[str], blocks: Sequence[BlockCalls]) -> None:
        self.step = step
        self.names = tuple(names)
        self.blocks = tuple(blocks)
        self._is_counted = [name not in UNCOUNTED_OPS for name in names]
        self._writers: dict[int, list[int]] = {}
        for number, op in enumerate(step.ops):
            for written in op.writes:
                self._writers.setdefault(written, []).append(number)
        self._born_bytes: dict[int, int] = {}
        for storage in step.storages:
            self._born_bytes[storage.birth] = self._born_bytes.get(storage.birth, 0) + storage.nbytes
        self._saves_of: dict[int, list[int]] = {}
        for number, save in enumerate(step.saved):
            self._saves_of.setdefault(save.storage, []).append(number)
        self._born_in: list[list[list[int]]] = [[[] for _ in block.calls] for block in self.blocks]
        spans = sorted(
            (call.start, call.end, b, c) for b, block in enumerate(self.blocks) for c, call in enumerate(block.calls)
        )
        starts = [span[0] for span in spans]
        for index, storage in enumerate(step.storages):
            place = bisect_left(starts, storage.birth + 1) - 1
            # A parameter that comes from disk meanwhile is not of the block's making.
            if place >= 0 and storage.birth < spans[place][1] and storage.category != "parameter":
                self._born_in[spans[place][2]][spans[place][3]].append(index)
        # The executor starts reading a block back when the block after it in forward begins its backward.
        order = sorted((call.start, call) for block in self.blocks for call in block.calls if call.backward_start >= 0)
        self._prefetch_at: dict[int, Time] = {}
        for (start, call), (_, after) in zip(order, [*order[1:], order[-1]] if order else [], strict=True):
            self._prefetch_at[start] = (min(after.backward_start, call.backward_start), 0)

    # -- one call --------------------------------------------------------------------------------------------------

    def is_written(self, storage: int, start: int, end: int) -> bool:
        """Whether one of the operations [start, end) modifies a storage in place."""
        return any(start <= op < end for op in self._writers.get(storage, ()))

    def recomputed_at(self, call: ModuleCall, saved: Sequence[int]) -> int:
        """The operation of backward before which a call is recomputed: its first that asks for a tensor saved in it."""
        asked = min((self.step.saved[s].unpacked for s in saved), default=call.backward_start)
        return min(max(asked, call.backward_start), call.backward_end - 1)

    def counted_ops(self, call: ModuleCall) -> list[int]:
        """Operations of a call in the numbering that selective checkpointing uses."""
        return [op for op in range(call.start, call.end) if self._is_counted[self.step.ops[op].name]]

    def recomputed_ops(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> list[int]:
        """Operations of a call that run again: up to the last one backward needs, without the kept ones."""
        needed = min(max((self.step.saved[s].packed for s in saved), default=call.start), call.end)
        counted = self.counted_ops(call)
        kept = {counted[i] for i in treatment.kept_ops if i < len(counted)}
        return [op for op in range(call.start, needed) if op not in kept]

    def rebuilt_results(self, call: ModuleCall, saved: Sequence[int]) -> list[Rebuilt]:
        """What a call saves of results that can be rebuilt, in the order in which backward asks for them."""
        step = self.step
        saves_of: dict[int, list[int]] = {}
        for number in saved:
            saves_of.setdefault(step.saved[number].storage, []).append(number)
        found: list[Rebuilt] = []
        needed_at: dict[int, int] = {}  # by recipes of later results
        for op in range(call.end - 1, call.start - 1, -1):
            record = step.ops[op]
            index = record.outputs[0] if record.outputs and self.names[record.name] in REBUILDABLE_OPS else -1
            saves = saves_of.get(index, ())
            if not saves or step.storages[index].birth != op:
                continue
            recipe = (*record.inputs, *record.outputs[1:])
            # What needs no gradient is not rebuilt; the operation has kept nothing itself then.
            if not any(step.saved[n].packed == op + 1 and step.saved[n].storage in recipe for n in saved):
                continue
            last_packed = max(step.saved[s].packed for s in saves)
            if any(self.is_written(i, op + 1, last_packed) for i in (index, *recipe)):
                continue
            at = min(needed_at.get(index, len(step.ops)), *(step.saved[s].unpacked for s in saves))
            end = max(at, *(step.saved[s].released for s in saves))
            found.append(Rebuilt(op, index, recipe, at, end, tuple(saves)))
            for i in recipe:
                needed_at[i] = min(at, needed_at.get(i, at))
        return sorted(found, key=lambda result: (result.at, result.op))

    def repeated_ops(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> list[tuple[int, list[int]]]:
        """What runs again in backward for one call: operations, and the operation of backward before which they do."""
        if treatment.recompute:
            return [(self.recomputed_at(call, saved), self.recomputed_ops(call, saved, treatment))]
        found: dict[int, list[int]] = {}
        for result in self.rebuilt_results(call, saved) if treatment.rebuild else ():
            if result.at < len(self.step.ops):  # backward never asks for others
                found.setdefault(result.at, []).append(result.op)
        return sorted(found.items())

    def movable(self, number: int, treatment: Treatment) -> bool:
        """Whether a saved tensor may leave the device: an activation or input, and large enough."""
        save = self.step.saved[number]
        return save.nbytes >= treatment.min_bytes and self.step.storages[save.storage].category in (
            "activation",
            "input",
        )

    def moved(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> dict[int, Moved]:
        """Per storage what leaves the device in a call under a treatment with offload."""
        if not treatment.recompute:
            return self._moved_of(self._not_rebuilt(call, saved, treatment), treatment)
        storages = {index: self.step.storages[index] for index in call.inputs}
        return {
            index: Moved(storage.nbytes)
            for index, storage in storages.items()
            if storage.birth >= 0
            and storage.nbytes >= treatment.min_bytes
            and storage.category in ("activation", "temporary", "input")
        }

    def _not_rebuilt(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> Sequence[int]:
        if not treatment.rebuild:
            return saved
        rebuilt_saves = {number for result in self.rebuilt_results(call, saved) for number in result.saves}
        return [number for number in saved if number not in rebuilt_saves]

    def _moved_of(self, saved: Sequence[int], treatment: Treatment) -> dict[int, Moved]:
        """Per storage what moves: all of it when its saved views cover a good part, as the executor does.

        The first of them decides whether it is packed.
        """
        views: dict[int, int] = {}
        packed: set[int] = set()
        for number in saved:
            if self.movable(number, treatment):
                save = self.step.saved[number]
                if save.storage not in views and save.nbytes == self.step.storages[save.storage].nbytes:
                    packed.add(save.storage)
                views[save.storage] = views.get(save.storage, 0) + save.nbytes
        found = {}
        for index, size in views.items():
            whole = self.step.storages[index].nbytes
            nbytes = whole if 4 * size >= whole else size
            found[index] = self._moved(index, nbytes, treatment) if index in packed else Moved(nbytes)
        return found

    def _moved(self, index: int, nbytes: int, treatment: Treatment) -> Moved:
        itemsize = PACKED_ITEMSIZES.get(self.step.storages[index].dtype, 0) if treatment.is_packed else 0
        return Moved(nbytes, nbytes // itemsize if itemsize else 0)

    def is_leaf_like(self, block: BlockCalls) -> bool:
        """Whether recomputing a block frees nothing: all it saves is what it was called with."""
        for call, saved in zip(block.calls, block.saved, strict=True):
            if any(call.start <= self.step.storages[self.step.saved[n].storage].birth < call.end for n in saved):
                return False
        return True

    # -- lives -----------------------------------------------------------------------------------------------------

    def lives(self, treatments: Mapping[str, Treatment]) -> list[Life]:
        """Every stay of every storage under the treatments (block path -> treatment), in no particular order."""
        return self._lives(treatments, range(len(self.step.storages)))

    def changed_lives(self, block: int, treatment: Treatment) -> tuple[list[Life], list[Life]]:
        """What treating one block alone changes: (lives of a plain step that go, lives that come instead)."""
        touched: set[int] = set()
        for c, call in enumerate(self.blocks[block].calls):
            touched.update(self._born_in[block][c])
            touched.update(call.inputs)
            touched.update(self.step.saved[s].storage for s in self.blocks[block].saved[c])
        order = sorted(touched)
        return self._lives({}, order), self._lives({self.blocks[block].path: treatment}, order)

    def _lives(self, treatments: Mapping[str, Treatment], which: Sequence[int]) -> list[Life]:
        taken: set[int] = set()  # savings that no longer hold their storage
        held_until: dict[int, Time] = {}  # by checkpoints and kept results
        come: list[Life] = []
        reloads: dict[int, list[_Reload]] = {}
        for b, block in enumerate(self.blocks):
            treatment = treatments.get(block.path)
            if treatment is None:
                continue
            for c, call in enumerate(block.calls):
                if call.backward_start < 0:
                    continue
                if treatment.recompute:
                    self._recompute(b, c, treatment, taken, held_until, come, reloads)
                    continue
                if treatment.rebuild:
                    self._rebuild(b, c, taken, held_until, come)
                if treatment.offload:
                    self._offload(b, c, treatment, taken, come, reloads)
        for index, needs in reloads.items():
            come.extend(_reloaded(self.step.storages[index], index, needs))
        lives = []
        for index in which:
            storage = self.step.storages[index]
            end: Time = (storage.death, 0)
            saves = self._saves_of.get(index, ())
            if any(s in taken for s in saves):
                end = (storage.dropped, 0)
                for s in saves:
                    if s not in taken:
                        end = max(end, (self.step.saved[s].released, 0))
            end = max(end, held_until.get(index, end))
            lives.append(Life(index, storage.nbytes, (storage.birth, LAST), end))
        return lives + come

    def _recompute(
        self,
        b: int,
        c: int,
        treatment: Treatment,
        taken: set[int],
        held_until: dict[int, Time],
        come: list[Life],
        reloads: dict[int, list[_Reload]],
    ) -> None:
        block, call, step = self.blocks[b], self.blocks[b].calls[c], self.step
        saved = block.saved[c]
        again = self.recomputed_ops(call, saved, treatment)
        begin = self.recomputed_at(call, saved)
        released: dict[int, int] = {}
        for number in saved:
            save = step.saved[number]
            released[save.storage] = max(released.get(save.storage, 0), save.released)
        born = set(self._born_in[b][c])
        taken.update(number for number in saved if step.saved[number].storage in born)
        counted = self.counted_ops(call)
        kept = {counted[i] for i in treatment.kept_ops if i < len(counted)}
        for index in self._born_in[b][c]:
            storage = step.storages[index]
            rank = bisect_left(again, storage.birth)
            dropped: Time = (begin, min(bisect_left(again, storage.dropped), len(again)))
            end = max(dropped, (released[index], 0)) if index in released else dropped
            if storage.birth in kept:
                if index in step.ops[storage.birth].outputs:  # what it allocated for itself is not kept
                    held_until[index] = max(end, (begin, rank))
            elif rank < len(again) and again[rank] == storage.birth:
                come.append(Life(index, storage.nbytes, (begin, rank), end))
        if self._born_in[b][c] and step.storages[self._born_in[b][c][0]].device == "cpu":
            first = self._born_in[b][c][0]
            come.append(Life(first, RNG_STATE_BYTES, (call.start, LAST), (call.backward_end, 0)))
            come.append(Life(first, RNG_STATE_BYTES, (begin, 0), (begin, len(again))))
        for index in call.inputs:
            storage = step.storages[index]
            if storage.category not in ("activation", "temporary", "input"):
                continue
            if treatment.offload and storage.nbytes >= treatment.min_bytes:
                taken.update(number for number in saved if step.saved[number].storage == index)
                if storage.birth >= 0:
                    at = self._prefetch_at[call.start]
                    need = _Reload(call.start, Moved(storage.nbytes), at, (begin, 0), (call.backward_end, 0))
                    reloads.setdefault(index, []).append(need)
            else:
                held_until[index] = max(held_until.get(index, (0, 0)), (call.backward_end, 0))

    def _rebuild(self, b: int, c: int, taken: set[int], held_until: dict[int, Time], come: list[Life]) -> None:
        call, saved = self.blocks[b].calls[c], self.blocks[b].saved[c]
        rank: dict[int, int] = {}
        for result in self.rebuilt_results(call, saved):
            taken.update(result.saves)
            for index in result.recipe:  # until the block ends, also where they move
                held_until[index] = max(held_until.get(index, (0, 0)), (call.end, 0))
            if result.at == len(self.step.ops):
                continue
            place = rank[result.at] = rank.get(result.at, -1) + 1
            come.append(
                Life(result.storage, self.step.storages[result.storage].nbytes, (result.at, place), (result.end, 0))
            )
            for index in self._born_in[b][c]:
                storage = self.step.storages[index]
                if storage.birth == result.op and index not in self.step.ops[result.op].outputs:
                    come.append(Life(index, storage.nbytes, (result.at, place), (result.at, place + 1)))

    def _offload(
        self,
        b: int,
        c: int,
        treatment: Treatment,
        taken: set[int],
        come: list[Life],
        reloads: dict[int, list[_Reload]],
    ) -> None:
        call = self.blocks[b].calls[c]
        saved = self._not_rebuilt(call, self.blocks[b].saved[c], treatment)
        spans: dict[int, tuple[int, int]] = {}
        packed_at: dict[int, int] = {}
        for number in saved:
            if self.movable(number, treatment):
                save = self.step.saved[number]
                taken.add(number)
                packed_at.setdefault(save.storage, save.packed)
                asked, until = spans.get(save.storage, (save.unpacked, save.released))
                spans[save.storage] = (min(asked, save.unpacked), max(until, save.released))
        for result in self.rebuilt_results(call, self.blocks[b].saved[c]) if treatment.rebuild else ():
            for index in result.recipe:
                if index in spans:
                    spans[index] = (min(spans[index][0], result.at), spans[index][1])
        at = self._prefetch_at[call.start]
        for index, moved in self._moved_of(saved, treatment).items():
            asked, until = spans[index]
            reloads.setdefault(index, []).append(_Reload(call.start, moved, at, (asked, 0), (until, 0)))
            come.extend(self._packing(index, moved, packed_at[index]))
            come.extend(self._packing(index, moved, asked))

    def _packing(self, index: int, moved: Moved, op: int) -> list[Life]:
        """Packed bytes beside what they are made of, or become, just before operation `op`.

        What that allocates is not there yet, and counts in their place. Once packed they are part of the window.
        """
        excess_bytes = moved.link_bytes + scratch_bytes(moved.num_packed) - self._born_bytes.get(op, 0)
        is_more = moved.num_packed > 0 and excess_bytes > 0
        return [Life(index, excess_bytes, (op, 0), (op + 1, 0))] if is_more else []

    # -- whole steps -----------------------------------------------------------------------------------------------

    def treated(self, treatments: Mapping[str, Treatment]) -> Step:
        """The step as it runs under the treatments, with what runs again and second lives in place."""
        insertions: list[tuple[int, list[int]]] = []
        for block in self.blocks:
            treatment = treatments.get(block.path)
            if treatment is not None:
                for call, saved in zip(block.calls, block.saved, strict=True):
                    if call.backward_start >= 0:
                        insertions.extend(self.repeated_ops(call, saved, treatment))
        return rebuilt(self.step, sorted(insertions), self.lives(treatments))

    def parked(self, min_bytes: int) -> Step:
        """The step as it runs while being recorded with every large saved tensor moved away."""
        taken: set[int] = set()
        come: list[Life] = []
        anywhere = Treatment(offload=True, min_bytes=min_bytes)
        spans: dict[int, tuple[int, int]] = {}
        for number, save in enumerate(self.step.saved):
            if self.movable(number, anywhere):
                taken.add(number)
                begin, end = spans.get(save.storage, (save.unpacked, save.released))
                spans[save.storage] = (min(begin, save.unpacked), max(end, save.released))
        for index, moved in self._moved_of(range(len(self.step.saved)), anywhere).items():
            nbytes = _reloaded_bytes(self.step.storages[index], moved.nbytes)
            come.append(Life(index, nbytes, (spans[index][0], LAST), (spans[index][1], 0)))
        lives = []
        for index, storage in enumerate(self.step.storages):
            end = storage.death
            saves = self._saves_of.get(index, ())
            if any(s in taken for s in saves):
                end = max([storage.dropped, *(self.step.saved[s].released for s in saves if s not in taken)])
            lives.append(Life(index, storage.nbytes, (storage.birth, LAST), (end, 0)))
        return rebuilt(self.step, [], lives + come)


def _reloaded(storage: Storage, index: int, needs: list[_Reload]) -> list[Life]:
    """The stays of bytes that come back: once for all calls that saved them while they were away."""
    lives: list[Life] = []
    packed: list[Life] = []
    for need in sorted(needs):
        nbytes = need.moved.nbytes if need.moved.num_packed else _reloaded_bytes(storage, need.moved.nbytes)
        if lives and need.call_start < lives[-1].end[0]:
            shared = lives.pop()
            begin, end = min(shared.begin, need.demand), max(shared.end, need.end)
            lives.append(Life(index, max(shared.nbytes, nbytes), begin, end))
            continue
        begin = min(need.prefetch, need.demand)
        if need.moved.num_packed:
            packed.append(Life(index, _reloaded_bytes(storage, need.moved.link_bytes), begin, need.demand))
            begin = need.demand
        lives.append(Life(index, nbytes, begin, need.end))
    return lives + packed


def _reloaded_bytes(storage: Storage, nbytes: int) -> int:
    """Memory that takes bytes back: a disk reads whole blocks, into memory that begins at one (store.tier)."""
    return round_up(nbytes) + ALIGNMENT_BYTES if storage.device == "cpu" else nbytes
