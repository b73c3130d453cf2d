"""Shows an estimate as figures: what is predicted for which device, and what that rests on."""

from typing import TYPE_CHECKING

from memwall.predict.cuda_allocator.advice import VARIABLES
from memwall.report.grid import DASH, seconds_or_dash, share_percent
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.planning.estimate import Estimate
    from memwall.planning.forecast import Forecast
    from memwall.predict.cuda_allocator.advice import AllocatorAdvice
    from memwall.trace.workload_facts import WorkloadFacts

_RECORDINGS = {
    "fake": "on fake tensors, without values, as the device would run it",
    "recorded": "two real steps on this CPU, translated: what runs hangs on values",
    "snapshot": "by the device's allocator",
}

_ROUTES = {
    "translate": "translate, simulated",
    "phantom": "phantom, simulated; --route translate leaves out workspaces of cuDNN and temporaries of CUB",
}
_MORE_BY_PHANTOM = "; --route phantom has workspaces of cuDNN and temporaries of CUB as well"


def route_row(forecast: "Forecast", product: str = "") -> tuple[tuple[str, str], ...]:
    """Returns how the step was recorded, and what the other route has or leaves out, as (name, value).

    Args:
        product: what its maker calls the card; "" for a plan, which does not say.
    """
    if forecast.route is None:
        return ()
    # The phantom is a card of NVIDIA's only, and records a SPEC without values: anything else it refuses.
    has_other = forecast.route == "translate" and forecast.source == "fake" and product.startswith("NVIDIA")
    return (("route", _ROUTES[forecast.route] + (_MORE_BY_PHANTOM if has_other else "")),)


def estimate_facts(estimate: "Estimate") -> tuple[tuple[str, str], ...]:
    """Returns the estimate's figures as (name, value)."""
    peak, budget_bytes = estimate.peak, estimate.budget_bytes or 0
    low, high = (format_bytes(size) for size in estimate.context_bytes)
    context = f"{low}, measured here" if low == high else f"{low}, published up to {high}"
    kernels = ", ".join(f"{kernel} ({calls} calls)" for kernel, calls in estimate.attention_kernels.items())
    seconds = estimate.step_seconds
    share = share_percent(peak.process_bytes, budget_bytes)
    facts = [
        ("device", f"{estimate.device} ({estimate.product})"),
        *workload_row(estimate.workload),
        ("budget", format_bytes(budget_bytes, rounding="down")),
        (
            "process peak",
            f"{format_bytes(peak.process_bytes, rounding='up')} ({share}), "
            f"first in {estimate.peak_phase.replace('_', ' ')}",
        ),
        ("of that reserved", f"{format_bytes(peak.reserved_bytes or 0)}, allocator of torch {estimate.torch_version}"),
        ("of that tensors", format_bytes(peak.allocated_bytes)),
        ("CUDA context", context),
        ("margin", f"{format_bytes(estimate.margin_bytes)} ({estimate.margin_basis})"),
        *allocator_facts(estimate.allocator),
        ("host memory", _host_text(estimate)),
        (
            "recorded",
            "two steps of torch's CUDA build, simulated"
            if estimate.route == "phantom"
            else _RECORDINGS[estimate.source],
        ),
        *route_row(estimate, estimate.product),
        ("attention kernels", kernels or DASH),
        ("step", f"at least {seconds_or_dash(seconds)} at data-sheet peaks" if seconds is not None else DASH),
        ("micro-batch", _micro_batch_text(estimate)),
    ]
    if estimate.binding:
        facts.append(("what binds", "; ".join(estimate.binding)))
    return tuple(facts)


def workload_row(workload: "WorkloadFacts | None") -> tuple[tuple[str, str], ...]:
    """Returns which training step a forecast is for, as (name, value); nothing where the file does not say."""
    if workload is None:
        return ()
    parts = [f"weights in {workload.dtype}" if workload.dtype else ""]
    parts.append(f"{workload.autocast} autocast" if workload.autocast != "none" else "")
    parts.append(workload.optimizer)
    if workload.tokens_per_sample is not None:
        parts.append(f"batch {workload.input_shape[0]:,} x {workload.tokens_per_sample:,} tokens")
    elif workload.input_shape:
        parts.append(f"batch {' x '.join(f'{size:,}' for size in workload.input_shape)}")
    return (("workload", "; ".join(part for part in parts if part)),)


def allocator_facts(advice: "AllocatorAdvice | None") -> tuple[tuple[str, str], ...]:
    """Says what to set the CUDA allocator to, beside the default and what no settings can beat, as (name, value)."""
    if advice is None:
        return ()
    beside = (
        f"default {format_bytes(advice.default_reserved_bytes)}, lower bound {format_bytes(advice.lower_bound_bytes)}"
    )
    name = f"allocator settings ({advice.level})"
    if not advice.saved_bytes:
        return ((name, f"the default: none of {advice.num_tried} reserves notably less; {beside}"),)
    least, most = (format_bytes(size) for size in advice.reserved_spread_bytes)
    reserved = format_bytes(advice.reserved_bytes) + (f" ({least} to {most})" if least != most else "")
    facts = [
        (name, f"{advice.settings}: {reserved} reserved; {beside}"),
        ("set both to it", f"{' and '.join(VARIABLES)}; {advice.torch_versions}"),
    ]
    if advice.guards:
        instead = "the default is best"
        if advice.guarded_reserved_bytes < advice.default_reserved_bytes:
            instead = f"{advice.guarded_settings}: {format_bytes(advice.guarded_reserved_bytes)} reserved"
        facts.append(("not for runs with", f"{'; '.join(advice.guards)}. For these {instead}"))
    return tuple(facts)


def _host_text(estimate: "Estimate") -> str:
    host = estimate.host
    low, high = (format_bytes(size) for size in host.process_bytes)
    return (
        f"{format_bytes(estimate.peak.host_bytes or 0)}: the process {low}, published up to {high}; "
        f"{format_bytes(host.weights_bytes)} of weights while building; {format_bytes(host.pinned_bytes)} pinned"
    )


def _micro_batch_text(estimate: "Estimate") -> str:
    if estimate.num_micro_batches == 1:
        return str(estimate.micro_batch) if estimate.micro_batch else DASH
    waiting = format_bytes(estimate.waiting_batch_bytes)
    return f"{estimate.num_micro_batches} x {estimate.micro_batch or DASH}, {waiting} of batches wait on the device"
