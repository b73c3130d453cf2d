"""The phases of a run under a plan for a device: building, first and steady steps, saving and resuming."""

import msgspec

from memwall.plan.actions import AllocatorReuse
from memwall.plan.forecast import PeakBytes
from memwall.plan.planfile import Plan
from memwall.plan.planned import planned_step
from memwall.predict.cuda_allocator.settings import parse_settings
from memwall.predict.device import DeviceModel, as_first
from memwall.predict.phases import phase_peaks
from memwall.trace.records import Trace

__all__ = ["with_device_phases"]


def with_device_phases(plan: Plan, trace: Trace, process: DeviceModel) -> Plan:
    """The plan with every phase simulated, as `memwall estimate` has them; its peak stays that of the steps.

    Args:
        plan: made from `trace`, for that device.
    """
    step = planned_step(trace, plan)
    setting = next((a.cuda_setting for a in plan.actions if isinstance(a, AllocatorReuse)), "")
    settings = parse_settings(setting, process.profile)
    found = phase_peaks((as_first(step), step), None, process.profile, settings=settings)
    if found is None:  # out of memory on a device without end: an allocation larger than any address
        return plan
    steady = plan.forecast.phases["steady_step"]
    phases = {
        name: PeakBytes(
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            process_bytes=process.base_bytes + peak.reserved_bytes,
            # What a step moves there; what a phase holds there besides, `memwall estimate` says.
            host_bytes=steady.host_bytes if name.endswith("_step") else None,
            disk_bytes=peak.disk_bytes,
        )
        for name, peak in found.items()
    }
    allocated_bytes = max(phase.allocated_bytes for phase in phases.values())
    peak = msgspec.structs.replace(plan.forecast.peak, allocated_bytes=allocated_bytes)
    forecast = msgspec.structs.replace(
        plan.forecast,
        peak=peak,
        phases=phases,
        measured_phases=(),
        peak_phase=max(phases, key=lambda name: phases[name].process_bytes),
    )
    return msgspec.structs.replace(plan, forecast=forecast)
