"""From a step on CPU tensors to the step a CUDA device would run: the table of what differs, and the translation.

Each rule is one entry with its source, and can be switched off by its name. Rules of the stage "recording" take part
while the step is recorded on fake tensors; those of the stage "trace" change the records, and hold for traces recorded
live on a CPU as well. What could not be established is in no rule: `not_modelled` lists it for a trace at hand.
"""

from collections.abc import Callable, Collection
from typing import Literal

import msgspec
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware
from memwall.machine.tiers import Machine, Tier
from memwall.predict.cuda.recording import CudaRecording
from memwall.predict.roofline import Roofline, with_least_seconds
from memwall.trace.records import Step, Storage, Trace
from memwall.units import format_bytes

Autocast = Literal["none", "bfloat16", "float16"]

__all__ = ["RULES", "Rule", "not_modelled", "recording_for", "translated"]


class Rule(Struct, frozen=True, kw_only=True):
    """One difference between a step on a CPU and on CUDA."""

    name: str
    """What switches it off."""
    stage: Literal["recording", "trace"]
    changes: str
    source: str
    """File and function of pytorch, read at releases up to 2.13 or on main, or its documentation."""


RULES = (
    Rule(
        name="attention-kernel",
        stage="recording",
        changes="scaled_dot_product_attention runs the kernel of the device, and saves what that one saves",
        source="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: select_sdp_backend; attention.cpp",
    ),
    Rule(
        name="dropout-mask",
        stage="recording",
        changes="dropout keeps a mask of bools in place of one in the input's dtype; fused attention keeps a seed",
        source="aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable, native_dropout",
    ),
    Rule(
        name="autocast-lists",
        stage="recording",
        changes="under autocast powers, norms, softmax and sums run in float32",
        source="aten/src/ATen/autocast_mode.h: AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE",
    ),
    Rule(
        name="rms-norm",
        stage="recording",
        changes="torch's RMS norm is one operator, and saves its input and a number per row, not the parts of its sum",
        source="aten/src/ATen/native/layer_norm.cpp: rms_norm_symint; cuda/layer_norm_kernel.cu: _fused_rms_norm_cuda",
    ),
    Rule(
        name="foreach-optimizer",
        stage="recording",
        changes="optimizers left to torch run their foreach implementation, with its temporaries",
        source="torch/optim/optimizer.py: _default_to_fused_or_foreach; memwall/trace/fake.py applies it",
    ),
    Rule(
        name="flash-backward",
        stage="recording",
        changes="flash attention's backward sums the query's gradient in float32",
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd",
    ),
    Rule(
        name="efficient-backward",
        stage="recording",
        changes="efficient attention's backward sums the query's gradient in float32 tiles",
        source="aten/src/ATen/native/transformers/cuda/attention_backward.cu: _efficient_attention_backward; "
        "mem_eff_attention/kernel_backward.h: workspace_size",
    ),
    Rule(
        name="cudnn-backward",
        stage="recording",
        changes="cuDNN attention's backward sums the query's gradient in float32",
        source="NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h: SDPABackwardNode, dQ_accum, softmax_sum",
    ),
    Rule(
        name="embedding-backward",
        stage="recording",
        changes="an embedding's backward sorts indices and sums partial segments in float32, beyond 3,072 indices",
        source="aten/src/ATen/native/cuda/Embedding.cu: embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu",
    ),
    Rule(
        name="index-backward",
        stage="recording",
        changes="accumulating index_put, the backward of indexing, sorts positions",
        source="aten/src/ATen/native/cuda/Indexing.cu: index_put_with_sort_kernel",
    ),
    Rule(
        name="cublas-workspace",
        stage="trace",
        changes="cuBLAS holds a workspace for each thread that multiplies, forward's and backward's",
        source="aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize, setWorkspaceForHandle; cuBLASLt "
        "shares it (torch/backends/cuda/__init__.py, TORCH_CUBLASLT_UNIFIED_WORKSPACE)",
    ),
    Rule(
        name="device-names",
        stage="trace",
        changes="tensors are on the device",
        source="the model and its batch are moved there before the step",
    ),
    Rule(
        name="host-counters",
        stage="trace",
        changes="step counters of optimizers that are neither fused nor capturable stay in host memory",
        source="torch/optim/adam.py and its kin: _init_group, `state['step']`",
    ),
)

_CUBLAS_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_BYTES_NEW = 4096 * 8 * 1024
_ROCM_BYTES, _ROCM_BYTES_GFX94 = 32 << 20, 128 << 20
_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm")
)
# Which of them a CPU has an operator for, and which it takes to pieces, hangs on the layer, its dtype and the build.
_RECURRENT = frozenset(("RNN", "LSTM", "GRU", "LSTMCell", "GRUCell"))
_COUNTER_BYTES = 8
# Read in code that is compiled for CUDA alone: on ROCm AOTriton stands in its place.
_CUDA_ONLY = frozenset(("attention-kernel", "flash-backward", "efficient-backward", "cudnn-backward"))


def _capability_of(hardware: Hardware) -> tuple[int, int]:
    """Compute capability as numbers."""
    major, _, minor = hardware.compute_capability.partition(".")
    return int(major), int(minor)


def _is_rocm(hardware: Hardware) -> bool:
    """Whether torch runs its ROCm kernels on the device: other attention kernels, other libraries."""
    return hardware.product.startswith("AMD")


def recording_for(hardware: Hardware, *, without: Collection[str] = ()) -> CudaRecording:
    """What to record a step with so that it is the device's.

    Args:
        without: names of rules to leave out.

    Raises:
        UsageError: a rule of that name does not exist.
    """
    rules = _rules("recording", without)
    if _is_rocm(hardware):
        rules = [name for name in rules if name not in _CUDA_ONLY]
    return CudaRecording(_capability_of(hardware), rules)


