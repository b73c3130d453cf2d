"""How the benchmarks train under memwall: the one place that knows its session."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


@contextmanager
def memwall_arm(model: nn.Module, optimizer: Optimizer, budget_bytes: int) -> Iterator[Callable[[], dict[str, object]]]:
    """Trains an ordinary loop under a plan for `budget_bytes` of process memory.

    Yields:
        A function that returns, after the last step, `predicted_peak_bytes` (process), `margin_bytes`, `bytes_moved`
        and `actions` (one text per action of the plan).
    """
    import memwall

    with memwall.fit(model, optimizer, budget=budget_bytes) as session:

        def facts() -> dict[str, object]:
            report = session.report
            return {
                "predicted_peak_bytes": report.forecast.process_bytes,
                "margin_bytes": report.forecast.margin_bytes,
                "bytes_moved": report.bytes_moved,
                "actions": [str(action) for action in report.plan.actions],
            }

        yield facts
