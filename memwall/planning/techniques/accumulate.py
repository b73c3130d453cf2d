"""Accumulate: the batch of a step is split into micro-batches whose gradients add up; the global batch stays."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from memwall.planning.action import Action, Exactness
from memwall.planning.technique import DeepSpeedPart, Recording, Technique
from memwall.trace.records import Step, Storage, Trace


class Accumulate(Action, frozen=True, kw_only=True, tag="accumulate"):
    """Splits the batch of a step into micro-batches whose gradients add up; the global batch stays."""

    micro_batch: int
    num_micro_batches: int
    exactness: Exactness = "equivalent"


class _Accumulate(Technique[Accumulate]):
    record = Accumulate
    is_set_by_loop = True
    order = 32
    advice_rank = 2
    way_out_rank = 2
    step_rank = 4

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        if can_split or can_accumulate(trace, is_cooperative=True) is not None:
            return None
        return (
            f"halve the micro-batch and accumulate: batch size {trace.micro_batch} to {trace.micro_batch // 2}, "
            f"{2 * trace.num_micro_batches} accumulation steps (the same global batch)"
        )

    def way_out(self, found: Recording) -> tuple[str, Recording] | None:
        trace, settings = found
        if settings.allow_accumulation or can_accumulate(trace, is_cooperative=True) is not None:
            return None
        samples = trace.micro_batch * trace.num_micro_batches
        changed = msgspec.structs.replace(settings, allow_accumulation=True)
        return f"smaller micro-batches that accumulate: --global-batch {samples}", Recording(trace, changed)

    def parts(self, trace: Trace, step: Step, *, is_cooperative: bool) -> Iterator[tuple[Step, int, Accumulate]]:
        if can_accumulate(trace, is_cooperative=is_cooperative) is None:
            for micro_batch in candidate_micro_batches(trace)[1:]:
                num_parts = trace.micro_batch // micro_batch
                action = Accumulate(micro_batch=micro_batch, num_micro_batches=num_parts * trace.num_micro_batches)
                yield with_micro_batch(trace, step, micro_batch), num_parts, action

    def step(self, trace: Trace, step: Step, action: Accumulate) -> Step:
        return with_micro_batch(trace, step, action.micro_batch)

    def batch_parts(self, action: Accumulate) -> tuple[int, int]:
        return action.micro_batch, action.num_micro_batches

    def what(self, action: Accumulate) -> str:
        return f"split the batch: {action.num_micro_batches} x {action.micro_batch}"

    def where(self, actions: Sequence[Accumulate]) -> str:
        return "every step"

    def training_arguments(self, action: Accumulate) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": action.micro_batch,
            "gradient_accumulation_steps": action.num_micro_batches,
        }

    def accelerate_kwargs(self, action: Accumulate) -> dict[str, Any]:
        return {"gradient_accumulation_steps": action.num_micro_batches}

    def environment(self, action: Accumulate) -> dict[str, str]:
        return {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(action.num_micro_batches)}

    def environment_remark(self, action: Accumulate) -> str:
        return f"no variable sets the batch size: the script's data loader needs batch_size={action.micro_batch}"

    def deepspeed(self, action: Accumulate) -> DeepSpeedPart:
        return DeepSpeedPart()


TECHNIQUE = _Accumulate()


def can_accumulate(trace: Trace, *, is_cooperative: bool) -> str | None:
    """Returns None if the batch of a step can be split, else why not.

    Args:
        is_cooperative: whether the loop lets the micro-batch be changed.
    """
    if not is_cooperative:
        return "the training loop does not let the micro-batch be changed"
    if trace.micro_batch < 2:
        return "the batch has one sample"
    if any(module.has_batch_norm for module in trace.modules):
        return "a BatchNorm layer computes statistics over the batch, so splitting it changes the training"
    return None


def candidate_micro_batches(trace: Trace) -> tuple[int, ...]:
    """Returns divisors of the recorded micro-batch, largest first: each sample is used once, all parts are equal."""
    size = trace.micro_batch
    return tuple(m for m in range(size, 0, -1) if size % m == 0)


def with_micro_batch(trace: Trace, step: Step, micro_batch: int) -> Step:
    """Returns the part of a step that one micro-batch of a smaller size runs, the optimizer step included.

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
