"""The forecast of an untreated step on a device that is not here: what `memwall estimate` answers."""

from collections.abc import Sequence
from typing import Literal

from memwall.plan.forecast import Forecast, PeakBytes
from memwall.predict.cuda_allocator.settings import AllocatorSettings
from memwall.predict.curve import step_seconds
from memwall.predict.device import MARGIN_BASIS, DeviceModel, StepPeak, margin_bytes, step_peaks
from memwall.predict.hardware import Hardware
from memwall.trace.build import steady_step
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

__all__ = ["Estimate", "estimate"]

# Below this an allocator setting is not worth mentioning.
_NOTABLE_SHARE = 0.01


class Estimate(Forecast, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A forecast with what it rests on."""

    tag: Literal["predicted"] = "predicted"
    """Nothing in it was measured on the device."""
    product: str
    torch_version: str
    """Release whose allocator is simulated."""
    micro_batch: int
    margin_basis: str
    context_bytes: tuple[int, int]
    """Published range of what a process holds besides the allocator; the forecast counts the low end."""
    attention_kernels: dict[str, int]
    """Attention calls of a step by the fused kernel they take."""
    expandable_reserved_bytes: int
    """What the allocator would reserve with expandable_segments:True."""


def estimate(
    trace: Trace, hardware: Hardware, *, budget_bytes: int | None = None, torch_version: str | None = None
) -> Estimate:
    """The forecast of a translated trace as it is, nothing treated.

    Where the allocator would reserve more than the budget, but gets along with it by giving back what it caches, that
    is the forecast: a run that fits, if slowly.

    Args:
        budget_bytes: what the process may use; None for all that the device has.
        torch_version: release to simulate the allocator of; None for the one installed.

    Raises:
        TraceError: the trace has no storage on a CUDA device.
    """
    budget_bytes = hardware.usable_bytes if budget_bytes is None else budget_bytes
    context_bytes = hardware.context_bytes[0]
    model = DeviceModel(trace, hardware, torch_version)
    steps = (trace.steps[0], steady_step(trace))
    peaks = step_peaks(steps, model.profile) or ()
    binding: tuple[str, ...] = ()
    if context_bytes + _reserved(peaks) > budget_bytes:
        pressed = step_peaks(steps, model.profile, capacity_bytes=max(0, budget_bytes - context_bytes))
        if pressed is not None:
            binding = (
                f"the allocator has to give back cached memory to stay within the budget: it would reserve "
                f"{format_bytes(_reserved(peaks))}, which costs time in every step",
            )
            peaks = pressed
    phases = {"first_step": _phase(peaks[:1], context_bytes), "steady_step": _phase(peaks[1:], context_bytes)}
    reserved_bytes = _reserved(peaks)
    process_bytes = context_bytes + reserved_bytes
    margin = margin_bytes(hardware, reserved_bytes)
    expandable_bytes = _reserved(
        step_peaks(steps, model.profile, settings=AllocatorSettings(expandable_segments=True)) or ()
    )
    fits = process_bytes + margin <= budget_bytes
    return Estimate(
        device=hardware.name,
        source=trace.source,
        fits=fits,
        budget_bytes=budget_bytes,
        margin_bytes=margin,
        peak=PeakBytes(
            allocated_bytes=max(phase.allocated_bytes for phase in phases.values()),
            reserved_bytes=reserved_bytes,
            process_bytes=process_bytes,
        ),
        phases=phases,
        step_seconds=step_seconds(steps[1]) or None,
        not_modelled=model.not_modelled(),
        binding=binding,
        relaxations=() if fits else _relaxations(trace, reserved_bytes, expandable_bytes),
        product=hardware.product,
        torch_version=model.profile.version,
        micro_batch=trace.micro_batch,
        margin_basis=MARGIN_BASIS,
        context_bytes=hardware.context_bytes,
        attention_kernels=_attention_kernels(trace, steps[1]),
        expandable_reserved_bytes=expandable_bytes,
    )


def _reserved(peaks: Sequence[StepPeak]) -> int:
    return max((peak.reserved_bytes for peak in peaks), default=0)


def _phase(peaks: Sequence[StepPeak], context_bytes: int) -> PeakBytes:
    return PeakBytes(
        allocated_bytes=max(peak.live_bytes for peak in peaks),
        reserved_bytes=_reserved(peaks),
        process_bytes=context_bytes + _reserved(peaks),
    )


def _relaxations(trace: Trace, reserved_bytes: int, expandable_bytes: int) -> tuple[str, ...]:
    """What would make it fit, cheapest first."""
    found = []
    if reserved_bytes - expandable_bytes > _NOTABLE_SHARE * reserved_bytes:
        found.append(
            f"set PYTORCH_ALLOC_CONF=expandable_segments:True: {format_bytes(expandable_bytes)} reserved in place of "
            f"{format_bytes(reserved_bytes)}"
        )
    found.append("recompute, split or offload: memwall plan SPEC --device NAME --budget SIZE")
    if trace.micro_batch > 1:
        found.append(f"a smaller micro-batch, of {trace.micro_batch // 2}, and accumulation")
    return tuple(found)


_KERNEL_NAMES = {
    "aten._scaled_dot_product_cudnn_attention.default": "cudnn",
    "aten._scaled_dot_product_flash_attention.default": "flash",
    "aten._scaled_dot_product_efficient_attention.default": "efficient",
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "cpu",
}


def _attention_kernels(trace: Trace, step: Step) -> dict[str, int]:
    """Attention written out in products and softmax has no kernel of its own."""
    found: dict[str, int] = {}
    for op in step.ops:
        kernel = _KERNEL_NAMES.get(trace.names[op.name])
        if kernel is not None:
            found[kernel] = found.get(kernel, 0) + 1
    return dict(sorted(found.items()))
