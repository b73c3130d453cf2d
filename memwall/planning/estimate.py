"""The forecast of an untreated run on a device that is not here: what `memwall estimate` answers."""

from collections.abc import Mapping

from memwall.machine.hardware import Hardware
from memwall.planning.device_phases import SMALLER_EVALUATION, evaluation_with_metrics
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.one_recording.relaxations import Run, estimate_relaxations
from memwall.predict.cuda.attention_calls import AttentionCalls, attention_calls
from memwall.predict.cuda_allocator.advice import advise, setting_lines
from memwall.predict.cuda_allocator.allocator_settings import parse_settings
from memwall.predict.curve import Peak, peak_of, step_seconds
from memwall.predict.device import MARGIN_BASIS, DeviceModel
from memwall.predict.host import HostBytes, host_bytes_of
from memwall.predict.phases import PhasePeak, Phases, waiting_bytes
from memwall.trace.records import Step, Trace, route_of
from memwall.trace.steps import steady_step
from memwall.trace.workload_facts import workload_facts
from memwall.units import format_bytes

_PLAN = "recompute or offload: memwall plan SPEC --device NAME --budget SIZE"


class Estimate(Forecast, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds a forecast with what it rests on."""

    product: str
    torch_version: str
    """Release whose allocator is simulated."""
    micro_batch: int
    num_micro_batches: int
    """Forwards and backwards in a step."""
    waiting_batch_bytes: int
    """Batches of later micro-batches that are on the device already, as with transformers' Trainer."""
    peak_phase: str
    host: HostBytes
    """The parts of the peaks in host memory."""
    margin_basis: str
    context_bytes: tuple[int, int]
    """Published range of what a process holds besides the allocator; the forecast counts the low end."""
    attention_kernels: dict[str, int]
    """Attention calls of a step by the kernel they take."""
    attention_calls: tuple[AttentionCalls, ...]
    """The same by the module that makes them."""
    in_peak: Peak
    """Who holds the tensors at the highest point of the training steps, by category and by module."""


def estimate(
    trace: Trace,
    hardware: Hardware,
    *,
    budget_bytes: int | None = None,
    torch_version: str | None = None,
    evaluation: Trace | None = None,
    eval_failure: str = "",
    num_micro_batches: int | None = None,
) -> Estimate:
    """Returns the forecast of a translated trace as it is, nothing treated.

    Where the allocator would reserve more than the budget, but gets along with it by giving back what it caches, that
    is the forecast: a run that fits, if slowly.

    Args:
        budget_bytes: what the process may use; None for all that the device has.
        torch_version: release to simulate the allocator of; None for the one installed.
        evaluation: one evaluation, translated; None leaves it out, and `eval_failure` says why.
        num_micro_batches: forwards and backwards in a step; of many, two are recorded. None: as recorded.

    Raises:
        TraceError: the trace has no storage on a CUDA device.
    """
    budget_bytes = hardware.usable_bytes if budget_bytes is None else budget_bytes
    num_micro_batches = num_micro_batches or trace.num_micro_batches
    context_bytes = hardware.context_bytes[0]
    model = DeviceModel(trace, hardware, torch_version)
    steady = steady_step(trace)
    evaluated, after = (*(() if evaluation is None else evaluation.steps), None, None)[:2]

    def phases_in(run: Run) -> Phases:
        steps = run.trace.steps[0], steady_step(run.trace)
        return Phases(steps, evaluated, after_evaluation=after, num_batches=run.num_micro_batches)

    def simulated(run: Run, capacity_bytes: int | None = None) -> dict[str, PhasePeak] | None:
        phases = untreated if run.trace is trace else phases_in(run)
        return phases.peaks(model.profile, settings=run.settings, capacity_bytes=capacity_bytes)

    run = Run(trace=trace, num_micro_batches=num_micro_batches)
    untreated = phases_in(run)
    peaks = simulated(run) or {}
    binding: tuple[str, ...] = ()
    if context_bytes + _reserved(peaks) > budget_bytes:
        pressed = simulated(run, max(0, budget_bytes - context_bytes))
        if pressed is not None:
            binding = (
                f"the allocator has to give back cached memory to stay within the budget: it would reserve "
                f"{format_bytes(_reserved(peaks))}, which costs time in every step",
            )
            peaks = pressed
    phases = {name: _phase(peak, context_bytes) for name, peak in peaks.items()}
    reserved_bytes = _reserved(peaks)
    process_bytes = context_bytes + reserved_bytes
    margin = model.margin_bytes(process_bytes)
    peak_phase = max(peaks, key=lambda name: peaks[name].reserved_bytes)
    fits = process_bytes + margin <= budget_bytes
    host = host_bytes_of(steady)
    advice = advise(untreated.run, model.profile.version, total_bytes=hardware.usable_bytes)
    better = (setting_lines(advice.settings), parse_settings(advice.settings, model.profile))

    attention = attention_calls(trace, steady, num_micro_batches=num_micro_batches)

    def relaxations() -> tuple[str, ...]:
        def bytes_of(changed: Run) -> int:
            return context_bytes + _reserved(simulated(changed) or {})

        def has_room(process_bytes: int) -> bool:
            return process_bytes + model.margin_bytes(process_bytes) <= budget_bytes

        return (
            *((SMALLER_EVALUATION,) if peak_phase == "eval" else ()),
            *estimate_relaxations(run, better, bytes_of=bytes_of, fits=has_room),
            _PLAN,
        )

    return Estimate(
        device=hardware.name,
        source=trace.source,
        route=route_of(trace),
        fits=fits,
        budget_bytes=budget_bytes,
        margin_bytes=margin,
        peak=PeakBytes(
            allocated_bytes=max(peak.allocated_bytes for peak in peaks.values()),
            reserved_bytes=reserved_bytes,
            process_bytes=process_bytes,
            host_bytes=max(peak.host_bytes for peak in peaks.values()),
            disk_bytes=max(peak.disk_bytes or 0 for peak in peaks.values()),
        ),
        phases=phases,
        step_seconds=_seconds(steady, num_micro_batches) or None,
        not_modelled=(
            *model.not_modelled_in_steps(),
            *_left_out(evaluated, eval_failure, host),
        ),
        binding=binding,
        relaxations=() if fits else relaxations(),
        workload=workload_facts(trace, num_micro_batches=num_micro_batches),
        allocator=advice,
        product=hardware.product,
        torch_version=model.profile.version,
        micro_batch=trace.micro_batch,
        num_micro_batches=num_micro_batches,
        waiting_batch_bytes=waiting_bytes(steady, num_micro_batches),
        peak_phase=peak_phase,
        host=host,
        margin_basis=MARGIN_BASIS,
        context_bytes=hardware.context_bytes,
        attention_kernels={
            kernel: sum(calls.num_calls for calls in attention if calls.kernel == kernel)
            for kernel in sorted({calls.kernel for calls in attention})
        },
        attention_calls=attention,
        in_peak=max((peak_of(trace, step) for step in (trace.steps[0], steady)), key=lambda peak: peak.live_bytes),
    )


def _reserved(peaks: Mapping[str, PhasePeak]) -> int:
    return max((peak.reserved_bytes for peak in peaks.values()), default=0)


def _phase(peak: PhasePeak, context_bytes: int) -> PeakBytes:
    return PeakBytes(
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        process_bytes=context_bytes + peak.reserved_bytes,
        host_bytes=peak.host_bytes,
        disk_bytes=peak.disk_bytes,
    )


def _seconds(step: Step, num_micro_batches: int) -> float:
    """Returns the seconds of a step: micro-batches beyond the recorded ones take as long as the last of these."""
    boundaries = [operation for name, operation in step.marks if name == "accumulation"]
    if not boundaries:
        return step_seconds(step)
    end = next(operation for name, operation in step.marks if name == "optimizer" and operation >= boundaries[-1])
    num_more = num_micro_batches - 1 - len(boundaries)
    return step_seconds(step) + num_more * sum(op.seconds for op in step.ops[boundaries[-1] : end])


def _left_out(evaluation: Step | None, eval_failure: str, host: HostBytes) -> tuple[str, ...]:
    """Says what the forecast does not count in the phases around the training steps, and beside them."""
    found = []
    if evaluation is None:
        found.append(f"evaluation: {eval_failure}" if eval_failure else "evaluation")
    else:
        found.append(evaluation_with_metrics(evaluation))
    found.append(f"a checkpoint read straight to the device, which takes {format_bytes(host.weights_bytes)} more there")
    found.append("batches larger than this one")
    found.append("data loader workers, and the data set in host memory; other processes on the device")
    return tuple(found)
