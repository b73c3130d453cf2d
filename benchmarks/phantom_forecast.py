"""Foresees a case of the zoo on a card, and names what a deviation from the count is made of. Simulated."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from gpu_truth_case import translated_run
from prediction_zoo import Precision

from memwall.machine.hardware import Hardware
from memwall.predict.cuda_allocator.allocator_events import ALLOC, FREE, EventTrace, events_of_steps
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Playback
from memwall.predict.cuda_allocator.memory_blocks import FreeSet, Segment
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.step_peaks import NUM_STEADY
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.phases import Phases
from memwall.trace.steps import steady_step

__all__ = ["PHASES", "cause", "foreseen", "peaks_of"]

PHASES = ("build", "first", "steady", "eval", "save", "resume")
"""Names the phases of a run in the order in which they are counted."""

_MIB = 1 << 20
Peaks = dict[str, int]


class _Allocator(CudaAllocator):
    """Counts segments for small blocks apart."""

    small_reserved_bytes = 0

    def reserve(self, address: int, nbytes: int, home: FreeSet, segment: Segment) -> None:
        super().reserve(address, nbytes, home, segment)
        self.small_reserved_bytes += nbytes * home.pool.is_small


def foreseen(family: str, precision: Precision, optimizer: str, hardware: Hardware) -> dict[str, Peaks]:
    """Returns the bytes at the peak of each phase of the run, by what torch's allocator calls them.

    They are those of `memwall estimate`, with the parts that `cause` tells apart.
    """
    run = translated_run(family, precision, optimizer, hardware)
    if run.evaluation is None:
        raise RuntimeError(f"no evaluation was recorded: {run.failure}")
    evaluated, after = (*run.evaluation.steps, None)[:2]
    phases = Phases((run.training.steps[0], steady_step(run.training)), evaluated, after_evaluation=after)
    *steps, saved = peaks_of(phases.run)
    first, *training = peaks_of(events_of_steps(run.training.steps, num_repeats=NUM_STEADY))
    # What the evaluation leaves cached, the steps after it find.
    evaluated, *later = steps[1 + NUM_STEADY :]
    evaluated["reserved_bytes"] = max(peak["reserved_bytes"] for peak in (evaluated, *later))
    return {
        "build": _most(peaks_of(phases.built)),
        "first": first,
        "steady": _most(training),
        "eval": evaluated,
        "save": saved,
        "resume": _most(peaks_of(phases.resuming)),
    }


def _most(peaks: Sequence[Peaks]) -> Peaks:
    return {name: max(peak[name] for peak in peaks) for name in peaks[0]}


def peaks_of(trace: EventTrace) -> list[Peaks]:
    """Returns the bytes at the peak of each step of a trace of events."""
    allocator = _Allocator(AllocatorSettings(), profile_for(str(torch.__version__))[0])
    playback, sizes, requested, found = Playback(allocator), {}, 0, []
    begins = [0, *trace.steps[1:], len(trace.events)]
    for begin, end in pairwise(begins):
        allocator.reserved_peak_bytes = allocator.reserved_bytes
        allocator.allocated_peak_bytes = allocator.allocated_bytes
        assert playback.run(trace.events[begin:end]), "a device without end is never full"
        requested_peak = requested
        for action, block, nbytes, _ in trace.events[begin:end]:
            if action == ALLOC:
                sizes[block] = nbytes
                requested += nbytes
                requested_peak = max(requested_peak, requested)
            elif action == FREE:
                requested -= sizes.pop(block)
        found.append(
            {
                "allocated_bytes": allocator.allocated_peak_bytes,
                "reserved_bytes": allocator.reserved_peak_bytes,
                "requested_bytes": requested_peak,
                "small_reserved_bytes": allocator.small_reserved_bytes,
            }
        )
    return found


def cause(ours: dict[str, Any], counted: dict[str, Any], quantity: str) -> str:
    """Returns what a deviation of a phase's allocated or reserved bytes is made of; "" for a row of an earlier form.

    Torch's allocator counts what was requested, blocks with what was too small to be split off them, and segments for
    small blocks and for large ones.
    """
    if "requested_bytes" not in ours:
        return ""
    more = {name: ours[name] - counted[name] for name in ours}
    tensors = more["requested_bytes"]
    if quantity == "allocated_bytes":
        parts = {"tensors": tensors, "remainders that are not split off blocks": more[quantity] - tensors}
    else:
        small = more["small_reserved_bytes"]
        parts = {"segments for small blocks": small, "segments for large blocks": more[quantity] - small}
        if abs(tensors) > counted["requested_bytes"] / 1000:
            parts["tensors"] = tensors
    largest = max(map(abs, parts.values()))
    return ", ".join(f"{size / _MIB:+.2f} MiB of {what}" for what, size in parts.items() if abs(size) > largest / 20)
