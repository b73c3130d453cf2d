"""Measures how fast bytes go from a CUDA device to pinned host memory and back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memwall.machine.tiers import Tier
from memwall.store.pinned_arena import PinnedArena
from memwall.store.room import cuda_segment_room_bytes

# On the device and on the host there is one of these in each direction: together what a window of saved tensors takes.
_PROBE_BYTES = 16 << 20
# Of a device that has no room for that within what torch may take. Two of these share a segment of small blocks.
_SMALL_PROBE_BYTES = 1 << 20
# The first copies wake the link up; the fastest one counts.
_NUM_COPIES = 5


def probe_link(device: torch.device, *, limit_bytes: int) -> Tier:
    """Measures host memory as the tier below a device, by a few copies on streams of their own.

    32 MiB of the device's memory are taken for them and given back to the driver, so that no peak shows them; where it
    has less left, 2 MiB.

    Args:
        limit_bytes: the most host memory to pin; 32 MiB are needed.

    Raises:
        StoreError: the limit, or the driver, does not allow that.
    """
    arena = PinnedArena(limit_bytes, chunk_bytes=0, device=device)
    try:
        written, read = _measured(device, arena)
    finally:
        arena.close()
        torch.cuda.empty_cache()
    return Tier(name="host", write_bytes_per_second=written, read_bytes_per_second=read, free_bytes=limit_bytes)


def rates(
    out_seconds: float, back_seconds: float, both_seconds: float, *, num_bytes: int = _PROBE_BYTES
) -> tuple[float, float]:
    """Returns the bytes per second out and back that copies of so many bytes show, which took so long.

    A plan counts on one direction at a time, so that both at once may take as long as one after the other. Where they
    take longer, each counts as so much slower. To two digits: no more of them repeat, and a plan depends on all there
    are.
    """
    slower = max(1.0, both_seconds / (out_seconds + back_seconds))
    written, read = (float(f"{num_bytes / (s * slower):.1e}") for s in (out_seconds, back_seconds))
    return written, read


class _Copy(NamedTuple):
    stream: torch.cuda.Stream
    target: Tensor
    source: Tensor


def _measured(device: torch.device, arena: PinnedArena) -> tuple[float, float]:
    has_room = cuda_segment_room_bytes(device) >= 2 * _PROBE_BYTES
    num_bytes = _PROBE_BYTES if has_room else _SMALL_PROBE_BYTES
    ours, other = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    out = _Copy(torch.cuda.Stream(device), target=arena.allocate(num_bytes).memory, source=ours)
    back = _Copy(torch.cuda.Stream(device), target=other, source=arena.allocate(num_bytes).memory)
    return rates(
        *(min(_seconds(device, copies) for _ in range(_NUM_COPIES)) for copies in ((out,), (back,), (out, back))),
        num_bytes=num_bytes,
    )


def _seconds(device: torch.device, copies: Sequence[_Copy]) -> float:
    """Returns the seconds of copies that begin together, each on its stream, until the last one has ended."""
    begin = torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))
    ends = []
    for copy in copies:
        copy.stream.wait_event(begin)
        with torch.cuda.stream(copy.stream):
            copy.target.copy_(copy.source, non_blocking=True)
        ends.append(copy.stream.record_event(torch.cuda.Event(enable_timing=True)))
    torch.cuda.synchronize(device)
    return max(float(begin.elapsed_time(end)) for end in ends) / 1e3
