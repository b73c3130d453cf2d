"""Gets what a plan is made from: a trace file, or a workload recorded now or on fake tensors, in further ways too."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memwall.cli.options import require_file
from memwall.integrations.hugging_face.hf_config import config_path, hub_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from memwall.cli.options import DiskChoice
    from memwall.machine.hardware import Hardware
    from memwall.machine.tiers import Machine
    from memwall.planning.action import Action
    from memwall.planning.planfile import Plan
    from memwall.planning.recordings import Recordings
    from memwall.trace.fake import RecordedRun
    from memwall.trace.records import Route, Trace
    from memwall.trace.workload import Workload


class Source(NamedTuple):
    """Holds the step to plan for, and how else it can be recorded; None where it cannot."""

    trace: "Trace"
    recordings: "Recordings | None" = None
    evaluated: "Callable[[Plan], Plan] | None" = None
    """Counts the evaluation that follows the steps of a plan; None where there is none."""


def trace_here(source: str, tier: "DiskChoice | None", *, allowed: "Collection[str]" = ()) -> Source:
    """Returns the step of a trace file, or of a factory, which is recorded here and now.

    Args:
        allowed: see `device_trace`.
    """
    from memwall.planning.recordings import Recordings
    from memwall.planning.techniques import kernels

    def record_with_kernels(_: frozenset[str]) -> "tuple[Trace, Action | None]":
        from memwall.integrations.fused_kernels import recorded_with_kernels
        from memwall.trace.spec import load_workload
        from memwall.trace.trace_builder import record

        return recorded_with_kernels(
            lambda changed: with_disk(record(changed(load_workload(source))), tier),
            is_told=kernels.TECHNIQUE.allow in allowed,
        )

    trace = with_disk(load_source(source), tier)
    if Path(source).exists():
        return Source(trace)
    return Source(trace, Recordings(frozenset({kernels.TECHNIQUE.allow}), record_with_kernels))


def device_trace(
    source: str,
    hardware: "Hardware",
    *,
    host_bytes: int,
    mask_share: float | None,
    autocast: str | None,
    route: "Route" = "translate",
    is_evaluated: bool = True,
    allowed: "Collection[str]" = (),
    **model: Any,
) -> Source:
    """Returns the step as the device would run it, of a trace file or a SPEC.

    Args:
        is_evaluated: whether an evaluation follows.
        allowed: words that the user has allowed; what others would save is only tried, and nothing is said of it.
        model: what `device_run_of_spec` is told about a configuration's model and batches.
    """
    from msgspec.structs import replace

    from memwall.integrations.spec_trace import device_run_of_spec
    from memwall.planning.device_phases import with_evaluation
    from memwall.planning.recordings import Recordings
    from memwall.planning.technique import technique_of
    from memwall.planning.techniques import autocast as lower_precision
    from memwall.planning.techniques import kernels
    from memwall.predict.cuda.translate import translated
    from memwall.predict.device import DeviceModel

    if not is_spec(source):
        return Source(translated(load_source(source), hardware, host_bytes=host_bytes))
    lower = "bfloat16" if "bfloat16" in hardware.flops else "float16"
    offered = frozenset({lower_precision.TECHNIQUE.allow})
    if route == "translate":  # a process of its own makes the workload, whose layers nothing here can replace
        offered |= {kernels.TECHNIQUE.allow}
    runs: dict[frozenset[str], RecordedRun] = {}
    """Runs by the forms in which the step was recorded."""

    def run_of(forms: frozenset[str], changed: "Callable[[Workload], Workload] | None" = None) -> "Trace":
        runs[forms] = device_run_of_spec(
            source,
            hardware,
            host_bytes=host_bytes,
            mask_share=mask_share,
            autocast=lower if lower_precision.TECHNIQUE.allow in forms else autocast,
            changed=changed,
            route=route,
            is_evaluated=is_evaluated,
            **model,
        )
        return runs[forms].training

    def record(forms: frozenset[str]) -> "tuple[Trace, Action | None]":
        from memwall.integrations.fused_kernels import recorded_with_kernels, without_values

        if kernels.TECHNIQUE.allow not in forms:
            return run_of(forms), None
        is_told = kernels.TECHNIQUE.allow in allowed
        return recorded_with_kernels(partial(run_of, forms), objection=without_values, is_told=is_told)

    def evaluated(plan: "Plan") -> "Plan":
        run = runs[offered.intersection(technique_of(action).allow for action in plan.actions)]
        if run.evaluation is None:
            not_modelled = (*plan.forecast.not_modelled, f"evaluation: {run.failure}")
            return replace(plan, forecast=replace(plan.forecast, not_modelled=not_modelled))
        return with_evaluation(plan, run.training, DeviceModel(run.training, hardware), run.evaluation)

    return Source(run_of(frozenset()), Recordings(offered, record), evaluated if is_evaluated else None)


def is_spec(source: str) -> bool:
    """Says whether it is a configuration or a factory, and no file of a trace."""
    return config_path(source) is not None or (":" in source and not Path(source).exists())


def load_source(source: str) -> "Trace":
    """Returns the trace of a file, or of a workload recorded now.

    Raises:
        UsageError: there is no such file, or the factory cannot be loaded.
        TraceError: the file is no trace.
    """
    if ":" in source and not Path(source).exists():
        from memwall.trace.spec import load_workload
        from memwall.trace.trace_builder import record

        return record(load_workload(source))
    expected = "a trace written by memwall profile, or package.module:factory, or path/file.py:factory"
    path = require_file(Path(source), expected=expected if Path(source).exists() else expected + hub_hint(source))
    from memwall.trace.file import load_trace

    return load_trace(path)


def with_measured(source: Source, allow: "Sequence[str]") -> Source:
    """Returns the source with what techniques that are allowed have to measure on this machine, in every trace."""
    from msgspec.structs import replace

    from memwall.apply.technique import allowed

    machines: dict[Machine, Machine] = {}

    def measured(found: "Trace") -> "Trace":
        if found.machine not in machines:
            machine = found.machine
            for _, handler in allowed(allow):
                machine = handler.measured(machine)
            machines[found.machine] = machine
        return replace(found, machine=machines[found.machine])

    recordings = source.recordings
    return source._replace(
        trace=measured(source.trace), recordings=None if recordings is None else recordings.changed(measured)
    )


def with_disk_below_host(source: Source, disk: "DiskChoice") -> Source:
    """Returns the source with a disk below its device's host memory, as fast as this one is here, in every trace."""
    from msgspec.structs import replace

    from memwall.apply.offload.machine_below import probed_disk

    tier = probed_disk(str(disk.directory), disk.limit_bytes)

    def below(found: "Trace") -> "Trace":
        return replace(found, machine=replace(found.machine, tiers=(*found.machine.tiers, tier)))

    recordings = source.recordings
    return source._replace(
        trace=below(source.trace), recordings=None if recordings is None else recordings.changed(below)
    )


def with_disk(trace: "Trace", tier: "DiskChoice | None") -> "Trace":
    """Returns the trace with the speeds of another disk than the one it was recorded with, measured now."""
    if tier is None or trace.device != "cpu" or trace.machine.disk == str(tier.directory):
        return trace
    import msgspec

    from memwall.apply.offload.machine_below import measured_machine

    return msgspec.structs.replace(trace, machine=measured_machine(str(tier.directory)))
