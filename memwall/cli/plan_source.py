"""Gets what a plan is made from: a trace file, or a workload recorded now or on fake tensors, in further ways too."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memwall.cli.options import require_file
from memwall.integrations.hf_config import config_path, hub_hint

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwall.cli.options import DiskTier
    from memwall.machine.hardware import Hardware
    from memwall.planning.action import Action
    from memwall.planning.planfile import Plan
    from memwall.trace.fake import RecordedRun
    from memwall.trace.records import Trace
    from memwall.trace.workload import Workload

__all__ = ["Ways", "device_trace", "here_with_kernels", "is_spec", "load_source", "with_cpu_step", "with_disk"]


class Ways(NamedTuple):
    """Says how else the step can be recorded, and what was recorded besides; None where it cannot, or was not."""

    under_autocast: "Callable[[], Trace] | None" = None
    with_kernels: "Callable[[str | None], tuple[Trace, Action | None]] | None" = None
    evaluated: "Callable[[Plan], Plan] | None" = None
    """Counts the evaluation that follows the steps of a plan."""


def here_with_kernels(source: str, tier: "DiskTier | None", lower: str | None) -> "tuple[Trace, Action | None]":
    """Records the step of a factory with fused kernels, here and now."""
    from memwall.integrations.fused_kernels import recorded_with_kernels
    from memwall.trace.spec import load_workload
    from memwall.trace.trace_builder import record

    return recorded_with_kernels(lambda changed: with_disk(record(changed(load_workload(source))), tier))


def device_trace(
    source: str,
    hardware: "Hardware",
    *,
    host_bytes: int,
    mask_share: float | None,
    autocast: str | None,
    **model: Any,
) -> "tuple[Trace, Ways]":
    """Returns the step as the device would run it, of a trace file or a SPEC; and how else a SPEC can be recorded.

    Args:
        model: what `device_run_of_spec` is told about a configuration's model and batches.
    """
    from msgspec.structs import replace

    from memwall.integrations.spec_trace import device_run_of_spec
    from memwall.planning.device_phases import with_evaluation
    from memwall.planning.technique import technique_of
    from memwall.planning.techniques.kernels import FUSED
    from memwall.predict.cuda.translate import translated
    from memwall.predict.device import DeviceModel

    if not is_spec(source):
        return translated(load_source(source), hardware, host_bytes=host_bytes), Ways()
    lower = "bfloat16" if "bfloat16" in hardware.flops else "float16"
    runs: dict[frozenset[str], RecordedRun] = {}
    """By the forms in which the step was recorded: precision, fused kernels."""

    def record(*, autocast: str | None, changed: "Callable[[Workload], Workload] | None" = None) -> "Trace":
        run = device_run_of_spec(
            source,
            hardware,
            host_bytes=host_bytes,
            mask_share=mask_share,
            autocast=autocast,
            changed=changed,
            **model,
        )
        runs[frozenset(form for form in (autocast, FUSED if changed is not None else None) if form)] = run
        return run.training

    def evaluated(plan: "Plan") -> "Plan":
        forms = {technique_of(action).recorded_form(action) for action in plan.actions} | {autocast or ""}
        run = runs[frozenset(form for form in forms if form)]
        if run.evaluation is None:
            not_modelled = (*plan.forecast.not_modelled, f"evaluation: {run.failure}")
            return replace(plan, forecast=replace(plan.forecast, not_modelled=not_modelled))
        return with_evaluation(plan, run.training, DeviceModel(run.training, hardware), run.evaluation.steps[0])

    def with_kernels(lower: str | None) -> "tuple[Trace, Action | None]":
        from memwall.integrations.fused_kernels import recorded_with_kernels, without_values

        precision = autocast if lower is None else lower
        return recorded_with_kernels(
            lambda changed: record(autocast=precision, changed=changed), objection=without_values
        )

    return record(autocast=autocast), Ways(partial(record, autocast=lower), with_kernels, evaluated)


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


def with_cpu_step(trace: "Trace", ways: Ways) -> "tuple[Trace, Ways]":
    """Adds the speed of an optimizer's step on this CPU, measured now, to a trace and those recorded in other ways."""
    import msgspec

    from memwall.apply.optimizer_state.cpu_speed import cpu_step_speeds

    speeds = cpu_step_speeds()

    def known(found: "Trace") -> "Trace":
        machine = msgspec.structs.replace(
            found.machine,
            cpu_step_bytes_per_second=speeds.torch_bytes_per_second,
            deepspeed_step_bytes_per_second=speeds.deepspeed_bytes_per_second,
        )
        return msgspec.structs.replace(found, machine=machine)

    lower, kernels = ways.under_autocast, ways.with_kernels
    if lower is not None:
        plain_lower = lower
        ways = ways._replace(under_autocast=lambda: known(plain_lower()))
    if kernels is not None:
        plain_kernels = kernels

        def with_kernels(dtype: str | None) -> "tuple[Trace, Action | None]":
            found, action = plain_kernels(dtype)
            return known(found), action

        ways = ways._replace(with_kernels=with_kernels)
    return known(trace), ways


def with_disk(trace: "Trace", tier: "DiskTier | None") -> "Trace":
    """Returns the trace with the speeds of another disk than the one it was recorded with, measured now."""
    if tier is None or trace.device != "cpu" or trace.machine.disk == str(tier.directory):
        return trace
    import msgspec

    from memwall.apply.offload.parking import measured_machine

    return msgspec.structs.replace(trace, machine=measured_machine(str(tier.directory)))
