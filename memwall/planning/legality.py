"""Which actions are legal for a trace, each with the reason when it is not."""

from collections.abc import Sequence
from importlib.util import find_spec

from memwall.errors import UsageError
from memwall.predict.call_rules import BlockCalls
from memwall.predict.half_precision import computes_in_half
from memwall.predict.treatment import StepModel
from memwall.trace.build import steady_step
from memwall.trace.optimizers import JOINT
from memwall.trace.records import Trace
from memwall.units import format_bytes

__all__ = [
    "STEPPED_ALONE",
    "can_accumulate",
    "can_autocast",
    "can_keep_low_bits",
    "can_move_optimizer_state",
    "can_move_parameters",
    "can_offload",
    "can_pack",
    "can_rebuild",
    "can_recompute",
    "can_reuse_allocator",
    "can_use_kernels",
    "require_step_beside_device",
]

STEPPED_ALONE = frozenset(
    (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("Lion", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Optimizers that update each parameter from its own gradient, state and group alone: torch.optim's, and Lion, which
torch has not, of lion-pytorch; `memwall.apply.optimizer_state.partial_step` looks at which class of that name it is.

LBFGS mixes all of them. Others mix some, as by a norm over all gradients, or count their steps in a group; whoever adds
a class here has read its step.
"""

_WITH_MOMENTS = ("Adam", "AdamW")
STEPPED_ON_CPU = _WITH_MOMENTS
"""Optimizers whose fused step on a CPU may take the place of the device's."""

_HOW_TO_STEP_ON_CPU = "make the plan with `memwall plan SPEC --device NAME --host SIZE --allow cpu-optimizer-step`"


def require_step_beside_device(allow: Sequence[str], device: str) -> None:
    """To be called for a run that makes its plan by itself, once it is known where its model is.

    Raises:
        UsageError: it may leave its optimizer's step to the CPU, where it is already.
    """
    if "cpu-optimizer-step" in allow and device != "cuda":
        raise UsageError(
            f"cpu-optimizer-step is allowed to a run whose model is on '{device}', and a step is taken to the CPU from "
            "CUDA only: leave it out of what is allowed, or move the model to CUDA first; for a device that is not "
            f"here {_HOW_TO_STEP_ON_CPU}"
        )


def can_recompute(trace: Trace, model: StepModel, block: BlockCalls) -> str | None:
    """None if recomputing the block is legal and frees something, else why not.

    A forward that writes to a buffer would write twice, and read what it wrote. The executor spares the running
    statistics of BatchNorm layers, of which a trace shows the counter; it knows no other. And what the block was called
    with must still be the same when backward calls it again.
    """
    if model.is_leaf_like(block):
        return f"'{block.path}' saves nothing but what it was called with"
    for call in block.calls:
        if any(model.is_written(i, call.start, call.backward_start) for i in call.inputs):
            return f"what '{block.path}' is called with is modified in place before its backward"
        for op in model.step.ops[call.start : call.end]:
            if any(model.step.storages[i].category in ("buffer", "parameter") for i in op.writes):
                writer = trace.modules[op.module]
                if not (writer.is_leaf and writer.has_batch_norm):
                    return f"'{writer.path or writer.class_name}' writes to a buffer of its own in forward"
    return None


def can_rebuild(model: StepModel, block: BlockCalls) -> str | None:
    """None if the block keeps results of fused kernels for backward that can be rebuilt instead, else why not."""
    if not any(model.rebuilt_results(call, saved) for call, saved in zip(block.calls, block.saved, strict=True)):
        return f"'{block.path}' keeps no result of a fused kernel that can be rebuilt"
    return None


def can_offload(trace: Trace) -> str | None:
    """None if saved tensors can leave the device, else why not."""
    if trace.device == "cpu" and not trace.machine.disk:
        return "there is no disk to move saved tensors to; pass --disk DIR"
    if trace.device != "cpu" and not trace.machine.disk_write_bytes_per_second:
        return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"
    return None


def can_pack(trace: Trace, allow: tuple[str, ...]) -> str | None:
    """None if what leaves the device may do so in fewer digits, else why not."""
    if "low-bit-offload" not in allow:
        return "saved tensors that leave in int8 change numerics; allow it with --allow low-bit-offload"
    if trace.device != "cpu":
        return f"saved tensors are packed on a CPU only, on their way to disk; the step is for '{trace.device}'"
    reason = can_offload(trace)
    if reason is None and not trace.machine.pack_seconds_per_element:
        return "what packing costs on its machine is not in the trace; record it again, or give another --disk DIR"
    return reason


def can_accumulate(trace: Trace, *, is_cooperative: bool) -> str | None:
    """None if the batch of a step can be split, else why not."""
    if not is_cooperative:
        return "the training loop does not let the micro-batch be changed"
    if trace.micro_batch < 2:
        return "the batch has one sample"
    if any(module.has_batch_norm for module in trace.modules):
        return "a BatchNorm layer computes statistics over the batch, so splitting it changes the training"
    return None


def can_autocast(trace: Trace, allow: tuple[str, ...]) -> str | None:
    """None if forward may run in lower precision, else why not."""
    if "precision" not in allow:
        return "lower precision changes numerics; allow it with --allow precision"
    if trace.autocast != "none":
        return f"the run already uses autocast to {trace.autocast}"
    if computes_in_half(trace):
        return "the weights are in half precision already"
    return None


def can_use_kernels(device: str, allow: tuple[str, ...], *, is_here: bool) -> str | None:
    """None if modules may run fused kernels, else why not.

    Args:
        is_here: whether the step will run in this installation, and not on a device that is planned for from afar.
    """
    if "kernels" not in allow:
        return "fused kernels round at other points; allow it with --allow kernels"
    if is_here and device != "cpu" and find_spec("triton") is None:
        return f"fused kernels on device '{device}' need triton, which is not installed"
    return None


def can_reuse_allocator(trace: Trace) -> str | None:
    """None if memwall may set how this process's allocator reuses memory, else why not."""
    if trace.device not in ("cpu", "cuda"):
        return f"nothing is known about the allocator of device '{trace.device}'"
    return None


def can_move_optimizer_state(trace: Trace, state_bytes: int, capacity_bytes: int) -> str | None:
    """None if the optimizer's state can be on the next tier between steps, else why not."""
    machine = trace.machine
    has_speed = bool(machine.disk_write_bytes_per_second and machine.disk_read_bytes_per_second)
    if trace.device not in ("cpu", "cuda"):
        return f"optimizer state moves from CPU and CUDA memory only; the trace is of device '{trace.device}'"
    if trace.device == "cuda" and not has_speed:
        return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"
    if trace.device == "cpu" and not (machine.disk and has_speed):
        return "there is no disk to move optimizer state to; pass --disk DIR"
    if JOINT in trace.optimizer:
        return f"several optimizers step the model ({trace.optimizer}), and their state stays in memory"
    if trace.optimizer not in STEPPED_ALONE:
        return f"{trace.optimizer or 'the optimizer'} is not known to step each parameter alone"
    if state_bytes == 0:
        return f"{trace.optimizer} has no state that is large enough to move"
    if state_bytes > capacity_bytes:
        tier = "disk" if trace.device == "cpu" else "host memory"
        return f"the state needs {format_bytes(state_bytes)} of {tier}, there are {format_bytes(capacity_bytes)}"
    return None


def can_step_on_cpu(trace: Trace, allow: tuple[str, ...]) -> str | None:
    """None if the CPU may step a device's parameters, beside their state, else why not."""
    if "cpu-optimizer-step" not in allow:
        return "a step on the CPU rounds otherwise than on the device; allow it with --allow cpu-optimizer-step"
    if trace.device != "cuda":
        return f"a step is taken to the CPU from CUDA only; the step is for '{trace.device}'; {_HOW_TO_STEP_ON_CPU}"
    if trace.optimizer not in STEPPED_ON_CPU:
        names = " and ".join(STEPPED_ON_CPU)
        return f"only {names} are stepped on the CPU; {trace.optimizer or 'nothing'} steps"
    others = {s.dtype for s in steady_step(trace).storages if s.category == "gradient"} - {"float32", ""}
    if others:
        return f"the CPU steps parameters in float32; here are some in {', '.join(sorted(others))}"
    if not trace.machine.disk_write_bytes_per_second:
        return "a step on the CPU has its state in host memory; pass --host SIZE together with --device NAME"
    if not trace.machine.cpu_step_bytes_per_second:
        return f"it is not known how fast the CPU steps; {_HOW_TO_STEP_ON_CPU}, which measures it"
    return None


def can_keep_low_bits(trace: Trace, num_elements: int, allow: tuple[str, ...]) -> str | None:
    """None if the optimizer's moments may be in 8 bits between steps, else why not.

    Args:
        num_elements: of all moments that are large enough.
    """
    if "low-bit-optimizer" not in allow:
        return "optimizer state in 8 bits changes numerics; allow it with --allow low-bit-optimizer"
    if trace.device != "cpu":
        return f"optimizer state is kept in 8 bits in CPU memory only; the step is for '{trace.device}'"
    if trace.optimizer not in _WITH_MOMENTS:
        return f"only moments of {' and '.join(_WITH_MOMENTS)} are kept in 8 bits; {trace.optimizer or 'nothing'} steps"
    if num_elements == 0:
        return f"{trace.optimizer} has no moment in float32 of 4,096 elements or more, in whole blocks of 256"
    if find_spec("torchao") is None:
        return "optimizer state in 8 bits is kept by torchao, which is not installed: pip install torchao"
    return None


def can_move_parameters(trace: Trace, away_bytes: int, capacity_bytes: int) -> str | None:
    """None if parameters and gradients can be on disk between their uses, once the optimizer's state is, else why not.

    Args:
        away_bytes: what would be on disk: parameters, gradients and state.
        capacity_bytes: what the disk may be used for.
    """
    if trace.device != "cpu":
        return f"parameters move to disk from CPU memory only; the trace is of device '{trace.device}'"
    if trace.autocast != "none":
        return f"autocast to {trace.autocast} keeps copies of parameters in memory through a whole forward"
    if away_bytes == 0:
        return "no parameter is large enough to move, and used by its own module alone"
    if away_bytes > capacity_bytes:
        return (
            f"parameters, gradients and optimizer state need {format_bytes(away_bytes)} of disk, there are "
            f"{format_bytes(capacity_bytes)}"
        )
    return None
