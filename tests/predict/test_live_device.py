"""Plans of runs on a CUDA device that is here: workspaces, gradients and segments as torch's own allocator has them."""

from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.errors import InfeasibleError
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.predict.cuda.live_cuda import (
    as_plain,
    cuda_device_here,
    held_here,
    with_library_workspaces,
    workspaces_here,
)
from memwall.predict.cuda_allocator.held_blocks import Held, Range, UsedBlock
from memwall.predict.cuda_allocator.step_peaks import reserved_peak_bytes
from memwall.predict.live_device import LiveDeviceModel, live_process
from memwall.predict.process import ProcessModel
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import TraceBuilder, record, run_recorded
from memwall.trace.workload import Workload

MIB = 1 << 20


def test_a_step_on_a_device_needs_the_segments_of_its_allocator(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    trace = recorded(workload_of(lambda: nn.Linear(512, 4096), lambda: torch.zeros(256, 512)), "h100-80gb")
    trace = msgspec.structs.replace(trace, base_bytes=500 * MIB, workspace_bytes=3 * MIB)
    process = live_process(trace)
    step = steady_step(trace)
    assert isinstance(process, LiveDeviceModel)
    needed, reserved = process.treated(step, 0).process_bytes, reserved_peak_bytes(step)
    assert reserved is not None
    assert needed == 503 * MIB + reserved > process.bare(step).process_bytes
    assert process.reserved_bytes(needed) == 3 * MIB + reserved
    assert process.fits_untouched(needed, budget_bytes=2 * needed, limit_bytes=needed)
    assert not process.fits_untouched(needed, budget_bytes=2 * needed, limit_bytes=needed - 1)


def test_an_allocator_that_is_full_gives_back_what_it_keeps(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """A step fits wherever the real allocator would find room: down to the least budget, and not a segment below."""
    layers = [nn.Linear(256, width) for width in (16384, 256, 8192)]
    blocks = (nn.Sequential(layer, nn.GELU(), nn.Linear(layer.out_features, 256)) for layer in layers)
    model = nn.Sequential(*blocks)
    trace = recorded(workload_of(lambda: model, lambda: torch.zeros(512, 256)), "h100-80gb")
    process, step = live_process(trace), steady_step(trace)
    plain, least = process.treated(step, 0).process_bytes, process.crowded(step, 0).process_bytes
    assert process.bare(step).process_bytes <= least < plain
    assert process.crowded(step, plain).process_bytes == plain
    for limit_bytes in (least, (least + plain) // 2):
        assert process.crowded(step, limit_bytes).process_bytes <= limit_bytes


def held(trace: Trace, *, beside_bytes: int) -> Held:
    """Returns a segment for each storage that stands before a step, with so many free bytes beside it."""
    ranges, blocks = [], []
    place = 1 << 30
    for size in (s.nbytes for s in steady_step(trace).storages if s.birth < 0):
        num_bytes = -(-(size + beside_bytes) // (2 * MIB)) * 2 * MIB
        common = {"address": place}
        ranges.append(Range(**common, num_bytes=num_bytes, stream=0, is_small=False, is_expandable=False))
        used = {"num_bytes": -(-size // 512) * 512, "requested_bytes": size, "stack": -1, "category": ""}
        blocks.append(UsedBlock(**common, **used, is_pending=False, is_exact=True))
        place += 2 * num_bytes
    return Held(ranges=tuple(ranges), blocks=tuple(blocks))


def test_what_the_recorded_step_left_in_pieces_is_where_later_ones_find_room(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    trace = recorded(workload_of(lambda: nn.Linear(512, 4096), lambda: torch.zeros(256, 512)), "h100-80gb")
    step = steady_step(trace)
    compact, torn = (live_process(trace, held(trace, beside_bytes=free)) for free in (0, 16 * MIB))
    needed_bytes = [process.untreated(step).process_bytes for process in (live_process(trace), compact, torn)]
    standing = [s for s in step.storages if s.birth < 0]
    least_bytes = len(standing) * 8 * MIB  # of 16 free ones beside each a step of small tensors takes a part
    assert needed_bytes[0] <= needed_bytes[1] < needed_bytes[2] - least_bytes // 2


def test_blocks_that_no_step_knows_of_stay_and_are_no_workspace(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    trace = recorded(workload_of(lambda: nn.Linear(512, 4096), lambda: torch.zeros(256, 512)), "h100-80gb")
    step, known = steady_step(trace), held(trace, beside_bytes=0)
    other = Range(address=1 << 40, num_bytes=64 * MIB, stream=0, is_small=False, is_expandable=False)
    block = msgspec.structs.replace(known.blocks[0], address=1 << 40, num_bytes=64 * MIB, requested_bytes=64 * MIB)
    more = Held(ranges=(*known.ranges, other), blocks=(*known.blocks, block))
    measured = msgspec.structs.replace(trace, workspace_bytes=65 * MIB)
    found = [live_process(of, what).untreated(step).process_bytes for of, what in ((trace, known), (measured, more))]
    assert found[1] - found[0] == 65 * MIB


class Growing(nn.Module):
    """Blocks each of which needs larger pieces than those before it have left."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Linear(1024, width), nn.Linear(width, 1024)) for width in range(2048, 8192, 1024)]
        self.blocks = nn.ModuleList(nn.Sequential(wide, nn.GELU(), narrow) for wide, narrow in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_the_smallest_budget_that_is_told_has_a_plan_with_its_margin(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """Also where that takes an allocator that is full: the told bytes count on it, and so does their plan."""
    trace = recorded(workload_of(Growing, lambda: torch.zeros(4096, 1024)), "h100-80gb")
    trace = msgspec.structs.replace(trace, base_bytes=500 * MIB)
    with pytest.raises(InfeasibleError) as refused:
        make_plan(trace, Settings(budget_bytes=1))
    told_bytes = refused.value.smallest_feasible_bytes
    found = make_plan(trace, Settings(budget_bytes=told_bytes)).forecast
    assert found.fits
    assert found.peak.process_bytes + found.margin_bytes <= told_bytes == found.smallest_feasible_budget_bytes


class Shrinking(nn.Module):
    """Blocks each of which needs smaller pieces than those before it have left."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Linear(512, width), nn.Linear(width, 512)) for width in (3072, 2048, 1536, 1024, 512)]
        self.blocks = nn.ModuleList(nn.Sequential(wide, nn.GELU(), narrow) for wide, narrow in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_no_plan_is_foreseen_above_its_budget(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """GIVEN budgets in which an allocator that is held to less would find room, and one that keeps more does not
    THEN there is no plan for these, or one that is foreseen within them, as there is for the budget that is told.
    """
    workload = workload_of(Shrinking, lambda: torch.zeros(4096, 512), optimizer=torch.optim.AdamW)
    trace = msgspec.structs.replace(recorded(workload, "h100-80gb"), base_bytes=32 * MIB)
    free_bytes = live_process(trace).untreated(steady_step(trace)).process_bytes
    foreseen: dict[int, int] = {}
    told: set[int] = set()
    for budget_bytes in (free_bytes * percent // 100 for percent in (59, 60, 61, 70)):
        try:
            foreseen[budget_bytes] = make_plan(trace, Settings(budget_bytes=budget_bytes)).forecast.peak.process_bytes
        except InfeasibleError as refused:
            told.add(refused.smallest_feasible_bytes)
    foreseen |= {least: make_plan(trace, Settings(budget_bytes=least)).forecast.peak.process_bytes for least in told}
    assert len(foreseen) >= 2
    assert [max(0, needed - budget) for budget, needed in foreseen.items()] == [0] * len(foreseen)


def test_a_step_on_a_cpu_has_a_heap(workload_of: Callable[..., Workload]) -> None:
    process = live_process(record(workload_of(lambda: nn.Linear(8, 8), lambda: torch.zeros(2, 8))))
    assert type(process) is ProcessModel


class Model(nn.Module):
    """Reuses a tensor, sums biases over many rows, and normalises in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.second(F.gelu(self.first(x)))


@pytest.mark.gpu
def test_a_recorded_step_is_forecast_as_torch_counts_the_next(workload_of: Callable[..., Workload]) -> None:
    """Allocated bytes within 0.1 %, segments to the byte: recorded on the device, then run without a recorder."""
    device = torch.device("cuda", 0)
    workload = workload_of(Model, lambda: torch.ones(16_384, 256), torch.bfloat16, torch.optim.AdamW)
    model, batch = workload.make_model().to(device), workload.make_batch().to(device)
    optimizer = workload.make_optimizer(model)
    builder = TraceBuilder([model], workspaces=workspaces_here(device))
    trace = run_recorded(builder, workload, model, optimizer, batch, num_steps=1)
    trace = as_plain(with_library_workspaces(trace, device))
    held = held_here(device)
    torch.cuda.empty_cache()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert isinstance(cuda_device_here(device), CudaDevice)
    process, reserved_bytes = live_process(trace, held), torch.cuda.max_memory_reserved()
    found_bytes = process.untreated(steady_step(trace)).process_bytes - trace.base_bytes - trace.workspace_bytes
    assert found_bytes == pytest.approx(reserved_bytes, abs=2 * MIB)
