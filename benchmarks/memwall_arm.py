"""How the benchmarks train under memwall: the one place that knows its session and its heap."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


@contextmanager
def memwall_arm(
    model: nn.Module, optimizer: Optimizer, budget_bytes: int, disk: str | None = None
) -> Iterator[Callable[[], dict[str, object]]]:
    """Trains an ordinary loop under a plan for `budget_bytes` of process memory.

    Args:
        disk: directory for what leaves memory; None for the temporary one.

    Yields:
        A function that returns, after the last step, `predicted_peak_bytes` (process, steps under the plan),
        `margin_bytes`, `bytes_moved`, `actions` (one text per action of the plan), and the peaks memwall measured:
        `overall_peak_bytes` of the whole run, `planned_peak_bytes` of the steps under the plan.
    """
    import memwall
    from memwall.observe.measure import run_report

    with memwall.fit(model, optimizer, budget=budget_bytes, disk=disk) as session:

        def facts() -> dict[str, object]:
            report = run_report(session)
            return {
                "predicted_peak_bytes": report.forecast.phases["steady_step"].process_bytes,
                "predicted_step_seconds": report.forecast.step_seconds,
                "margin_bytes": report.forecast.margin_bytes,
                "bytes_moved": report.forecast.moved_bytes_per_step,
                "smallest_feasible_bytes": report.forecast.smallest_feasible_budget_bytes,
                "plan_seconds": report.measured.plan_seconds,
                "num_replans": session.measured.num_replans,
                "overall_peak_bytes": report.measured.peak.process_bytes,
                "planned_peak_bytes": report.measured.steady_peak_bytes,
                "actions": [str(action) for action in report.forecast.actions],
            }

        yield facts


@contextmanager
def tensor_heap() -> Iterator[None]:
    """Gives tensors memwall's heap, and nothing else of memwall."""
    from memwall.apply.memory.allocator import AllocatorHandler

    handler = AllocatorHandler()
    handler.apply("tensor-heap")
    try:
        yield
    finally:
        handler.undo()
