"""Which kernel each attention call of a recorded step took, by the module that made it.

A fused kernel is an operator of its own. The math kernel is none: what runs are products and a softmax, so that the
recording marks where such a call begins.
"""

from msgspec import Struct

from memwall.torch_internals.dispatch import active_dispatch_modes
from memwall.trace.records import Step, Trace
from memwall.trace.step_recorder import StepRecorder

_MATH_MARK = "math attention"
_KERNELS = {
    "aten._scaled_dot_product_cudnn_attention.default": "cudnn",
    "aten._scaled_dot_product_flash_attention.default": "flash",
    "aten._scaled_dot_product_efficient_attention.default": "efficient",
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "cpu",
}


class AttentionCalls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts calls of scaled_dot_product_attention that one module makes with one kernel."""

    module: str
    """Path below the root."""
    kernel: str
    """cudnn, flash, efficient or math; cpu where the step ran the kernel of a CPU."""
    num_calls: int
    """In one optimizer step, those that are made again while recomputing among them."""


def mark_math_attention() -> None:
    """Notes in the step that is being recorded, if one is, that a call without an operator of its own begins."""
    for mode in active_dispatch_modes():
        if isinstance(mode, StepRecorder):
            mode.log.mark(_MATH_MARK)


def attention_calls(trace: Trace, step: Step, *, num_micro_batches: int) -> tuple[AttentionCalls, ...]:
    """Returns the attention calls of a step in the order in which modules first make them.

    Args:
        num_micro_batches: forwards and backwards of the whole step; of many, two are recorded.
    """
    marked = {operation for name, operation in step.marks if name == _MATH_MARK}
    found: dict[tuple[int, str], int] = {}
    for number, op in enumerate(step.ops):
        kernel = "math" if number in marked else _KERNELS.get(trace.names[op.name])
        if kernel is not None:
            found[op.module, kernel] = found.get((op.module, kernel), 0) + 1
    return tuple(
        AttentionCalls(
            module=trace.modules[module].path if module >= 0 else "",
            kernel=kernel,
            num_calls=num_calls * num_micro_batches // trace.num_micro_batches,
        )
        for (module, kernel), num_calls in found.items()
    )
