"""Steps that were recorded on a CUDA device which is here: what recording changed, and what no recorder sees.

While operations are watched autograd sums gradients into tensors of their own, and the workspaces of cuBLAS belong to
no operator that returns them. Which blocks an operator has for itself follows from its arguments, as for a device that
is not here.
"""

import msgspec
import torch

from memwall.predict.cuda.cublas import with_cublas_workspaces
from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.predict.cuda.reductions import Multiprocessors
from memwall.predict.cuda.workspaces import CudaWorkspaces
from memwall.predict.cuda_allocator.held_blocks import Held, Range, UsedBlock
from memwall.predict.in_place import with_biases_in_place, with_sums_in_place
from memwall.trace.records import Trace


def cuda_device_here(device: torch.device) -> CudaDevice:
    """Returns what torch's kernels ask of a device of this machine."""
    found = torch.cuda.get_device_properties(device)
    capability = (int(found.major), int(found.minor))
    if torch.version.hip is not None:
        return CudaDevice(capability, None)
    number, threads = int(found.multi_processor_count), int(found.max_threads_per_multi_processor)
    return CudaDevice(capability, Multiprocessors(number, threads))


def workspaces_here(device: torch.device) -> CudaWorkspaces | None:
    """Returns what operators allocate for themselves on a device of this machine; None for one that is not CUDA's."""
    return CudaWorkspaces(cuda_device_here(device)) if device.type == "cuda" else None


def with_library_workspaces(trace: Trace, device: torch.device) -> Trace:
    """Returns a trace recorded on this device with what cuBLAS holds, from the first step's first product on."""
    here = cuda_device_here(device)
    steps = (with_cublas_workspaces(step, step.kind == "first", trace.names, here) for step in trace.steps)
    return msgspec.structs.replace(trace, steps=tuple(steps))


def as_plain(trace: Trace) -> Trace:
    """Returns a trace recorded on CUDA with gradients summed and biases added as they are while nobody watches."""
    biased = (with_biases_in_place(step, trace.names, trace.modules) for step in trace.steps)
    return msgspec.structs.replace(trace, steps=tuple(with_sums_in_place(step, trace.names) for step in biased))


def held_here(device: torch.device) -> Held | None:
    """Returns the segments of a device of this machine that have a block in use, and these blocks.

    Returns:
        None of a device that is not CUDA's, and where segments expand: those are not simulated for a run.
    """
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    ranges, blocks = [], []
    for segment in torch.cuda.memory_snapshot():
        used = [block for block in segment["blocks"] if block["state"] != "inactive"]
        if segment["device"] != number or not used or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        if segment["is_expandable"]:
            return None
        ranges.append(
            Range(
                address=segment["address"],
                num_bytes=segment["total_size"],
                stream=segment["stream"],
                is_small=segment["segment_type"] == "small",
                is_expandable=False,
            )
        )
        blocks += [
            UsedBlock(
                address=block["address"],
                num_bytes=block["size"],
                requested_bytes=block["requested_size"],
                stack=-1,
                category="",
                is_pending=False,  # whatever waits for another stream is done with when a plan is applied
                is_exact=True,
            )
            for block in used
        ]
    ranges.sort(key=lambda one: one.address)
    blocks.sort(key=lambda one: one.address)
    return Held(ranges=tuple(ranges), blocks=tuple(blocks))
