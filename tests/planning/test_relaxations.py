"""What would make a run on a device fit: every figure is that of the run which takes the advice."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.errors import InfeasibleError
from memwall.machine.hardware import hardware_named
from memwall.planning.estimate import estimate
from memwall.planning.one_recording.relaxations import Run, estimate_relaxations
from memwall.planning.recordings import Recordings
from memwall.planning.search import plan
from memwall.planning.techniques.autocast import Autocast
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.trace.records import Trace
from memwall.trace.workload import Workload
from memwall.units import format_bytes

pytestmark = pytest.mark.slow

A100 = hardware_named("a100-80gb")
PROFILE, _ = profile_for("2.13.0")
HOST_BYTES = 64 << 30


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2048, 8192, dtype=dtype), nn.Linear(8192, 2048, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(nn.functional.gelu(self.up(inputs)))
        return inputs + outputs


def traced(
    *,
    rows: int,
    samples: int = 8,
    fused: bool | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    host_bytes: int = 0,
) -> Trace:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            result: torch.Tensor = model(batch).float().sum()
        return result

    workload = Workload(
        model=lambda: nn.Sequential(*(Block(dtype) for _ in range(6))),
        batch=lambda: torch.ones(samples, rows, 2048, dtype=dtype),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=fused),
    )
    recording = recording_for(A100)
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(trace, A100, autocast=recording.autocast, host_bytes=host_bytes)


def in_precision(lower: Trace) -> Recordings:
    """Returns the same step under autocast, which was recorded already."""
    return Recordings(frozenset({"precision"}), lambda _: (lower, None))


def smallest(trace: Trace, **options: Any) -> int:
    found = plan(trace, budget=A100.usable_bytes, hardware=A100, **options).forecast.smallest_feasible_budget_bytes
    assert found is not None
    return found


def refused(trace: Trace, **options: Any) -> tuple[str, ...]:
    with pytest.raises(InfeasibleError) as error:
        plan(trace, budget=A100.context_bytes[0], hardware=A100, **options)
    return error.value.relaxations


def figures_of(before_bytes: int, after_bytes: int) -> str:
    """What is needed then is rounded up, what that frees is rounded down."""
    freed_bytes = before_bytes - after_bytes
    return f"{format_bytes(after_bytes, rounding='up')}, {format_bytes(freed_bytes, rounding='down')} less"


def test_each_way_out_of_a_plan_has_the_figure_of_the_run_that_takes_it() -> None:
    """GIVEN nothing fits THEN the lines add up, cheapest first, and each figure is that of a run recorded so."""
    trace = traced(rows=2560)
    needed = [
        smallest(trace),
        smallest(trace, global_batch=8),
        smallest(traced(rows=2560, fused=True), global_batch=8),
        smallest(traced(rows=2560, fused=True, host_bytes=HOST_BYTES), global_batch=8),
    ]
    figures = [
        f"{format_bytes(after, rounding='up')}, {format_bytes(before - after, rounding='down')} less"
        for before, after in pairwise(needed)
    ]
    # The optimizer holds the peak only once the batch is split: its line comes after that.
    assert refused(trace) == (
        f"smaller micro-batches that accumulate: --global-batch 8: {figures[0]}",
        f"and fused=True in torch.optim.AdamW: {figures[1]}",
        f"and host memory for saved tensors and optimizer state: --host SIZE: {figures[2]}",
        "a shorter sequence, or a lower resolution",
    )


def test_autocast_is_offered_with_the_figure_of_the_run_that_takes_it() -> None:
    """GIVEN one long sample, whose activations hold the peak."""
    trace, lower = (
        traced(rows=1 << 15, samples=1, fused=True, host_bytes=HOST_BYTES, autocast=dtype)
        for dtype in (None, torch.bfloat16)
    )
    figure = figures_of(smallest(trace), smallest(lower))
    assert refused(trace, recordings=in_precision(lower))[0] == (
        f"bfloat16 autocast, which changes numerics: --allow precision: {figure}"
    )


def test_host_memory_is_offered_with_what_it_frees_unless_it_was_given() -> None:
    """GIVEN a sequence so long that what recomputation keeps between blocks holds the peak."""
    trace, with_host = (traced(rows=1 << 15, samples=1, host_bytes=num_bytes) for num_bytes in (0, HOST_BYTES))
    before, after = smallest(trace), smallest(with_host)
    assert refused(trace)[0] == (
        f"host memory for saved tensors and optimizer state: --host SIZE: {format_bytes(after, rounding='up')}, "
        f"{format_bytes(before - after, rounding='down')} less"
    )
    assert not any("--host" in line for line in refused(with_host))


def test_what_was_given_already_or_frees_nothing_is_not_offered() -> None:
    half = traced(rows=64, fused=True, dtype=torch.bfloat16, host_bytes=HOST_BYTES)
    assert refused(half, global_batch=8, recordings=in_precision(half)) == (
        "a shorter sequence, or a lower resolution",
    )
    # Nothing can record a trace from a file again.
    assert not any("precision" in line for line in refused(traced(rows=2048)))


def test_a_plan_that_leaves_no_room_for_its_margin_says_what_would() -> None:
    trace = traced(rows=2560)
    budget = smallest(trace, global_batch=8)
    found = plan(trace, budget=budget, hardware=A100).forecast
    assert not found.fits
    (line, rest) = found.relaxations
    assert line.startswith("smaller micro-batches that accumulate: --global-batch 8: ")
    assert line.endswith(" less, which fits")
    assert rest == "a shorter sequence, or a lower resolution"


def test_precision_that_is_allowed_is_recorded_and_planned() -> None:
    """GIVEN no plan fits in float32 WHEN precision is allowed THEN the step under autocast is planned, and says so."""
    trace, lower = traced(rows=2048), traced(rows=2048, autocast=torch.bfloat16)
    budget = smallest(lower)
    plain = plan(trace, budget=budget, hardware=A100, recordings=in_precision(lower))
    assert not plain.forecast.fits
    found = plan(trace, budget=budget, hardware=A100, allow=("precision",), recordings=in_precision(lower))
    assert found.forecast.fits
    assert found.actions[0] == Autocast(dtype="bfloat16")


# -- estimates ---------------------------------------------------------------------------------------------------------


SETTINGS = AllocatorSettings(expandable_segments=True)


def reserved(run: Run) -> int:
    peaks = step_peaks(run.trace.steps, PROFILE, settings=run.settings)
    assert peaks is not None
    return max(peak.reserved_bytes for peak in peaks)


def lines_of(trace: Trace, *, budget_bytes: int = 0) -> tuple[str, ...]:
    return estimate_relaxations(
        Run(trace=trace, num_micro_batches=1),
        ("SETTINGS", SETTINGS),
        bytes_of=reserved,
        fits=lambda needed: needed <= budget_bytes,
    )


def test_each_way_out_of_an_estimate_has_the_figure_of_the_run_that_takes_it() -> None:
    """GIVEN foreach temporaries hold the peak THEN the fused optimizer is named, on top of the allocator's settings."""
    trace, fused = traced(rows=64), traced(rows=64, fused=True)
    needed = [
        reserved(Run(trace=trace, num_micro_batches=1)),
        reserved(Run(trace=trace, num_micro_batches=1, settings=SETTINGS)),
        reserved(Run(trace=fused, num_micro_batches=1, settings=SETTINGS)),
    ]
    figures = [
        f"{format_bytes(after, rounding='up')}, {format_bytes(before - after, rounding='down')} less"
        for before, after in pairwise(needed)
    ]
    assert lines_of(trace)[:2] == (
        f"set SETTINGS: {figures[0]}",
        f"and fused=True in torch.optim.AdamW: {figures[1]}",
    )
    assert lines_of(trace, budget_bytes=needed[1]) == (f"set SETTINGS: {figures[0]}, which fits",)
    assert lines_of(trace, budget_bytes=needed[0]) == ()


def test_a_batch_is_split_as_far_as_it_must() -> None:
    """GIVEN activations hold the peak THEN the largest micro-batch that fits is named."""
    trace = traced(rows=2048)
    whole = reserved(Run(trace=trace, num_micro_batches=1))
    (line,) = lines_of(trace, budget_bytes=whole - 1)
    assert line.startswith("a micro-batch of 4 and 2 accumulation steps, the same global batch: ")
    assert line.endswith(", which fits")
    assert lines_of(trace)[0].startswith("a micro-batch of 1 and 8 accumulation steps, the same global batch: ")


def test_an_estimate_that_does_not_fit_names_the_fused_optimizer_and_the_planner() -> None:
    found = estimate(traced(rows=64), A100, budget_bytes=0)
    assert any("fused=True in torch.optim.AdamW: " in line for line in found.relaxations)
    assert found.relaxations[-1] == "recompute or offload: memwall plan SPEC --device NAME --budget SIZE"
    assert estimate(traced(rows=64), A100).relaxations == ()
