"""From a step on CPU tensors to the step a CUDA device would run: the translation, and what it leaves out.

What torch decides while a step runs is put right while it is recorded (`recording.py`). Here the records are changed,
which holds for traces recorded live on a CPU as well: where tensors are, and what cuBLAS holds. What could not be
established is in neither: `not_modelled` lists it for a trace at hand.
"""

from typing import Literal

import msgspec
import torch

from memwall.machine.hardware import Hardware
from memwall.machine.tiers import Machine, Tier
from memwall.predict.cuda.cuda_device import cuda_device_of
from memwall.predict.cuda.recording import CudaRecording
from memwall.predict.gradient_sums import with_sums_in_place
from memwall.predict.roofline import Roofline, with_least_seconds
from memwall.trace.records import Op, Step, Storage, Trace
from memwall.units import format_bytes

Autocast = Literal["none", "bfloat16", "float16"]

__all__ = ["not_modelled", "recording_for", "translated"]

# A workspace for each thread that multiplies, which cuBLASLt shares: aten/src/ATen/cuda/CublasHandlePool.cpp,
# parseChosenWorkspaceSize and setWorkspaceForHandle; torch/backends/cuda/__init__.py, TORCH_CUBLASLT_UNIFIED_WORKSPACE.
_CUBLAS_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_BYTES_NEW = 4096 * 8 * 1024
_ROCM_BYTES, _ROCM_BYTES_GFX94 = 32 << 20, 128 << 20
_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm")
)
# Which of them a CPU has an operator for, and which it takes to pieces, hangs on the layer, its dtype and the build.
_RECURRENT = frozenset(("RNN", "LSTM", "GRU", "LSTMCell", "GRUCell"))
_COUNTER_BYTES = 8


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
    return Machine(tiers=(host,))


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
    if any(module.class_name in _RECURRENT for module in trace.modules):
        found.append("cuDNN's recurrent layers, and fused recurrent cells")
    if trace.autocast != "none":
        found.append("rare operators that autocast treats differently on a CPU and on CUDA; gradient scaling")
    least, most = (format_bytes(size) for size in hardware.communicator_bytes)
    source = hardware.sources["communicator_bytes"]
    is_measured = source.startswith("measured")
    size = most if is_measured else f"{least} to {most}"
    found.append(
        "torch.compile; what libraries take outside torch's allocator: with several ranks each communicator holds "
        f"{size} more on each of them, {source if is_measured else 'as published'}"
    )
    return tuple(found)


# -- changes of the records --------------------------------------------------------------------------------------------


def _on_device(step: Step, number: int, names: tuple[str, ...], hardware: Hardware) -> Step:
    """Moves a step's tensors to the device, where cuBLAS has its workspaces.

    Step counters of optimizers that are neither fused nor capturable stay in host memory: torch/optim/adam.py and its
    kin, `_init_group`.
    """
    step = with_sums_in_place(step, names)
    has_host_counters = not any("_fused_" in names[op.name] for op in step.ops if op.phase == "optimizer")
    storages = []
    for storage in step.storages:
        is_counter = storage.category == "optimizer_state" and storage.nbytes <= _COUNTER_BYTES
        if storage.device == "cpu" and not (is_counter and has_host_counters):
            storage = msgspec.structs.replace(storage, device="cuda")
        storages.append(storage)
    return msgspec.structs.replace(step, storages=(*storages, *_cublas_workspaces(step, number, names, hardware)))


def _cublas_workspaces(step: Step, number: int, names: tuple[str, ...], hardware: Hardware) -> list[Storage]:
    """Returns one for each thread that multiplies; autograd runs backward of a CUDA graph in a thread of its own."""
    num_ops = len(step.ops)
    added = []
    for is_backward in (False, True):
        products = (
            at
            for at, op in enumerate(step.ops)
            if (op.phase == "backward") == is_backward and _takes_cublas(step, op, names[op.name])
        )
        first = next(products, None)
        if first is not None:
            added.append(
                Storage(
                    nbytes=_cublas_bytes(hardware),
                    device="cuda",
                    category="temporary",
                    birth=first if number == 0 else -1,
                    dropped=num_ops,
                    death=num_ops,
                    module=-1,
                    phase="other",
                    batched=False,
                )
            )
    return added


def _takes_cublas(step: Step, op: Op, name: str) -> bool:
    """Tells whether an operation multiplies with cuBLAS; a batch of columns times rows takes none, as a matrix does.

    Source: what torch 2.13 allocates, with tests/predict/test_translate.py's cases.
    """
    if name not in _PRODUCTS:
        return False
    if name != "aten.bmm.default" or not op.outputs:
        return True
    result = step.storages[op.outputs[0]]
    return op.flops * getattr(torch, result.dtype, torch.float32).itemsize != 2 * result.nbytes


def _cublas_bytes(hardware: Hardware) -> int:
    device = cuda_device_of(hardware)
    major, _ = device.capability
    if device.is_rocm:
        return _ROCM_BYTES_GFX94 if major == 9 else _ROCM_BYTES
    return _CUBLAS_BYTES_NEW if major in (9, 10, 12) else _CUBLAS_BYTES
