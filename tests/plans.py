"""Plans made by hand, for the tests of what applies them."""

import runpy
from pathlib import Path

import msgspec
from torch import nn

from memwall.machine.tiers import Tier
from memwall.planning.action import Action
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.solver.instance import Link
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.trace.modules import fingerprint
from memwall.trace.records import Trace

LINK = Link(write_bytes_per_second=1e9, read_bytes_per_second=1e9, window_bytes=0, capacity_bytes=1 << 40)
"""A way to the next tier with no memory for what is under way: whatever moves is waited for."""


def a_plan(
    *actions: Action,
    micro_batch: int = 8,
    num_micro_batches: int = 1,
    device: str = "cpu",
    model_fingerprint: str = "ab" * 32,
    process_bytes: int = 4 << 30,
) -> Plan:
    """A plan file's record around actions chosen by hand."""
    forecast = Forecast(
        device=device,
        source="recorded",
        fits=True,
        budget_bytes=1 << 40,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=process_bytes, process_bytes=process_bytes),
        phases={},
        step_seconds=None,
        not_modelled=(),
        actions=actions,
    )
    return Plan(
        model_fingerprint=model_fingerprint,
        trace_hash="cd" * 32,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        forecast=forecast,
    )


def plan_of(model: nn.Module, *actions: Action, micro_batch: int = 1) -> Plan:
    """A plan that this model takes, and whose forecast nothing is below."""
    return a_plan(*actions, micro_batch=micro_batch, model_fingerprint=fingerprint([model]), process_bytes=1)


RESUMABLE = Path(__file__).parent / "scripts" / "train_resumable.py"
"""A script that can begin in the middle."""


def resumable_model() -> nn.Module:
    """The model of that script."""
    model: nn.Module = runpy.run_path(str(RESUMABLE))["Net"](64, 0)
    return model


def resumable_on_disk() -> Plan:
    """A plan for that script that has its parameters, gradients and optimizer state on disk."""
    return plan_of(
        resumable_model(),
        ParameterPlacement(tier="disk", blocks=(), window_bytes=16384, min_bytes=4096, written_bytes=0),
        OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=32768, min_bytes=4096),
        micro_batch=32,
    )


def on_machine(trace: Trace, **facts: object) -> Trace:
    """Returns the trace as if recorded on another machine: facts are of its next tier, or of the machine itself."""
    of_tier = {name: facts.pop(name) for name in Tier.__struct_fields__ if name in facts}
    tiers = tuple(msgspec.structs.replace(tier, **of_tier) for tier in trace.machine.tiers)
    return msgspec.structs.replace(trace, machine=msgspec.structs.replace(trace.machine, **({"tiers": tiers} | facts)))
