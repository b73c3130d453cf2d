"""A step whose optimizer keeps its state on disk, or a device's in host memory: what can leave, and the step then.

In the optimizer the state passes through memory in buckets of whole parameters: while one is stepped, the one before is
written and the one after is read, in `NUM_BUFFERS` buffers of a bucket each. A parameter whose state is larger than a
bucket has a buffer of its own, and is alone.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.trace.records import Step, Storage

CPU_SECONDS_PER_BYTE = 0.25e-9
"""A worker's checksum, system call and hand-over for each byte read or written, beside the computation on the same
cores: 0.17 s for 671 MB (two cores, torch 2.13, 2026-11-21)."""
NUM_BUFFERS = 3
"""One that is stepped, one being written, one being read: with two, a read waits for the write before it."""
# Two moments, where the recorded sizes do not tell whose tensor is whose.
_USUAL_TENSORS = 2


def movable_state_bytes(step: Step, min_bytes: int) -> int:
    """Returns the bytes of the optimizer's state that can be elsewhere between steps."""
    return sum(storage.nbytes for storage in step.storages if _is_movable(storage, min_bytes))


def state_sizes(step: Step, min_bytes: int) -> tuple[int, ...]:
    """Returns the bytes of movable state of each parameter that has some, smallest first.

    A trace does not know whose state a tensor is. State has the size of its parameter's gradient, or twice that where
    it is in float32 and the gradient in 16 bits; so of each size there are so many tensors for each gradient. Where a
    model has parameters of both kinds, those that are fewer are guessed.
    """
    return tuple(sorted(_sizes_in_order(step, min_bytes)))


