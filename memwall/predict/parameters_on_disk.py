"""A step whose parameters and gradients are below memory, but for a few blocks at a time: what leaves, and the step.

They are on disk, or below a device in the host's memory.

A unit is a block, or a module outside blocks with parameters of its own. In forward a unit is in memory while it runs
and while the one before it does, which reads it ahead; in backward from the unit after it to the unit before it. A
gradient leaves once it is accumulated, through a copy that is written behind; where there is one already, of an earlier
micro-batch, it comes with its parameter. The optimizer has a window of parameters
with their gradients in memory, the next window on its way in and the last one on its way out.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from memwall.predict.state_on_disk import shrink_temporaries
from memwall.store.backend import round_up
from memwall.trace.records import Module, ModuleCall, Step, Storage


class Away(NamedTuple):
    """Lists what of a step is on disk between its uses, as indices of storages."""

    users: dict[int, frozenset[int]]
    """The units that use each parameter."""
    staying: frozenset[int]
    """Parameters of these that stay in memory; their gradients leave."""
    gradients: tuple[int, ...]
    is_summed: bool
    """Whether a backward adds to gradients that are on disk: of an earlier micro-batch, or zeros."""
    parameter_bytes: int
    """Bytes of parameters that leave."""
    gradient_bytes: int


def streamed_blocks(modules: Sequence[Module]) -> tuple[str, ...]:
    """Paths of the modules that stand side by side in a list or sequence with others of their class."""
    children: dict[int, list[int]] = {}
    for index, module in enumerate(modules):
        children.setdefault(module.parent, []).append(index)
    found: list[str] = []

    def search(index: int) -> None:
        for child in children.get(index, ()):
            module = modules[child]
            like = [c for c in children[index] if modules[c].class_name == module.class_name]
            if module.container != "none" and len(like) > 1 and not module.is_leaf:
                found.append(module.path)
            else:
                search(child)

    search(0)
    return tuple(found)


def away_from(
    step: Step, modules: Sequence[Module], blocks: Iterable[str], min_bytes: int, *, staying: Iterable[str] = ()
) -> Away:
    """Finds what can be on disk: parameters that nothing but their units uses, and the gradients of those.

    The root's own stay: its forward runs already when they would have to be brought in.

    Args:
        step: as it was recorded.
        modules: of its trace.
        blocks: paths of modules that are units; so is every module outside them that has parameters of its own.
        min_bytes: smaller parameters stay, and their gradients.
        staying: paths of units whose parameters stay in memory.
    """
    units = _units(modules, frozenset(blocks))
    users: dict[int, set[int]] = {}
    for op in step.ops:
        if op.phase in ("forward", "loss"):
            for index in op.inputs:
                if step.storages[index].category == "parameter":
                    users.setdefault(index, set()).add(units[op.module] if op.module >= 0 else -1)
    candidates = [i for i, s in enumerate(step.storages) if s.category == "parameter" and _is_large(s, min_bytes)]
    away = {i: frozenset(users[i]) for i in candidates if i in users and -1 not in users[i]}
    # A trace does not know whose gradient is whose; they have their parameters' sizes.
    without_unit = Counter(step.storages[i].nbytes for i in candidates if i not in away)
    gradients: list[int] = []
    for index, storage in enumerate(step.storages):
        if storage.category == "gradient" and _is_large(storage, min_bytes):
            if without_unit[storage.nbytes] > 0:
                without_unit[storage.nbytes] -= 1
            else:
                gradients.append(index)
    paths = frozenset(staying)
    stay = frozenset(i for i, used in away.items() if any(modules[unit].path in paths for unit in used))
    return Away(
        away,
        stay,
        tuple(gradients),
        any(name == "accumulation" for name, _ in step.marks) or any(step.storages[i].birth < 0 for i in gradients),
        sum(_place_bytes(step.storages[i]) for i in away if i not in stay),
        sum(_place_bytes(step.storages[i]) for i in gradients),
    )


def with_parameters_on_disk(step: Step, modules: Sequence[Module], away: Away, *, window_bytes: int) -> Step:
    """Returns the step with so much of it on disk between its uses.

    Args:
        away: as found in this step, or in one with the same operations.
        window_bytes: what the optimizer steps at a time, and again what waits to be written; one tensor may always.
    """
    storages = list(step.storages)
    for index in away.users:
        storages[index] = msgspec.structs.replace(storages[index], nbytes=0)
    last_uses = last_gradient_uses(step, away.gradients)
    for index in away.gradients:
        storage = storages[index]
        end = last_uses[index] + 1
        is_new = storage.birth >= 0
        storages[index] = msgspec.structs.replace(
            storage, nbytes=storage.nbytes if is_new else 0, dropped=end if is_new else -1, death=end if is_new else -1
        )
    shrink_temporaries(storages, step, _stepped_share(step, away, window_bytes))
    # At the end, so that the numbers operations refer to stay.
    for index in sorted(away.staying):
        like = step.storages[index]
        begin = 0 if like.device_type == "cpu" else -1
        storages.append(msgspec.structs.replace(_stay(like, _place_bytes(like), 0, len(step.ops), step), birth=begin))
    storages.extend(_passing(step, modules, away, window_bytes))
    return msgspec.structs.replace(step, storages=tuple(storages))


def _stepped_share(step: Step, away: Away, window_bytes: int) -> float:
    """Returns which part of all gradients' bytes an optimizer steps at once: a window, or all that stay in memory."""
    sizes = [storage.nbytes for storage in step.storages if storage.category == "gradient"]
    leaving = [step.storages[index].nbytes for index in away.gradients]
    return max(window_bytes, *leaving, sum(sizes) - sum(leaving)) / sum(sizes) if leaving else 1.0