def translated(
    trace: Trace,
    hardware: Hardware,
    *,
    autocast: Autocast = "none",
    host_bytes: int = 0,
    without: Collection[str] = (),
) -> Trace:
    """The trace as it would have been recorded on the device; of one that was recorded on CUDA the steps stay.

    Args:
        autocast: the precision that forward ran in, if it was seen while recording.
        host_bytes: host memory that saved tensors may move to; 0 for none.
        without: names of rules to leave out.

    Raises:
        UsageError: a rule of that name does not exist.
    """
    rules = _rules("trace", without)
    steps = trace.steps
    if trace.device == "cpu" and trace.source == "recorded":  # measured on another machine
        steps = tuple(with_least_seconds(step, trace, Roofline(hardware)) for step in steps)
    for name in rules if trace.device == "cpu" else ():
        steps = tuple(_CHANGES[name](step, number, trace.names, hardware) for number, step in enumerate(steps))
    return msgspec.structs.replace(
        trace,
        steps=steps,
        device="cuda" if "device-names" in rules else trace.device,
        autocast=trace.autocast if autocast == "none" else autocast,
        base_bytes=hardware.context_bytes[0],
        workspace_bytes=0,
        machine=_machine(hardware, host_bytes),
    )


def _machine(hardware: Hardware, host_bytes: int) -> Machine:
    """The link to the next tier, which on a device is host memory, at its peak."""
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
    """What the forecast of a translated step leaves out, for a person: only what this trace calls for."""
    found = ["nothing was measured on this device: the figures are predicted, and so is their margin"]
    names = frozenset(trace.names)

    def has(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    if trace.source == "recorded":
        found.append("kernels, masks, workspaces and temporaries are those of the machine that recorded the trace")
    if _is_rocm(hardware):
        found.append("attention kernels and their workspaces under ROCm; hipBLASLt's workspace")
    elif has("flash_attention_for_cpu"):
        found.append("the device's attention kernel, where attention was not called as F.scaled_dot_product_attention")
    if has("cudnn_attention"):
        found.append("the workspace of cuDNN's attention beyond its front end's buffers")
    if has("convolution"):
        found.append("workspaces of cuDNN's convolutions, for which the margin has room (docs/not_modelled.md)")
    if has("batch_norm"):
        found.append("reserve space of cuDNN's batch normalisation")
    if has("sort", "topk", "cumsum", "unique", "nonzero", "embedding_dense_backward", "index_put"):
        found.append("temporaries of CUB inside sorting, scanning and selecting")
    if any(module.class_name in _RECURRENT for module in trace.modules):
        found.append("cuDNN's recurrent layers, and fused recurrent cells")
    if has("layer_norm", "group_norm", "rms_norm"):
        found.append("partial sums of normalisation layers' backward, where there are many more rows than columns")
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


def _rules(stage: str, without: Collection[str]) -> list[str]:
    known = [rule.name for rule in RULES]
    unknown = sorted(set(without) - set(known))
    if unknown:
        raise UsageError(f"there is no translation rule '{unknown[0]}'; there are {', '.join(known)}")
    return [rule.name for rule in RULES if rule.stage == stage and rule.name not in without]


# -- changes of the records --------------------------------------------------------------------------------------------


def _with_cublas(step: Step, number: int, names: tuple[str, ...], hardware: Hardware) -> Step:
    """A storage for each thread that multiplies; autograd runs backward of a CUDA graph in a thread of its own."""
    nbytes = _cublas_bytes(hardware)
    num_ops = len(step.ops)
    added = []
    for is_backward in (False, True):
        first = next(
            (
                at
                for at, op in enumerate(step.ops)
                if names[op.name] in _PRODUCTS and (op.phase == "backward") == is_backward
            ),
            None,
        )
        if first is not None:
            added.append(
                Storage(
                    nbytes=nbytes,
                    device="cpu",
                    category="temporary",
                    birth=first if number == 0 else -1,
                    dropped=num_ops,
                    death=num_ops,
                    module=-1,
                    phase="other",
                    batched=False,
                )
            )
    return msgspec.structs.replace(step, storages=(*step.storages, *added))


def _cublas_bytes(hardware: Hardware) -> int:
    major, _ = _capability_of(hardware)
    if _is_rocm(hardware):
        return _ROCM_BYTES_GFX94 if major == 9 else _ROCM_BYTES
    return _CUBLAS_BYTES_NEW if major in (9, 10, 12) else _CUBLAS_BYTES


def _on_device(step: Step, number: int, names: tuple[str, ...], hardware: Hardware) -> Step:
    storages = tuple(
        msgspec.structs.replace(storage, device="cuda") if storage.device == "cpu" else storage
        for storage in step.storages
    )
    return msgspec.structs.replace(step, storages=storages)


def _with_host_counters(step: Step, number: int, names: tuple[str, ...], hardware: Hardware) -> Step:
    if any("_fused_" in names[op.name] for op in step.ops if op.phase == "optimizer"):
        return step
    storages = tuple(
        msgspec.structs.replace(storage, device="cpu")
        if storage.category == "optimizer_state" and storage.nbytes <= _COUNTER_BYTES
        else storage
        for storage in step.storages
    )
    return msgspec.structs.replace(step, storages=storages)


_CHANGES: dict[str, Callable[[Step, int, tuple[str, ...], Hardware], Step]] = {
    "cublas-workspace": _with_cublas,
    "device-names": _on_device,
    "host-counters": _with_host_counters,
}