def _sizes_in_order(step: Step, min_bytes: int) -> list[int]:
    """Returns the same in the order of the optimizer, whose state a trace has parameter by parameter."""
    movable = [s.nbytes for s in step.storages if _is_movable(s, min_bytes)]
    tensors = Counter(movable)
    own = Counter(s.nbytes for s in step.storages if s.category == "gradient")
    doubled = Counter({2 * size: count for size, count in own.items()})
    gradients = max(own, doubled, key=lambda sizes: sum(count for size, count in tensors.items() if size in sizes))
    found: list[int] = []
    last: dict[int, tuple[int, int]] = {}
    for size in movable:
        tensors_each = -(-tensors[size] // gradients[size]) if size in gradients else _USUAL_TENSORS
        place, num_missing = last.get(size, (0, 0))
        if not num_missing:
            place, num_missing = len(found), tensors_each
            found.append(0)
        found[place] += size
        last[size] = place, num_missing - 1
    return found


def buffer_sizes(sizes: Sequence[int], bucket_bytes: int) -> tuple[int, ...]:
    """Returns the buffers that are in memory at once when state of these sizes passes through, at most."""
    own = [round_up(size) for size in sizes if size > bucket_bytes]
    shared = [size for size in sizes if size <= bucket_bytes]
    num_shared = min(NUM_BUFFERS, _num_buckets(shared, bucket_bytes))
    ring = (round_up(bucket_bytes if num_shared > 1 else sum(shared)),) * num_shared
    return max((ring, (max(own, default=0),)), key=sum)


def _device_buffers(step: Step, *, resident_bytes: int, bucket_bytes: int, min_bytes: int) -> tuple[int, ...]:
    """Returns the same of a device, whose allocator hands out what the fullest bucket takes."""
    own: list[int] = []
    buckets: list[int] = []
    for size in _sizes_in_order(step, min_bytes):
        if size <= resident_bytes:
            resident_bytes -= size
        elif size > bucket_bytes:
            own.append(round_up(size))
        elif not buckets or buckets[-1] + size > bucket_bytes:
            buckets.append(size)
        else:
            buckets[-1] += size
    ring = (round_up(max(buckets, default=0)),) * min(NUM_BUFFERS, len(buckets))
    return max((ring, (max(own, default=0),)), key=sum)


def staging_bytes(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Returns the host memory through which state of a device passes on its way to a disk and back.

    What has passed through stays pinned: a larger parameter's takes the place of one buffer of the ring.
    """
    own = [round_up(size) for size in sizes if size > bucket_bytes]
    shared = [size for size in sizes if size <= bucket_bytes]
    num_shared = min(NUM_BUFFERS, _num_buckets(shared, bucket_bytes))
    each_bytes = round_up(bucket_bytes if num_shared > 1 else sum(shared))
    return each_bytes * (num_shared - bool(own and num_shared)) + max(own, default=0)


def with_state_on_disk(
    step: Step, *, resident_bytes: int, bucket_bytes: int, min_bytes: int, comes_back: bool = True
) -> Step:
    """Returns the step with `resident_bytes` of its movable state in memory, and while the optimizer runs its buffers.

    Args:
        comes_back: whether state is in memory while it is stepped, and needs buffers there.
    """
    optimizer_ops = [number for number, op in enumerate(step.ops) if op.phase == "optimizer"]
    away_bytes = movable_state_bytes(step, min_bytes) - resident_bytes
    if not optimizer_ops or away_bytes <= 0:
        return step
    storages = [msgspec.structs.replace(s, nbytes=0) if _is_movable(s, min_bytes) else s for s in step.storages]
    like = next(s for s in step.storages if _is_movable(s, min_bytes))
    # At the end, so that the numbers operations refer to stay.
    for num_bytes in _resident(step, resident_bytes, min_bytes):
        storages.append(
            msgspec.structs.replace(
                like, nbytes=num_bytes, birth=-1, dropped=len(step.ops), death=len(step.ops), batched=False
            )
        )
    buffers: tuple[int, ...] = ()
    if comes_back and like.device_type == "cuda":
        buffers = _device_buffers(step, resident_bytes=resident_bytes, bucket_bytes=bucket_bytes, min_bytes=min_bytes)
    elif comes_back:
        buffers = buffer_sizes(state_sizes(step, min_bytes), bucket_bytes)
    if comes_back:
        most_bytes = max(resident_bytes, *buffers)  # stepped at once
        shrink_temporaries(storages, step, most_bytes / (away_bytes + resident_bytes))
    storages.extend(
        msgspec.structs.replace(
            like,
            nbytes=num_bytes + ALIGNMENT_BYTES,
            category="temporary",
            birth=begin,
            dropped=end,
            death=end,
            phase="optimizer",
            batched=False,
        )
        for begin, end in _runs(optimizer_ops)
        for num_bytes in buffers
    )
    return msgspec.structs.replace(step, storages=tuple(storages))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where operations that follow each other begin and end: of several optimizers each may have its turn."""
    known = set(numbers)
    begins = [number for number in numbers if number - 1 not in known]
    ends = [number + 1 for number in numbers if number + 1 not in known]
    return list(zip(begins, ends, strict=True))


def _resident(step: Step, resident_bytes: int, min_bytes: int) -> list[int]:
    """Returns the bytes of state that stays, of the parameters that come first: a device has each tensor for itself."""
    found: list[int] = []
    for storage in step.storages:
        if storage.device_type == "cuda" and _is_movable(storage, min_bytes) and storage.nbytes <= resident_bytes:
            found.append(storage.nbytes)
            resident_bytes -= storage.nbytes
    return found + [resident_bytes] * (resident_bytes > 0)


def as_stepped_at_once(step: Step, names: Sequence[str], sizes: Sequence[int]) -> Step:
    """Returns a step whose optimizer has stepped a few parameters at a time, as one that steps all of them at once.

    What a foreach step makes besides, it makes for all parameters. The last part's operations stand for its own.

    Args:
        names: of the trace.
        sizes: of all parameters that are stepped.
    """
    every = [n for n, op in enumerate(step.ops) if op.phase == "optimizer" and "_foreach_" in names[op.name]]
    kinds = [step.ops[number].name for number in every]
    per_part = next((size for size in range(1, len(kinds)) if kinds[size:] == kinds[:-size]), len(kinds))
    made_at: dict[int, list[Storage]] = {number: [] for number in every[len(every) - per_part :]}
    for storage in step.storages:
        if storage.category == "temporary" and storage.birth in made_at:
            made_at[storage.birth].append(storage)
    storages, ops = list(step.storages), list(step.ops)
    for number, like in made_at.items():
        missing = Counter(sizes) - Counter(storage.nbytes for storage in like)
        others = [msgspec.structs.replace(like[0], nbytes=nbytes) for nbytes in missing.elements()] if like else []
        indices = range(len(storages), len(storages) + len(others))
        ops[number] = msgspec.structs.replace(ops[number], outputs=(*ops[number].outputs, *indices))
        storages += others
    return msgspec.structs.replace(step, ops=tuple(ops), storages=tuple(storages))


def shrink_temporaries(storages: list[Storage], step: Step, share: float) -> None:
    """Leaves of a device's temporaries, which a foreach step makes for all parameters, those of a share of them."""
    made_at: dict[int, list[int]] = {}
    for op_number, op in enumerate(step.ops):
        for number in op.outputs if op.phase == "optimizer" else ():  # what passes through is no operation's
            storage = step.storages[number]
            is_temporary = storage.category == "temporary" and storage.device_type == "cuda"
            if is_temporary and storage.birth == op_number:
                made_at.setdefault(op_number, []).append(number)
    for numbers in made_at.values():
        left_bytes = share * sum(storages[number].nbytes for number in numbers)
        for position, number in enumerate(sorted(numbers, key=lambda number: -storages[number].nbytes)):
            if position and storages[number].nbytes > left_bytes:
                storages[number] = msgspec.structs.replace(storages[number], nbytes=0)
            else:
                left_bytes -= storages[number].nbytes


def before_optimizer(step: Step, min_bytes: int) -> Step:
    """Returns the step until its optimizer begins, its movable state on disk."""
    end = next((number for number, op in enumerate(step.ops) if op.phase == "optimizer"), len(step.ops))
    storages = tuple(
        msgspec.structs.replace(s, nbytes=0) if s.birth >= end or _is_movable(s, min_bytes) else s
        for s in step.storages
    )
    return msgspec.structs.replace(step, ops=step.ops[:end], storages=storages)


def _num_buckets(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Counts the buckets that whole parameters fill, one after the other."""
    count, filled_bytes = 0, bucket_bytes
    for size in sizes:
        filled_bytes += size
        if filled_bytes > bucket_bytes:
            count, filled_bytes = count + 1, size
    return count


def _is_movable(storage: Storage, min_bytes: int) -> bool:
    is_in_reach = storage.device_type in ("cpu", "cuda")
    return storage.category == "optimizer_state" and is_in_reach and storage.nbytes >= max(1, min_bytes)