def paged_bytes(step: Step, modules: Sequence[Module], away: Away, *, window_bytes: int) -> int:
    """Returns the most that is in memory at once of what comes from disk and goes back, in maps of its own.

    What stays in such maps all the time is not among it.
    """
    change = [0] * (len(step.ops) + 1)
    for storage in _passing(step, modules, away, window_bytes):
        change[storage.birth] += storage.nbytes
        change[storage.death] -= storage.nbytes
    most_bytes = held_bytes = 0
    for num_bytes in change:
        held_bytes += num_bytes
        most_bytes = max(most_bytes, held_bytes)
    return most_bytes


def _is_large(storage: Storage, min_bytes: int) -> bool:
    return storage.device_type in ("cpu", "cuda") and storage.nbytes >= max(1, min_bytes)


def _place_bytes(storage: Storage) -> int:
    """Returns the bytes that a tensor takes away and in memory: of a CPU's pages of its own."""
    return round_up(storage.nbytes) if storage.device_type == "cpu" else storage.nbytes


def _units(modules: Sequence[Module], blocks: frozenset[str]) -> list[int]:
    """Returns the unit that each module's operations belong to; -1 for none."""
    units: list[int] = []
    for index, module in enumerate(modules):
        above = units[module.parent] if module.parent >= 0 else -1
        if above >= 0 and modules[above].path in blocks:
            units.append(above)
        elif module.path in blocks or (module.parameter_bytes > 0 and module.parent >= 0):
            units.append(index)
        else:
            units.append(-1)
    return units


def _passing(step: Step, modules: Sequence[Module], away: Away, window_bytes: int) -> list[Storage]:
    like = {index: step.storages[index] for index in away.users}
    spans = _spans(step, {unit for users in away.users.values() for unit in users})
    found: list[Storage] = []
    summed_sizes = {step.storages[i].nbytes for i in away.gradients} if away.is_summed else set()
    for index, users in sorted(away.users.items()):
        num_bytes = _place_bytes(like[index])
        for begin, end in _merged(span for unit in users for span in spans.get(unit, ())):
            if index not in away.staying:
                found.append(_stay(like[index], num_bytes, begin, end, step))
            if like[index].nbytes in summed_sizes and step.ops[end - 1].phase == "backward":
                found.append(_stay(like[index], num_bytes, max(begin, _backward_start(step, end)), end, step))
    sizes = sorted((_place_bytes(step.storages[i]) for i in away.gradients), reverse=True)
    leaves = len(away.staying) < len(away.users)
    is_on_device = any(step.storages[i].device_type == "cuda" for i in away.gradients[:1])
    stepping = _stepping(sizes, window_bytes, leaves=leaves)
    if leaves and is_on_device:
        stepping = min(stepping, _stepping_in_order(step, away, window_bytes), key=sum)
    spilling = _spilling(sizes, window_bytes)
    if is_on_device and not away.is_summed:
        found += _spilled_in_order(step, away, window_bytes)
        spilling = []
    for phase, pieces in (("backward", spilling), ("optimizer", stepping)):
        ops = [number for number, op in enumerate(step.ops) if op.phase == phase]
        # A device's allocator finds room for each; a CPU's pages are of the system.
        for num_bytes in pieces if is_on_device else [sum(pieces)]:
            if ops and num_bytes:
                found.append(_stay(next(iter(like.values())), num_bytes, ops[0], ops[-1] + 1, step))
    return found


def _spilled_in_order(step: Step, away: Away, window_bytes: int) -> list[Storage]:
    """Returns the copies of a device's gradients, each from where one is accumulated until others take its place."""
    found: list[Storage] = []
    waiting: deque[tuple[Storage, int]] = deque()
    waiting_bytes = 0
    last_uses = last_gradient_uses(step, away.gradients)
    for index, number in sorted(last_uses.items(), key=lambda use: (use[1], use[0])):
        like = step.storages[index]
        while waiting and waiting_bytes + like.nbytes > window_bytes:
            oldest, begin = waiting.popleft()
            waiting_bytes -= oldest.nbytes
            found.append(_stay(oldest, oldest.nbytes, begin, number + 1, step))
        waiting.append((like, number))
        waiting_bytes += like.nbytes
    end = max((number for number, op in enumerate(step.ops) if op.phase == "backward"), default=0) + 1
    return found + [_stay(like, like.nbytes, begin, max(end, begin + 1), step) for like, begin in waiting]


