"""An optimizer's step on the CPU: what it moves from a device and back, and the pinned memory that passes through."""

from collections.abc import Sequence
from itertools import zip_longest

from memwall.trace.records import Step

STEPPED_DTYPES = ("float32", "bfloat16")
"""Names what parameters may be in: torch's fused kernel steps others as well, whose speed is not measured."""
NUM_STAGES = 2
"""One bucket is stepped while the next comes down; the one before goes up from where that comes down to."""


def gradient_bytes(step: Step) -> int:
    """Returns the bytes of a step's gradients, which are as large as the parameters they are for."""
    return sum(storage.nbytes for storage in step.storages if storage.category == "gradient")


def staging_bytes(step: Step, bucket_bytes: int) -> int:
    """Returns the bytes of a step's parameters and gradients that are in pinned memory at once."""
    return staged_bytes([s.nbytes for s in step.storages if s.category == "gradient"], bucket_bytes)


def pipelined_seconds(
    sizes: Sequence[int], bucket_bytes: int, *, down_seconds: float, up_seconds: float, cpu_seconds: float
) -> float:
    """Returns how long parameters of these sizes are stepped, in buckets, through a link that copies either down or up.

    While a bucket is stepped, the next one comes down, as soon as the one before the first has gone up from its place.

    Args:
        sizes: bytes of parameters, in the order in which they are stepped.
        bucket_bytes: parameters that are stepped at a time; a larger one is a bucket by itself.
        down_seconds, up_seconds, cpu_seconds: for a byte of parameters, its gradient and state included.
    """
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= bucket_bytes:
            buckets[-1] += size
        else:
            buckets.append(size)
    link_free = came = buckets[0] * down_seconds if buckets else 0.0
    cpu_free = 0.0
    for size, following in zip_longest(buckets, buckets[1:], fillvalue=0):
        cpu_free = max(cpu_free, came) + size * cpu_seconds
        came = link_free + following * down_seconds
        link_free = max(came, cpu_free) + size * up_seconds
    return link_free


def staged_bytes(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Returns the most that is in pinned memory at once of parameters of these sizes, and their gradients.

    A parameter larger than a bucket is one by itself.
    """
    return 2 * NUM_STAGES * max(min(bucket_bytes, sum(sizes)), max(sizes, default=0))
