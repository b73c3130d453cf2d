"""An estimate as figures: what is predicted for which device, and what that rests on."""

from typing import TYPE_CHECKING

from memwall.report.grid import DASH, seconds_or_dash, share_percent
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.plan.estimate import Estimate

__all__ = ["estimate_facts"]


def estimate_facts(estimate: "Estimate") -> tuple[tuple[str, str], ...]:
    """The estimate's figures as (name, value)."""
    peak, budget_bytes = estimate.peak, estimate.budget_bytes or 0
    low, high = (format_bytes(size) for size in estimate.context_bytes)
    kernels = ", ".join(f"{kernel} ({calls} calls)" for kernel, calls in estimate.attention_kernels.items())
    seconds = estimate.step_seconds
    facts = [
        ("device", f"{estimate.device} ({estimate.product})"),
        ("budget", format_bytes(budget_bytes)),
        ("process peak", f"{format_bytes(peak.process_bytes)} ({share_percent(peak.process_bytes, budget_bytes)})"),
        ("of that reserved", f"{format_bytes(peak.reserved_bytes or 0)}, allocator of torch {estimate.torch_version}"),
        ("of that tensors", format_bytes(peak.allocated_bytes)),
        ("CUDA context", f"{low}, published up to {high}"),
        ("margin", f"{format_bytes(estimate.margin_bytes)} ({estimate.margin_basis})"),
        ("with expandable segments", f"{format_bytes(estimate.expandable_reserved_bytes)} reserved"),
        ("attention kernels", kernels or DASH),
        ("step", f"at least {seconds_or_dash(seconds)} at data-sheet peaks" if seconds is not None else DASH),
        ("micro-batch", str(estimate.micro_batch) if estimate.micro_batch else DASH),
    ]
    if estimate.binding:
        facts.append(("what binds", "; ".join(estimate.binding)))
    return tuple(facts)
