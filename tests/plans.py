"""Plans made by hand, for the tests of what applies them."""

from torch import nn

from memwall.plan.actions import Action
from memwall.plan.forecast import Forecast, PeakBytes
from memwall.plan.planfile import Plan
from memwall.trace.modules import fingerprint


def plan_of(model: nn.Module, *actions: Action, micro_batch: int = 1) -> Plan:
    """A plan file's record around actions chosen by hand."""
    forecast = Forecast(
        device="cpu",
        source="recorded",
        fits=True,
        budget_bytes=1 << 40,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=1, process_bytes=1),
        phases={},
        step_seconds=None,
        not_modelled=(),
        actions=actions,
    )
    return Plan(
        model_fingerprint=fingerprint([model]),
        trace_hash="",
        micro_batch=micro_batch,
        num_micro_batches=1,
        forecast=forecast,
    )
