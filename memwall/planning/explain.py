"""Why a plan is what it is, in words: what binds, what is missing, and what would help, cheapest first."""

from collections.abc import Sequence

from memwall.planning.action import Action
from memwall.planning.technique import technique_of, techniques
from memwall.predict.curve import peak_of
from memwall.predict.link_time import LinkTime
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

__all__ = ["binding_reasons", "disk_wear", "infeasible_message", "relaxations"]


def binding_reasons(trace: Trace, step: Step, moved_bytes: int, actions: Sequence[Action] = ()) -> tuple[str, ...]:
    """Returns what keeps the step from being faster: the instant at which bytes are tight, and the link if one is used.

    Args:
        moved_bytes: saved tensors that leave in a step.
        actions: of the plan.
    """
    peak = peak_of(trace, step)
    where = f"{peak.phase} in {peak.module}"
    largest = ", ".join(f"{share.name} {format_bytes(share.num_bytes)}" for share in peak.by_category[:3])
    reasons = [f"memory at {where}: {format_bytes(peak.live_bytes)} of tensors ({largest})"]
    if moved_bytes:
        tier = "disk" if trace.device == "cpu" else "host memory"
        reasons.append(f"{format_bytes(moved_bytes)} go to {tier} and come back in each step")
    for technique in techniques():
        reasons += technique.binding(trace, [one for one in actions if technique_of(one) is technique])
    return tuple(reasons)


def disk_wear(link: LinkTime | None, step_seconds: float) -> tuple[str, ...]:
    """Returns what a step's writes wear off a disk; nothing where it writes nothing.

    A disk is sold for so many writes of its whole size a day, over the years of its warranty.
    """
    if link is None or link.tier != "disk" or step_seconds <= 0:
        return ()
    per_day = link.written_bytes_per_day(step_seconds)
    text = f"{format_bytes(per_day)} are written to the disk in a day of such steps, {step_seconds:.3g} s each"
    if link.tier_total_bytes:
        text += f": {per_day / link.tier_total_bytes:.2g} times the file system's size"
    return (text,)


def relaxations(trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> tuple[str, ...]:
    """Returns what to allow or lower so that less memory is needed, cheapest first."""
    ranked = sorted(techniques(), key=lambda technique: technique.advice_rank)
    advice = (technique.advice(trace, allow, can_split=can_split) for technique in ranked)
    found = [text for text in advice if text is not None]
    found.append("shorten the sequence or lower the resolution")
    return tuple(found)


def infeasible_message(
    trace: Trace,
    budget_bytes: int,
    smallest_bytes: int,
    helps: tuple[str, ...],
    *,
    parameters_stay: str = "",
    is_running: bool = False,
) -> str:
    """Returns one message: what was asked, what was found, what to do.

    Args:
        is_running: a run has begun, and may do other things than its training steps.
        parameters_stay: why parameters and gradients cannot be on disk, if they cannot.
    """
    parameters = sum(s.nbytes for s in trace.steps[0].storages if s.category == "parameter")
    largest = max(trace.modules, key=lambda module: module.parameter_bytes, default=None)
    lines = [
        f"the budget of {format_bytes(budget_bytes, rounding='down')} cannot be met: the smallest feasible one is "
        f"{format_bytes(smallest_bytes, rounding='up')}, "
        f"{format_bytes(smallest_bytes - budget_bytes, rounding='up')} more",
        f"of that, {format_bytes(trace.base_bytes)} are the process before the step, "
        f"{format_bytes(parameters)} parameters"
        + (f" (largest: {largest.path or largest.class_name})" if largest is not None else ""),
        *(["what the script does outside its training steps, evaluation say, is not in that"] if is_running else []),
        *([f"parameters and gradients stay in memory: {parameters_stay}"] if parameters_stay else []),
        *(f"  - {help_line}" for help_line in helps),
    ]
    return "\n".join(lines)
