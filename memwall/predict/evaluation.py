"""Foresees what an evaluation holds from a recorded training step: its forward, without what backward would need."""

import msgspec

from memwall.predict.curve import live_peak_bytes
from memwall.trace.records import Storage, Trace


def evaluation_bytes(trace: Trace, *, batch: int) -> int:
    """Returns the most that the process holds in an evaluation.

    A tensor lives until all but autograd let go of it, which the recording saw. What grows with the batch grows in
    proportion; all else stands as it does between training steps.

    Args:
        batch: samples that are evaluated at once.
    """
    step = trace.steps[0]
    end = next((operation for name, operation in step.marks if name == "backward"), len(step.ops))
    scale = max(1.0, batch / trace.micro_batch) if trace.micro_batch else 1.0
    storages = tuple(_evaluated(storage, scale, end, len(step.ops)) for storage in step.storages)
    forward = msgspec.structs.replace(step, ops=step.ops[:end], storages=storages)
    # What operators need for themselves grows with the batch as well, for all that is known.
    return trace.base_bytes + int(trace.workspace_bytes * scale) + live_peak_bytes(forward, trace.device)


def _evaluated(storage: Storage, scale: float, end: int, num_ops: int) -> Storage:
    is_standing = storage.category in ("optimizer_state", "gradient") and storage.death >= num_ops
    if is_standing or storage.birth < 0:
        birth, death = -1, num_ops
    else:
        birth, death = storage.birth, min(storage.dropped, storage.death)
    nbytes = int(storage.nbytes * scale) if storage.batched else storage.nbytes
    return msgspec.structs.replace(storage, birth=birth, death=min(death, end) if birth >= 0 else end, nbytes=nbytes)
