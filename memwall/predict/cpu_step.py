"""What an optimizer's step on the CPU moves from a device and back, and the pinned memory that passes through."""

from collections.abc import Sequence

from memwall.trace.records import Step

__all__ = ["NUM_STAGES", "gradient_bytes", "staged_bytes", "staging_bytes"]

NUM_STAGES = 2
"""One bucket is stepped while the next comes down; the one before goes up from where that comes down to."""


def gradient_bytes(step: Step) -> int:
    """Gradients of a step, which are as large as the parameters they are for."""
    return sum(storage.nbytes for storage in step.storages if storage.category == "gradient")


def staging_bytes(step: Step, bucket_bytes: int) -> int:
    """Parameters and gradients of a step that are in pinned memory at once."""
    return staged_bytes([s.nbytes for s in step.storages if s.category == "gradient"], bucket_bytes)


def staged_bytes(sizes: Sequence[int], bucket_bytes: int) -> int:
    """What of parameters of these sizes, and their gradients, is in pinned memory at once; at most.

    A parameter larger than a bucket is one by itself.
    """
    return 2 * NUM_STAGES * max(min(bucket_bytes, sum(sizes)), max(sizes, default=0))
