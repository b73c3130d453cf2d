"""Why a plan is what it is, in words: what binds, what is missing, and what would help, cheapest first."""

from collections.abc import Sequence

from memwall.planning.actions import Action, LowBitState, Offload, OptimizerPlacement, ParameterPlacement
from memwall.planning.fused import could_have_kernels
from memwall.planning.legality import can_accumulate, can_autocast, can_offload, can_use_kernels
from memwall.planning.low_bit import why_no_low_bits
from memwall.planning.placement import cpu_bytes_per_second
from memwall.predict.curve import peak_of
from memwall.predict.link_time import LinkTime
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

__all__ = ["binding_reasons", "disk_wear", "infeasible_message", "relaxations", "slower_on_cpu"]


def binding_reasons(trace: Trace, step: Step, moved_bytes: int, actions: Sequence[Action] = ()) -> tuple[str, ...]:
    """What stops the step from being faster: the instant at which the bytes are tight, and the link if one is used.

    Args:
        moved_bytes: saved tensors that leave in a step.
        actions: of the plan; those that say where state and parameters are, and what leaves with fewer digits.
    """
    peak = peak_of(trace, step)
    where = f"{peak.phase} in {peak.module}"
    largest = ", ".join(f"{share.name} {format_bytes(share.num_bytes)}" for share in peak.by_category[:3])
    reasons = [f"memory at {where}: {format_bytes(peak.live_bytes)} of tensors ({largest})"]
    if moved_bytes:
        tier = "disk" if trace.device == "cpu" else "host memory"
        reasons.append(f"{format_bytes(moved_bytes)} go to {tier} and come back in each step")
    num_packed = sum(isinstance(action, Offload) and action.form != "exact" for action in actions)
    if num_packed:
        reasons.append(
            f"what leaves {num_packed} of the blocks does so in a byte an element, since that is faster; what comes "
            "back is off by up to 1/254 of the largest of its 128 neighbours in memory, and gradients with it"
        )
    for action in actions:
        saved_text = format_bytes(action.saved_bytes or 0)
        if isinstance(action, OptimizerPlacement) and action.stepped_on == "cpu":
            reasons.append(
                f"{saved_text} of optimizer state are in host memory, where the CPU steps it with "
                f"{_kernel_text(trace, action)}: gradients and parameters "
                "come down in each step and parameters go up, and the CPU rounds otherwise than the device"
            )
        elif isinstance(action, OptimizerPlacement):
            where = "disk" if action.tier == "disk" else "host memory"
            reasons.append(f"{saved_text} of optimizer state are read from {where} and written in each step")
        if isinstance(action, LowBitState):
            reasons.append(
                f"the optimizer's moments are in {action.bits} bits between steps, {saved_text} less; each is off by "
                "up to half of a step of torchao's table, and updates with it"
            )
        if isinstance(action, ParameterPlacement):
            reasons.append(
                f"{saved_text} of parameters and gradients are on disk between their uses: parameters are read in each "
                f"forward, backward and optimizer step, {format_bytes(action.written_bytes)} are written in a step"
                + (f"; the parameters of {len(action.staying)} modules stay in memory" if action.staying else "")
            )
    uses_disk = moved_bytes or any(isinstance(action, OptimizerPlacement | ParameterPlacement) for action in actions)
    if uses_disk and trace.machine.disk_engine == "io_uring":
        reasons.append("the disk's speed is that of io_uring, which was measured faster than system calls there")
    return tuple(reasons)


def slower_on_cpu(trace: Trace, actions: Sequence[Action], other: OptimizerPlacement) -> tuple[str, ...]:
    """Why state in host memory passes through the device, though the CPU was allowed to step it.

    Args:
        other: the step on the CPU.
    """
    speed_text = _kernel_text(trace, other)
    through = [a for a in actions if isinstance(a, OptimizerPlacement) and a.stepped_on != "cpu"]
    return tuple(
        f"the CPU, with {speed_text}, would make a step {other.cost_seconds or 0.0:.3g} s longer; state through the "
        f"device makes it {action.cost_seconds or 0.0:.3g} s longer"
        for action in through
    )


def _kernel_text(trace: Trace, action: OptimizerPlacement) -> str:
    with_deepspeed = action.engine == "deepspeed"
    name = "DeepSpeed's kernel" if with_deepspeed else "torch's fused kernel"
    return f"{name} at {format_bytes(cpu_bytes_per_second(trace.machine, with_deepspeed))}/s as measured here"


def disk_wear(link: LinkTime | None, step_seconds: float) -> tuple[str, ...]:
    """What a step's writes wear off a disk; nothing where it writes nothing.

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
    """What to allow or lower so that less memory is needed, cheapest first."""
    found = []
    if can_offload(trace) is not None:
        tier, option = ("a disk", "--disk DIR") if trace.device == "cpu" else ("host memory", "--host SIZE")
        found.append(f"give {tier} for saved tensors: {option}")
    if not can_split and can_accumulate(trace, is_cooperative=True) is None:
        half = trace.micro_batch // 2
        found.append(
            f"halve the micro-batch and accumulate: batch size {half}, "
            f"{2 * trace.num_micro_batches} accumulation steps (the same global batch)"
        )
    is_possible = could_have_kernels(trace) and can_use_kernels(trace.device, ("kernels",), is_here=True) is None
    if is_possible and "kernels" not in allow:
        found.append("allow fused kernels for norms, gated MLPs and the loss of a language model: --allow kernels")
    if can_autocast(trace, ("precision",)) is None and "precision" not in allow:
        found.append("allow bfloat16 autocast, which changes numerics: --allow precision")
    if why_no_low_bits(trace, ("low-bit-optimizer",)) is None and "low-bit-optimizer" not in allow:
        found.append(f"keep {trace.optimizer}'s moments in 8 bits, which changes numerics: --allow low-bit-optimizer")
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
    """One message: asked, found, what to do.

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
