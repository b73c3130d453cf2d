"""Micro-batch times accumulation at a fixed global batch: which splits there are, and the step each one runs."""

import msgspec

from memwall.trace.records import Step, Storage, Trace

__all__ = ["candidate_micro_batches", "with_micro_batch"]


def candidate_micro_batches(trace: Trace) -> tuple[int, ...]:
    """Divisors of the recorded micro-batch, largest first: every sample is used once, all micro-batches are equal."""
    size = trace.micro_batch
    return tuple(m for m in range(size, 0, -1) if size % m == 0)


def with_micro_batch(trace: Trace, step: Step, micro_batch: int) -> Step:
    """The part of a step that one micro-batch of a smaller size runs, the optimizer step included.

    Storages that grow with the batch shrink in proportion. Gradients stand through forward and backward, since they
    add up; each parameter's new gradient lives beside the old sum while it is added. Seconds are those of all
    micro-batches together: the same arithmetic in smaller pieces.
    """
    whole = trace.micro_batch
    if micro_batch == whole:
        return step
    storages: list[Storage] = []
    added: list[Storage] = []  # at the end, so that the numbers operations refer to stay
    for storage in step.storages:
        if storage.batched:
            storages.append(msgspec.structs.replace(storage, nbytes=-(-storage.nbytes * micro_batch // whole)))
        elif storage.category == "gradient":
            storages.append(msgspec.structs.replace(storage, birth=-1))
            if storage.birth >= 0:
                end = storage.birth + 2
                added.append(msgspec.structs.replace(storage, category="temporary", dropped=end, death=end))
        else:
            storages.append(storage)
    saved = tuple(
        msgspec.structs.replace(save, nbytes=-(-save.nbytes * micro_batch // whole))
        if step.storages[save.storage].batched
        else save
        for save in step.saved
    )
    return msgspec.structs.replace(step, storages=tuple(storages + added), saved=saved)
