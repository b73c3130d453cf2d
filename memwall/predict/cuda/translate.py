"""From a step on CPU tensors to the step a CUDA device would run: the translation, and what it leaves out.

What torch decides while a step runs is put right while it is recorded (`recording.py`). Here the records are changed,
which holds for traces recorded live on a CPU as well: where tensors are, and what cuBLAS holds. What could not be
established is in neither: `not_modelled` lists it for a trace at hand.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from memwall.machine.hardware import Hardware
from memwall.machine.tiers import Machine, Tier
from memwall.predict.cuda.cublas import with_cublas_workspaces
from memwall.predict.cuda.cuda_device import cuda_device_of
from memwall.predict.cuda.recording import CudaRecording
from memwall.predict.in_place import with_biases_in_place, with_sums_in_place
from memwall.predict.packed_bytes import device_pack_seconds
from memwall.predict.roofline import Roofline, with_least_seconds
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

Autocast = Literal["none", "bfloat16", "float16"]

# Which of them a CPU has an operator for, and which it takes to pieces, hangs on the layer, its dtype and the build.
_RECURRENT = frozenset(("RNN", "LSTM", "GRU", "LSTMCell", "GRUCell"))
_COUNTER_BYTES = 8
_LIFT = "aten.lift_fresh.default"


def recording_for(hardware: Hardware) -> CudaRecording:
    """Returns what to record a step with so that it is the device's."""
    return CudaRecording(cuda_device_of(hardware))


def translated(trace: Trace, hardware: Hardware, *, autocast: Autocast = "none", host_bytes: int = 0) -> Trace:
    """Returns the trace as recorded on the device; of one that was recorded on CUDA the steps stay.

    Args:
        autocast: the precision that forward ran in, if it was seen while recording.
        host_bytes: host memory that saved tensors may move to; 0 for none.
    """
    steps = trace.steps
    if trace.device == "cpu" and trace.source == "recorded":  # measured on another machine
        steps = tuple(with_least_seconds(step, trace, Roofline(hardware)) for step in steps)
    if trace.device == "cpu":
        steps = tuple(with_biases_in_place(step, trace.names, trace.modules) for step in steps)
        steps = tuple(_on_device(step, number, trace.names, hardware) for number, step in enumerate(steps))
    return msgspec.structs.replace(
        trace,
        steps=steps,
        device="cuda",
        autocast=trace.autocast if autocast == "none" else autocast,
        base_bytes=hardware.context_bytes[0],
        workspace_bytes=0,
        machine=_machine(hardware, host_bytes),
    )


def _machine(hardware: Hardware, host_bytes: int) -> Machine:
    """Describes the link to the next tier, which on a device is host memory, at its peak."""
    if not host_bytes:
        return Machine()
    host = Tier(
        name="host",
        write_bytes_per_second=hardware.host_link_bytes_per_second,
        read_bytes_per_second=hardware.host_link_bytes_per_second,
        free_bytes=host_bytes,
    )
    return Machine(tiers=(host,), pack_seconds_per_element=device_pack_seconds(hardware.memory_bytes_per_second))


def not_modelled(trace: Trace, hardware: Hardware) -> tuple[str, ...]:
    """Names what the forecast of a translated step leaves out, for a person: only what this trace calls for."""
    found = ["nothing was measured on this device: the figures are predicted, and so is their margin"]
    names = frozenset(trace.names)

    def has(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    if trace.source == "recorded":
        found.append("kernels, masks, workspaces and temporaries are those of the machine that recorded the trace")
    is_rocm = cuda_device_of(hardware).is_rocm
    if is_rocm:
        found.append(
            "attention kernels and their workspaces, and scratch of reductions, under ROCm; hipBLASLt's workspace"
        )
    elif trace.is_phantom:
        return (*found, *_not_on_phantom(trace, has), _around(hardware))
    elif has("flash_attention_for_cpu"):
        found.append("the device's attention kernel, where attention was not called as F.scaled_dot_product_attention")
    if has("cudnn_attention"):
        found.append("the workspace of cuDNN's attention beyond its front end's buffers")
    if has("convolution"):
        found.append("workspaces of cuDNN's convolutions, for which the margin has room (docs/not_modelled.md)")
    if has("batch_norm"):
        found.append("reserve space of cuDNN's batch normalisation")
    if has("sort", "topk", "cumsum", "unique", "nonzero", "index_put"):
        found.append("temporaries of CUB inside sorting, scanning and selecting")
    if has("cudnn_rnn"):
        found.append("what cuDNN's recurrent layers keep for backward and work in, for which a size is assumed")
    elif (is_rocm or trace.source == "recorded") and any(each.class_name in _RECURRENT for each in trace.modules):
        found.append("cuDNN's recurrent layers, and fused recurrent cells")
    if trace.autocast != "none":
        found.append("rare operators that autocast treats differently on a CPU and on CUDA; gradient scaling")
    return (*found, _around(hardware))


def _not_on_phantom(trace: Trace, has: Callable[..., bool]) -> Iterator[str]:
    """Yields what a step on the phantom device leaves out; its allocator and its libraries' choices are real."""
    if has("convolution"):
        yield "torch.backends.cudnn.benchmark, which takes what is fastest, with any workspace"
    if has("batch_norm"):
        yield "reserve space of cuDNN's batch normalisation"
    if has("cudnn_rnn"):
        yield "what cuDNN's recurrent layers keep for backward and work in, for which a size is assumed"


def _around(hardware: Hardware) -> str:
    least, most = (format_bytes(size) for size in hardware.communicator_bytes)
    return (
        "torch.compile; what libraries take outside torch's allocator: with several ranks each communicator holds "
        f"{least} to {most} more on each of them, as published"
    )


# -- changes of the records --------------------------------------------------------------------------------------------


def _on_device(step: Step, number: int, names: tuple[str, ...], hardware: Hardware) -> Step:
    """Moves a step's tensors to the device, where cuBLAS has its workspaces.

    Step counters of optimizers that are neither fused nor capturable stay in host memory: torch/optim/adam.py and its
    kin, `_init_group`; and what is added to them. So does what `torch.tensor(value)` copies its value from, which is
    there for that call alone.
    """
    step = with_sums_in_place(step, names)
    lifts = [op for op in step.ops if names[op.name] == _LIFT]
    constants = {number for op in lifts for number in op.inputs}
    added = {number for op in lifts if op.phase == "optimizer" for number in op.outputs}
    has_host_counters = not any("_fused_" in names[op.name] for op in step.ops if op.phase == "optimizer")
    storages = []
    for index, storage in enumerate(step.storages):
        is_constant = index in constants and storage.category == "input" and storage.birth < 0
        is_counter = storage.category == "optimizer_state" or index in added
        is_counter = is_counter and storage.nbytes <= _COUNTER_BYTES
        if storage.device == "cpu" and not is_constant and not (is_counter and has_host_counters):
            storage = msgspec.structs.replace(storage, device="cuda")
        storages.append(storage)
    step = msgspec.structs.replace(step, storages=tuple(storages))
    return with_cublas_workspaces(step, number == 0, names, cuda_device_of(hardware))
