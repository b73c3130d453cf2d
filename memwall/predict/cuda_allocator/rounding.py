"""Sizes in PyTorch's CUDA caching allocator: what a request becomes, and what segment it would cause.

`c10/cuda/CUDACachingAllocator.cpp`, round_size and get_allocation_size; the constants are those of 2.4 to 2.13.
"""

from memwall.predict.cuda_allocator.allocator_settings import NUM_DIVISIONS, AllocatorSettings

MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = 1 << 20
"""Blocks up to this size live in the small pool."""
SMALL_BUFFER_BYTES = 2 << 20
"""Segment, and granule of expandable segments, of the small pool."""
MIN_LARGE_ALLOC_BYTES = 10 << 20
"""From here on a segment is the request rounded up."""
ROUND_LARGE_BYTES = 2 << 20
MAX_REQUEST_BYTES = 1 << 60
"""From here on a request is refused at once."""


def round_up(nbytes: int, step_bytes: int) -> int:
    """Returns the next multiple of `step_bytes`."""
    return -(-nbytes // step_bytes) * step_bytes


def division_index(request_bytes: int) -> int:
    """Returns which interval of `roundup_power2_divisions` a request falls into: 0 below 2 MiB, 15 from 32 GiB."""
    return min(max(request_bytes.bit_length() - 1 - 20, 0), NUM_DIVISIONS - 1)


def rounded_bytes(request_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the bytes of the block that a request asks for.

    >>> rounded_bytes(513, AllocatorSettings())
    1024
    """
    if request_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = settings.roundup_power2_divisions[division_index(request_bytes)]
    if divisions > 1 and request_bytes > MIN_BLOCK_BYTES * divisions:
        power = 1 << (request_bytes.bit_length() - 1)
        return round_up(request_bytes, power // divisions)
    return round_up(request_bytes, MIN_BLOCK_BYTES)


def allocation_bytes(block_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the bytes of the segment that a rounded request causes if no cached block serves it."""
    if block_bytes <= SMALL_LIMIT_BYTES:
        return SMALL_BUFFER_BYTES
    if block_bytes < MIN_LARGE_ALLOC_BYTES:
        return settings.large_segment_bytes
    return round_up(block_bytes, ROUND_LARGE_BYTES)
