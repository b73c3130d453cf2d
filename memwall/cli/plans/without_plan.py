"""Says in a forecast's form that no plan fits, for scripts."""

from typing import TYPE_CHECKING

from memwall.errors import InfeasibleError

if TYPE_CHECKING:
    from memwall.machine.hardware import Hardware
    from memwall.planning.forecast import Forecast
    from memwall.trace.records import Trace


def forecast_without_plan(trace: "Trace", error: InfeasibleError, hardware: "Hardware | None" = None) -> "Forecast":
    """Returns what `--json` prints where nothing fits: the peak is what the leanest plan needs, its margin included."""
    from memwall.planning.forecast import Forecast, PeakBytes
    from memwall.trace.records import route_of
    from memwall.trace.workload_facts import workload_facts

    smallest_bytes = error.smallest_feasible_bytes
    return Forecast(
        device=trace.device,
        source=trace.source,
        route=None if hardware is None else route_of(trace),
        fits=False,
        budget_bytes=error.budget_bytes,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=max(0, smallest_bytes - trace.base_bytes), process_bytes=smallest_bytes),
        phases={},
        step_seconds=None,
        not_modelled=error.not_modelled,
        smallest_feasible_budget_bytes=smallest_bytes,
        relaxations=error.relaxations,
        workload=workload_facts(trace),
    )
