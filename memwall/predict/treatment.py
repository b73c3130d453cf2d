"""A step made anew when some module calls recompute or move their saved tensors: a step in, a step out.

A storage lives as long as somebody holds it: the code itself until `dropped`, autograd until each saving is released,
a checkpoint its inputs until its backward ends. A treatment takes holders away and adds second lives: rematerialised
storages before backward, reloaded ones. Recomputed operations are inserted before the block's backward.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from memwall.predict.call_rules import BlockCalls, CallRules, Moved, Treatment
from memwall.predict.lives import LAST, Life, Time, rebuilt
from memwall.predict.offload_window import Passing, through_window
from memwall.predict.packed_bytes import scratch_bytes
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.trace.records import Step, Storage

# What torch.get_rng_state() returns on a CPU: every checkpoint holds one, and one more while it recomputes.
RNG_STATE_BYTES = 5056


class _Reload(NamedTuple):
    """Describes one call's need of bytes that were moved away."""

    call_start: int
    moved: Moved
    left: Time
    """When they leave."""
    prefetch: Time
    """When they come if this call was the first to send them away: then they belong to its group."""
    demand: Time
    """When the call asks for them."""
    end: Time


class _Changes:
    """Collects what treatments change of a step's lives."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        """Savings that no longer hold their storage."""
        self.held_until: dict[int, Time] = {}
        """Times until which checkpoints and kept results hold storages."""
        self.come: list[Life] = []
        self.reloads: dict[int, list[_Reload]] = {}

    def hold(self, index: int, until: Time) -> None:
        """Notes that a storage is held until then, at least."""
        self.held_until[index] = max(self.held_until.get(index, (0, 0)), until)

    def pass_window(self, window_bytes: int) -> None:
        """Has what leaves pass through a device's window: sources are held, and bytes come back, as it has room.

        Several calls that save the same bytes send them away once.
        """
        if not window_bytes:
            return
        indices = list(self.reloads)
        passing = [
            Passing(
                max(need.moved.link_bytes for need in needs),
                left=min(need.left for need in needs),
                prefetch=min(need.prefetch for need in needs),
                demand=min(need.demand for need in needs),
                whole_bytes=max(need.moved.nbytes for need in needs),
            )
            for needs in self.reloads.values()
        ]
        for index, (held_until, back) in zip(indices, through_window(passing, window_bytes), strict=True):
            needs = self.reloads[index]
            if needs[0].moved.num_packed:  # what is held is packed, and unpacked when backward asks for it
                left, asked = min(need.left for need in needs), min(need.demand for need in needs)
                # They are there before what the window then lets go of is free.
                begin = (max(left[0] - 1, 0), LAST)
                self.come.append(Life(index, needs[0].moved.link_bytes, begin, held_until or asked))
                back = asked if held_until is None else back
                self.reloads[index] = [n._replace(prefetch=min(n.demand, max(n.prefetch, back))) for n in needs]
            elif held_until is None:
                self.hold(index, max(need.end for need in needs))
                del self.reloads[index]
            else:
                self.hold(index, held_until)
                self.reloads[index] = [need._replace(prefetch=min(need.prefetch, back)) for need in needs]


class StepModel(CallRules):
    """Answers what treatments would make of a step."""

    def __init__(self, step: Step, names: Sequence[str], blocks: Sequence[BlockCalls]) -> None:
        super().__init__(step, names)
        self.blocks = tuple(blocks)
        self._born_bytes: dict[int, int] = {}
        for storage in step.storages:
            if storage.birth == storage.death:  # it is gone where the operation's results are made
                continue
            self._born_bytes[storage.birth] = self._born_bytes.get(storage.birth, 0) + storage.nbytes
        self._saves_of: dict[int, list[int]] = {}
        for number, save in enumerate(step.saved):
            self._saves_of.setdefault(save.storage, []).append(number)
        self._held_over = {one.held_over: index for index, one in enumerate(step.storages) if one.held_over >= 0}
        """Storages of the graph of the step before, by those of this step's."""
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

    # -- lives -----------------------------------------------------------------------------------------------------

    def lives(self, treatments: Mapping[str, Treatment]) -> list[Life]:
        """Returns every stay of every storage under the treatments (block path -> treatment), in no given order."""
        numbered = {b: treatments[block.path] for b, block in enumerate(self.blocks) if block.path in treatments}
        changes = self._changes(numbered)
        stays = (self._stay(index, changes) for index in range(len(self.step.storages)))
        return [life for life in stays if life is not None] + changes.come

    def changed_lives(
        self, block: int, treatment: Treatment, *, in_chain: bool = False
    ) -> tuple[list[Life], list[Life]]:
        """Returns what treating one block alone changes: (lives of a plain step that go, lives that come instead).

        Args:
            in_chain: what earlier blocks have saved too, as their results, is taken as let go by them.
        """
        changes = self._changes({block: treatment})
        if in_chain:
            for index, numbers in self._saved_before[block].items():
                own = set(self._saves_of[index]).difference(numbers)
                if changes.taken.issuperset(own) and index not in changes.held_until:
                    changes.taken.update(numbers)
        gone: list[Life] = []
        come: list[Life] = []
        for index, plain in self._plain_lives[block].items():
            life = self._stay(index, changes)
            if life != plain:
                gone.extend(() if plain is None else (plain,))
                come.extend(() if life is None else (life,))
        return gone, come + changes.come

    @property
    def has_chains(self) -> bool:
        """Tells whether blocks save the results of earlier ones that have saved them, too."""
        return any(self._saved_before)

    @cached_property
    def _saved_before(self) -> list[dict[int, list[int]]]:
        """Returns for each block what it is the last of several to save, and the numbers of the earlier savings."""
        block_of = {n: b for b, block in enumerate(self.blocks) for saved in block.saved for n in saved}
        found: list[dict[int, list[int]]] = [{} for _ in self.blocks]
        for index, numbers in self._saves_of.items():
            last = max((block_of.get(number, -1) for number in numbers), default=-1)
            earlier = [number for number in numbers if block_of.get(number) != last]
            if earlier and all(number in block_of for number in numbers):
                found[last][index] = earlier
        return found

    @cached_property
    def touched(self) -> frozenset[int]:
        """Returns the storages whose lives treatments may change."""
        return frozenset(index for lives in self._plain_lives for index in lives)

    @cached_property
    def _plain_lives(self) -> list[dict[int, Life | None]]:
        """Returns for each block the lives, in a plain step, of what a treatment of it may change."""
        found: list[dict[int, Life | None]] = []
        nothing = _Changes()
        for b, block in enumerate(self.blocks):
            touched: set[int] = set()
            for c, call in enumerate(block.calls):
                touched.update(self._born_in[b][c])
                touched.update(call.inputs)
                touched.update(self.step.saved[s].storage for s in block.saved[c])
            order = sorted(touched | {self._held_over[index] for index in touched & self._held_over.keys()})
            found.append({index: self._stay(index, nothing) for index in order})
        return found

    def _changes(self, treatments: Mapping[int, Treatment]) -> _Changes:
        changes = _Changes()
        for b, treatment in treatments.items():
            for c, call in enumerate(self.blocks[b].calls):
                if call.backward_start < 0:
                    continue
                if treatment.recompute:
                    self._recompute(b, c, treatment, changes)
                    continue
                if treatment.offload:
                    self._offload(b, c, treatment, changes)
        come = changes.come
        changes.pass_window(max((one.window_bytes for one in treatments.values() if one.offload), default=0))
        for index, needs in changes.reloads.items():
            come.extend(_reloaded(self.step.storages[index], index, needs))
        return changes

    def _stay(self, index: int, changes: _Changes) -> Life | None:
        """Returns the stay of a storage from its birth on; None where nothing holds it any more."""
        storage = self.step.storages[index]
        of = storage.held_over
        is_of_graph = of >= 0 and not self.step.storages[of].is_kept
        if is_of_graph and of not in changes.held_until and changes.taken.issuperset(self._saves_of[of]):
            return None  # nor does the graph of the step before hold it
        # What its own operation frees is gone after what runs again before that operation, not ahead of it.
        end: Time = (storage.death, LAST if storage.death == storage.birth else 0)
        saves = self._saves_of.get(index)
        if saves is not None and not changes.taken.isdisjoint(saves):
            left = [self.step.saved[s].released for s in saves if s not in changes.taken]
            end = (max([storage.dropped, *left]), 0)
        held_until = changes.held_until.get(index)
        if held_until is not None and held_until > end:
            end = held_until
        return Life(index, storage.nbytes, (storage.birth, LAST), end)

    def _recompute(self, b: int, c: int, treatment: Treatment, changes: _Changes) -> None:
        block, call, step = self.blocks[b], self.blocks[b].calls[c], self.step
        saved = block.saved[c]
        again = self.recomputed_ops(call, saved, treatment)
        begin = self.recomputed_at(call, saved)
        released: dict[int, int] = {}
        for number in saved:
            index = step.saved[number].storage
            released[index] = max(released.get(index, 0), self.given_back_until(number))
        born = set(self._born_in[b][c])
        changes.taken.update(number for number in saved if step.saved[number].storage in born)
        counted = self.counted_ops(call)
        kept = {counted[i] for i in treatment.kept_ops if i < len(counted)}
        for index in self._born_in[b][c]:
            storage = step.storages[index]
            rank = bisect_left(again, storage.birth)
            dropped: Time = (begin, min(bisect_left(again, storage.dropped), len(again)))
            end = max(dropped, (released[index], 0)) if index in released else dropped
            if storage.birth in kept:
                if index in step.ops[storage.birth].outputs:  # what it allocated for itself is not kept
                    changes.held_until[index] = max(end, (begin, rank))
            elif rank < len(again) and again[rank] == storage.birth:
                changes.come.append(Life(index, storage.nbytes, (begin, rank), end))
        if self._born_in[b][c] and step.storages[self._born_in[b][c][0]].device == "cpu":
            first = self._born_in[b][c][0]
            changes.come.append(Life(first, RNG_STATE_BYTES, (call.start, LAST), (call.backward_end, 0)))
            changes.come.append(Life(first, RNG_STATE_BYTES, (begin, 0), (begin, len(again))))
        for index in call.inputs:
            storage = step.storages[index]
            if storage.category not in ("activation", "temporary", "input"):
                continue
            if treatment.offload and storage.nbytes >= treatment.min_bytes:
                changes.taken.update(number for number in saved if step.saved[number].storage == index)
                if storage.birth >= 0:
                    at = self._prefetch_at[call.start]
                    left, until = (call.start, 0), (call.backward_end, 0)
                    need = _Reload(call.start, Moved(storage.nbytes), left, at, (begin, 0), until)
                    changes.reloads.setdefault(index, []).append(need)
            else:
                changes.hold(index, (call.backward_end, 0))

    def _offload(self, b: int, c: int, treatment: Treatment, changes: _Changes) -> None:
        call = self.blocks[b].calls[c]
        spans: dict[int, tuple[int, int]] = {}
        packed_at: dict[int, int] = {}
        for number in self.blocks[b].saved[c]:
            if self.movable(number, treatment):
                save = self.step.saved[number]
                changes.taken.add(number)
                packed_at.setdefault(save.storage, save.packed)
                asked, until = spans.get(save.storage, (save.unpacked, save.released))
                spans[save.storage] = (min(asked, save.unpacked), max(until, save.released))
        at = self._prefetch_at[call.start]
        for index, moved in self._moved_of(self.blocks[b].saved[c], treatment).items():
            asked, until = spans[index]
            need = _Reload(call.start, moved, (packed_at[index], 0), at, (asked, 0), (until, 0))
            changes.reloads.setdefault(index, []).append(need)
            # A device's packed bytes are in its window, and its kernels take no more.
            if not treatment.window_bytes:
                changes.come.extend(self._packing(index, moved, packed_at[index]))
                changes.come.extend(self._packing(index, moved, asked))

    def _packing(self, index: int, moved: Moved, op: int) -> list[Life]:
        """Returns the packed bytes beside what they are made of, or become, just before operation `op`.

        What that allocates is not there yet, and counts in their place. Once packed they are part of the window.
        """
        excess_bytes = moved.link_bytes + scratch_bytes(moved.num_packed) - self._born_bytes.get(op, 0)
        is_more = moved.num_packed > 0 and excess_bytes > 0
        return [Life(index, excess_bytes, (op, 0), (op + 1, 0))] if is_more else []

    # -- whole steps -----------------------------------------------------------------------------------------------

    def treated(self, treatments: Mapping[str, Treatment]) -> Step:
        """Returns the step as it runs under the treatments, with what runs again and second lives in place."""
        insertions: list[tuple[int, list[int]]] = []
        for block in self.blocks:
            treatment = treatments.get(block.path)
            if treatment is not None:
                for call, saved in zip(block.calls, block.saved, strict=True):
                    if call.backward_start >= 0:
                        insertions.extend(self.repeated_ops(call, saved, treatment))
        return rebuilt(self.step, sorted(insertions), self.lives(treatments))

    def parked(self, min_bytes: int, *, read_ahead_bytes: int = 0) -> Step:
        """Returns the step as it runs while being recorded with every large saved tensor moved away.

        Args:
            read_ahead_bytes: of a device, what may come back ahead of its use.
        """
        taken: set[int] = set()
        come: list[Life] = []
        anywhere = Treatment(offload=True, min_bytes=min_bytes)
        spans: dict[int, tuple[int, int]] = {}
        left: dict[int, int] = {}
        for number, save in enumerate(self.step.saved):
            if self.movable(number, anywhere):
                taken.add(number)
                left.setdefault(save.storage, save.packed)
                begin, end = spans.get(save.storage, (save.unpacked, save.released))
                spans[save.storage] = (min(begin, save.unpacked), max(end, save.released))
        moves = self._moved_of(range(len(self.step.saved)), anywhere)
        asked = {index: (spans[index][0], LAST) for index in moves}
        if read_ahead_bytes:
            passing = [Passing(moved.nbytes, (left[i], 0), asked[i], asked[i]) for i, moved in moves.items()]
            passages = through_window(passing, read_ahead_bytes, holds_sources=False)
            asked = {index: passage.back for index, passage in zip(moves, passages, strict=True)}
        for index, moved in moves.items():
            nbytes = _reloaded_bytes(self.step.storages[index], moved.nbytes)
            come.append(Life(index, nbytes, asked[index], (spans[index][1], 0)))
        lives = []
        for index, storage in enumerate(self.step.storages):
            end = storage.death
            saves = self._saves_of.get(index, ())
            if any(s in taken for s in saves):
                end = max([storage.dropped, *(self.step.saved[s].released for s in saves if s not in taken)])
            lives.append(Life(index, storage.nbytes, (storage.birth, LAST), (end, 0)))
        return rebuilt(self.step, [], lives + come)


def _reloaded(storage: Storage, index: int, needs: list[_Reload]) -> list[Life]:
    """Returns the stays of bytes that come back: once for all calls that saved them while they were away."""
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
            if begin < need.demand:
                packed.append(Life(index, _reloaded_bytes(storage, need.moved.link_bytes), begin, need.demand))
            begin = need.demand
        lives.append(Life(index, nbytes, begin, need.end))
    return lives + packed


def _reloaded_bytes(storage: Storage, nbytes: int) -> int:
    """Returns the memory that takes bytes back: a disk reads whole blocks, into memory that begins at one."""
    return round_up(nbytes) + ALIGNMENT_BYTES if storage.device == "cpu" else nbytes
