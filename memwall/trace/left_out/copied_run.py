"""A step in which a block that was left out runs after one that is alike, and its backward before that one's.

What the like is called with, the copy is called with what the like returns; who used that uses what the copy returns.
So a chain of blocks gets one more. Blocks that lie beside each other need no more for it.
"""

from collections import Counter
from typing import NamedTuple

import msgspec

from memwall.trace.left_out.siblings import LeftOut, Stretch
from memwall.trace.left_out.spans import Span, Spans, backward_of
from memwall.trace.records import ModuleCall, Op, SavedTensor, Step, Storage


class Lacks(NamedTuple):
    """Says what a block does not have yet since it was left out, in bytes of each tensor."""

    gradients: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    """Bytes of each tensor of the optimizer's state."""


def with_copies(step: Step, left_out: LeftOut, *, size: int, lacks: Lacks) -> Step:
    """Returns the step in which a block that was left out has run as its like has.

    Args:
        size: modules in the block, itself included.
        lacks: what comes into being for that.
    """
    return with_more(_Copies(step, left_out, size, lacks).step(), Lacks(state=lacks.state))


class _Copies:
    def __init__(self, step: Step, left_out: LeftOut, size: int, lacks: Lacks) -> None:
        self._step, self._left_out, self._size = step, left_out, size
        self._gradients = Counter(lacks.gradients)
        # In order of the tree, so that what goes over the blocks finds them as they come in the model.
        self._swaps = left_out.module < left_out.like and all(run.is_whole for run in left_out.runs)
        self._spans = Spans(step, left_out.runs)
        self._copy_of: dict[int, int] = {}
        """New storages by the ones that they are copied from."""
        self._late: set[int] = set()
        """Storages that a run makes for what follows it."""
        self._fed: dict[int, int] = {}
        """Storages that copies use in place of those that their runs are called with."""
        for index, storage in enumerate(step.storages):
            span = self._spans.of(storage.birth)
            if span is not None:
                self._copy_of[index] = len(step.storages) + len(self._copy_of)
                is_returned = index in left_out.runs[span.run].last.outputs
                if not span.is_backward and (storage.dropped > span.end or is_returned):
                    self._late.add(index)
        for run in left_out.runs:
            self._feed(run)
        self._taken: dict[int, Span] = {}
        """Gradients that a backward takes over from what comes before it, each with that backward's operations."""
        for index, storage in enumerate(step.storages):
            if storage.phase == "backward" and storage.category != "gradient" and index not in self._copy_of:
                for span in self._spans.all:
                    if span.is_backward and storage.birth < span.start < storage.death <= span.end:
                        self._taken[index] = span
        self._taken_until = {
            span: max((step.storages[i].death for i, one in self._taken.items() if one is span), default=span.end)
            for span in self._spans.all
        }

    def _feed(self, run: Stretch) -> None:
        free = [index for index in run.last.outputs if index in self._late]
        for index in run.first.inputs:
            storage = self._step.storages[index]
            if storage.category == "parameter" or index in self._copy_of:
                continue
            found = next((each for each in free if self._step.storages[each].nbytes == storage.nbytes), None)
            if found is not None:
                free.remove(found)
                self._fed[index] = found

    def step(self) -> Step:
        """Returns the new step."""
        step, spans = self._step, self._spans
        ops: list[Op] = []
        begin = 0
        for span in spans.all:
            ops += [self._kept_op(number, step.ops[number]) for number in range(begin, span.at)]
            ops += [self._copied_op(each) for each in step.ops[span.start : span.end]]
            begin = span.at
        ops += [self._kept_op(number, step.ops[number]) for number in range(begin, len(step.ops))]
        savings = [self._kept_saving(saving) for saving in step.saved]
        savings += [self._copied_saving(saving) for saving in step.saved if self._is_own(saving)]
        releases: dict[int, int] = {}
        for saving in savings:
            releases[saving.storage] = max(releases.get(saving.storage, 0), saving.released)
        storages = [self._kept_storage(index, one, releases) for index, one in enumerate(step.storages)]
        storages += [self._copied_storage(step.storages[index]) for index in self._copy_of]
        calls = [self._kept_call(call) for call in step.calls] + self._copied_calls()
        return msgspec.structs.replace(
            step,
            ops=tuple(ops),
            storages=tuple(storages),
            saved=tuple(sorted(savings, key=lambda saving: saving.packed)),
            calls=tuple(sorted(calls, key=lambda call: (call.start, -call.end))),
            marks=tuple((name, spans.forward_ended(at)) for name, at in step.marks),
        )

    # -- what was recorded -----------------------------------------------------------------------------------------

    def _kept_op(self, number: int, op: Op) -> Op:
        if self._spans.of(number) is not None:
            return msgspec.structs.replace(op, module=self._kept_module(op.module))
        late = self._late
        if late.isdisjoint(op.inputs) and late.isdisjoint(op.outputs) and late.isdisjoint(op.writes):
            return op
        inputs, outputs, writes = (tuple(map(self._later, each)) for each in (op.inputs, op.outputs, op.writes))
        return msgspec.structs.replace(op, inputs=inputs, outputs=outputs, writes=writes)

    def _later(self, index: int) -> int:
        return self._copy_of[index] if index in self._late else index

    def _kept_saving(self, saving: SavedTensor) -> SavedTensor:
        is_own, spans = self._is_own(saving), self._spans
        return msgspec.structs.replace(
            saving,
            storage=saving.storage if is_own else self._later(saving.storage),
            module=self._kept_module(saving.module) if is_own else saving.module,
            packed=(spans.ended if is_own else spans.begun)(saving.packed),
            unpacked=spans.begun(saving.unpacked),
            released=spans.ended(saving.released),
        )

    def _kept_storage(self, index: int, storage: Storage, releases: dict[int, int]) -> Storage:
        spans, span = self._spans, self._spans.of(storage.birth)
        dropped, death = spans.ended(storage.dropped), spans.ended(storage.death)
        if index in self._late and span is not None:
            dropped = death = min(dropped, span.again(span.end))
        elif index in self._taken:  # by the copy's, which hands its own on
            dropped, death = (min(time, self._taken[index].again(storage.death)) for time in (dropped, death))
        return msgspec.structs.replace(
            storage,
            birth=spans.begun(storage.birth) if storage.birth >= 0 else storage.birth,
            dropped=dropped,
            death=max(death, releases.get(index, 0)),
            module=storage.module if span is None else self._kept_module(storage.module),
        )

    def _kept_call(self, call: ModuleCall) -> ModuleCall:
        is_own, spans = self._is_in_run(call), self._spans
        has_backward = call.backward_start >= 0
        return msgspec.structs.replace(
            call,
            module=self._kept_module(call.module) if is_own else call.module,
            start=spans.begun(call.start),
            end=(spans.ended if is_own else spans.forward_ended)(call.end),
            backward_start=(spans.begun if is_own else spans.ended)(call.backward_start) if has_backward else -1,
            backward_end=spans.ended(call.backward_end) if has_backward else -1,
            inputs=call.inputs if is_own else tuple(map(self._later, call.inputs)),
            outputs=call.outputs if is_own else tuple(map(self._later, call.outputs)),
        )

    # -- its copies ------------------------------------------------------------------------------------------------

    def _copied_op(self, op: Op) -> Op:
        inputs, outputs, writes = (tuple(map(self._other, each)) for each in (op.inputs, op.outputs, op.writes))
        module = self._copied_module(op.module)
        return msgspec.structs.replace(op, module=module, inputs=inputs, outputs=outputs, writes=writes)

    def _other(self, index: int) -> int:
        return self._copy_of.get(index, self._fed.get(index, index))

    def _copied_saving(self, saving: SavedTensor) -> SavedTensor:
        run = self._run_of(saving.packed)
        return msgspec.structs.replace(
            saving,
            storage=self._other(saving.storage),
            module=self._copied_module(saving.module),
            packed=self._spans.again(saving.packed, run),
            unpacked=self._spans.again(saving.unpacked, run),
            released=self._spans.again(saving.released, run),
        )

    def _copied_storage(self, storage: Storage) -> Storage:
        span = self._spans.of(storage.birth)
        assert span is not None
        nbytes = storage.nbytes
        dropped, death = (self._spans.again(time, span.run) for time in (storage.dropped, storage.death))
        if storage.category == "gradient":
            nbytes = nbytes if self._gradients[nbytes] > 0 else 0  # it is there already
            self._gradients[storage.nbytes] -= 1
        elif span.is_backward:  # what the backward that follows takes over: the like's own
            dropped, death = (min(time, self._spans.ended(self._taken_until[span])) for time in (dropped, death))
        return msgspec.structs.replace(
            storage,
            nbytes=nbytes,
            birth=span.again(storage.birth),
            dropped=dropped,
            death=death,
            module=self._copied_module(storage.module),
        )

    def _copied_calls(self) -> list[ModuleCall]:
        copies = []
        for run in self._left_out.runs:
            start, end = backward_of(run)
            whole = msgspec.structs.replace(
                run.first,
                module=self._left_out.like,
                end=run.last.end,
                backward_start=start,
                backward_end=end,
                outputs=run.last.outputs,
            )
            copies += [] if run.is_whole else [self._copied_call(whole)]
        return copies + [self._copied_call(call) for call in self._step.calls if self._is_in_run(call)]

    def _copied_call(self, call: ModuleCall) -> ModuleCall:
        run, has_backward = self._run_of(call.start), call.backward_start >= 0
        return ModuleCall(
            module=self._copied_module(call.module),
            start=self._spans.again(call.start, run),
            end=self._spans.again(call.end, run),
            backward_start=self._spans.again(call.backward_start, run) if has_backward else -1,
            backward_end=self._spans.again(call.backward_end, run) if has_backward else -1,
            inputs=tuple(map(self._other, call.inputs)),
            outputs=tuple(map(self._other, call.outputs)),
        )

    # -- modules ---------------------------------------------------------------------------------------------------

    def _is_alike(self, module: int) -> bool:
        return 0 <= module - self._left_out.like < self._size

    def _moved(self, module: int) -> int:
        return module - self._left_out.like + self._left_out.module if self._is_alike(module) else module

    def _kept_module(self, module: int) -> int:
        return self._moved(module) if self._swaps else module

    def _copied_module(self, module: int) -> int:
        return module if self._swaps else self._moved(module)

    def _run_of(self, time: int) -> int:
        runs = enumerate(self._left_out.runs)
        return next((number for number, run in runs if run.first.start <= time <= run.last.end), -1)

    def _is_in_run(self, call: ModuleCall) -> bool:
        if not self._is_alike(call.module):
            return False
        return any(run.first.start <= call.start and call.end <= run.last.end for run in self._left_out.runs)

    def _is_own(self, saving: SavedTensor) -> bool:
        return self._is_alike(saving.module) and self._run_of(saving.packed) >= 0


def with_more(step: Step, lacks: Lacks) -> Step:
    """Returns the step with what a block lacks, each tensor made where the first one of its size is."""
    storages, ops = list(step.storages), list(step.ops)
    for category, sizes in (("gradient", lacks.gradients), ("optimizer_state", lacks.state)):
        like = {each.nbytes: each for each in reversed(step.storages) if each.category == category and each.nbytes}
        for nbytes in sizes:
            if nbytes in like:
                birth = like[nbytes].birth
                if birth >= 0:
                    ops[birth] = msgspec.structs.replace(ops[birth], outputs=(*ops[birth].outputs, len(storages)))
                storages.append(like[nbytes])
    return msgspec.structs.replace(step, ops=tuple(ops), storages=tuple(storages))