def _stay(like: Storage, num_bytes: int, begin: int, end: int, step: Step) -> Storage:
    return msgspec.structs.replace(
        like, nbytes=num_bytes, birth=begin, dropped=end, death=end, phase=step.ops[begin].phase, batched=False
    )


def _spilling(sizes: Sequence[int], window_bytes: int) -> list[int]:
    """Returns the bytes of gradients' copies during backward: one is being made while others wait to be written."""
    if not sizes:
        return []
    return _up_to([sizes[0], *sizes], min(sizes[0] + max(window_bytes, sizes[0]), sum(sizes)))


def _stepping(sizes: Sequence[int], window_bytes: int, *, leaves: bool) -> list[int]:
    """Returns bytes of parameters and gradients in the optimizer's step: a window, the next, and one being written.

    Where all parameters stay, only gradients pass; the last ones of backward may still wait to be written.
    """
    first, second, third = (max(size, window_bytes) for size in (*sizes[:3], 0, 0, 0)[:3])
    if not leaves:
        return _up_to(sizes, min(first + second + max(window_bytes, first), sum(sizes)))
    most_bytes = max(2 * (first + second) + second, 2 * (second + third) + first)
    return _up_to(sorted(3 * list(sizes), reverse=True), min(most_bytes, 3 * sum(sizes)))


def _up_to(sizes: Sequence[int], num_bytes: int) -> list[int]:
    """Returns pieces of these sizes, as they come, that are so many bytes together; the last one may be smaller."""
    found: list[int] = []
    for size in sizes:
        found.append(min(size, num_bytes))
        num_bytes -= found[-1]
    return [*found, num_bytes]


def _stepping_in_order(step: Step, away: Away, window_bytes: int) -> list[int]:
    """Returns the same where parameters are stepped in the order of the model, and none is stepped that is frozen."""
    trained = Counter(step.storages[index].nbytes for index in away.gradients)
    sizes: list[int] = []
    for index in sorted(away.users):
        if trained[step.storages[index].nbytes] > 0:
            trained[step.storages[index].nbytes] -= 1
            sizes.append(step.storages[index].nbytes)
    windows: list[list[int]] = []
    for size in sizes:
        if not windows or sum(windows[-1]) + size > window_bytes:
            windows.append([])
        windows[-1].append(size)
    most: list[int] = []
    place = 0
    for window in windows:
        following = sizes[place + len(window) :]
        ahead = following[:1]
        for size in following[1:]:
            if sum(ahead) + size > sum(window):
                break
            ahead.append(size)
        written: list[int] = []
        for size in reversed(sizes[:place]):
            if written and sum(written) + size > window_bytes:
                break
            written.append(size)
        most = max(most, [*2 * window, *2 * ahead, *written], key=sum)
        place += len(window)
    return most


def _backward_start(step: Step, end: int) -> int:
    """Returns where the backward begins that the operation before `end` belongs to."""
    begin = end - 1
    while begin > 0 and step.ops[begin - 1].phase == "backward":
        begin -= 1
    return begin


def _spans(step: Step, units: set[int]) -> dict[int, list[tuple[int, int]]]:
    """Returns when the parameters of each unit are in memory in forward and backward, as [begin, end) of operations."""
    spans: dict[int, list[tuple[int, int]]] = {}
    calls = [call for call in step.calls if call.module in units]
    forward = sorted(calls, key=lambda call: (call.start, -call.end))
    for before, call in zip((None, *forward), forward, strict=False):
        is_ahead = before is not None and not 0 <= before.backward_start <= call.start
        spans.setdefault(call.module, []).append(
            (before.start if before is not None and is_ahead else call.start, call.end)
        )
    backward = sorted((call for call in calls if call.backward_start >= 0), key=lambda call: call.backward_start)
    for number, (before, call) in enumerate(zip((None, *backward), backward, strict=False)):
        # The last unit of a forward stays for the backward, which begins with it.
        begin = call.end if before is None or not _is_one_backward(before, call) else before.backward_start
        # Until the backward begins of a call that was over before this one: of those within it none is.
        after = next((other for other in backward[number + 1 :] if other.end <= call.start), None)
        end = call.backward_end if after is None or not _is_one_backward(call, after) else after.backward_start
        spans[call.module].append((begin, end))
    return spans


def _is_one_backward(one: ModuleCall, next_one: ModuleCall) -> bool:
    """Tells whether no forward lies between the backwards of two calls."""
    return next_one.end <= one.backward_start


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def last_gradient_uses(step: Step, gradients: Sequence[int]) -> dict[int, int]:
    """Returns the last operation that each gradient takes part in of the backward that makes it."""
    found = {index: max(step.storages[index].birth, 0) for index in gradients}
    present: set[int] = set()
    for number, op in enumerate(step.ops):
        if op.phase != "backward":
            present.clear()
            continue
        present.update(index for index in op.outputs if index in found and step.storages[index].birth == number)
        for index in present.intersection((*op.inputs, *op.outputs)):
            found[index] = number
    return found
