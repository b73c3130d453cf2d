"""A step with parameters and gradients on disk: what of them is in memory when, to the byte."""

from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from memwall.planning.blocks import find_blocks
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_curve
from memwall.predict.parameters_on_disk import (
    Away,
    away_from,
    last_gradient_uses,
    paged_bytes,
    streamed_blocks,
    with_parameters_on_disk,
)
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

KIB = 1 << 10
WIDTH, NUM_BLOCKS = 64, 6
MATRIX_BYTES = WIDTH * WIDTH * 4
BLOCK_BYTES = 2 * MATRIX_BYTES
WINDOW_BYTES = KIB  # less than any parameter: one at a time
pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Model(nn.Module):
    """Blocks, a matrix that the loop's module uses itself, and one that only the root has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) @ self.scale
        return out


@cache
def trace(num_micro_batches: int = 1) -> Trace:
    workload = Workload(
        model=Model,
        batch=lambda: torch.ones(4, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )
    return record(workload, num_micro_batches=num_micro_batches)


@cache
def step_and_away(num_micro_batches: int = 1) -> tuple[Step, Away]:
    recorded = trace(num_micro_batches)
    step = steady_step(recorded)
    return step, away_from(step, recorded.modules, streamed_blocks(recorded.modules), KIB)


def streamed(num_micro_batches: int = 1, window_bytes: int = WINDOW_BYTES) -> Step:
    step, away = step_and_away(num_micro_batches)
    return with_parameters_on_disk(step, trace(num_micro_batches).modules, away, window_bytes=window_bytes)


def parameters_at(step: Step) -> list[int]:
    """Bytes of parameters that are in memory, by operation."""
    parameters = [s for s in step.storages if s.category == "parameter" and s.nbytes >= KIB]
    return [int(value) for value in live_curve(parameters, len(step.ops))]


def test_blocks_are_what_stands_side_by_side_in_a_list() -> None:
    assert streamed_blocks(trace().modules) == tuple(f"blocks.{number}" for number in range(NUM_BLOCKS))


def test_matrices_of_modules_leave_and_the_roots_own_stays() -> None:
    step, away = step_and_away()
    assert away.parameter_bytes == away.gradient_bytes == NUM_BLOCKS * BLOCK_BYTES + MATRIX_BYTES
    names = {trace().modules[unit].path for units in away.users.values() for unit in units}
    assert names == {*streamed_blocks(trace().modules), "head"}
    assert len([s for s in step.storages if s.category == "gradient" and s.nbytes >= KIB]) == len(away.gradients) + 1


def test_in_forward_a_block_and_the_one_after_it_are_in_memory() -> None:
    step = streamed()
    present = parameters_at(step)
    calls = [call for call in step.calls if trace().modules[call.module].path.startswith("blocks.")]
    blocks = [call for call in calls if not trace().modules[call.module].is_leaf]
    assert len(blocks) == NUM_BLOCKS
    for call in blocks[:-1]:
        assert set(present[call.start : call.end]) == {2 * BLOCK_BYTES + MATRIX_BYTES}
    assert set(present[blocks[-1].start : blocks[-1].end]) == {BLOCK_BYTES + 2 * MATRIX_BYTES}


def test_in_backward_a_block_and_the_one_before_it_are_in_memory_beside_gradients_on_their_way() -> None:
    step = streamed()
    present = parameters_at(step)
    on_their_way_bytes = 2 * MATRIX_BYTES
    calls = {trace().modules[call.module].path: call for call in step.calls}
    for number in range(1, NUM_BLOCKS):
        call, before = calls[f"blocks.{number}"], calls[f"blocks.{number - 1}"]
        between = set(present[call.backward_start : before.backward_start])
        assert between == {2 * BLOCK_BYTES + MATRIX_BYTES + on_their_way_bytes}
    for gradient in (s for s in step.storages if s.category == "gradient" and s.nbytes >= KIB):
        assert gradient.birth >= 0
    live = live_curve([s for s in step.storages if s.category == "gradient"], len(step.ops))
    assert live.max() <= 3 * MATRIX_BYTES + 8 * KIB  # the root's own, one that was just made, and biases


def test_in_the_optimizer_three_windows_of_parameters_are_in_memory_two_of_them_with_gradients() -> None:
    step = streamed()
    present = parameters_at(step)
    in_optimizer = {present[number] for number, op in enumerate(step.ops) if op.phase == "optimizer"}
    assert in_optimizer == {MATRIX_BYTES + 5 * MATRIX_BYTES}
    wide = parameters_at(streamed(window_bytes=2 * MATRIX_BYTES))
    assert wide[-1] == MATRIX_BYTES
    assert max(wide[number] for number, op in enumerate(step.ops) if op.phase == "optimizer") == 11 * MATRIX_BYTES


def test_what_passes_through_maps_of_its_own_is_the_most_of_these() -> None:
    step, away = step_and_away()
    of_the_root = MATRIX_BYTES
    found = paged_bytes(step, trace().modules, away, window_bytes=WINDOW_BYTES)
    assert found == max(parameters_at(streamed())) - of_the_root


def test_parameters_that_stay_do_not_pass() -> None:
    """Who gives a heap what these maps leave of a budget counts what is there all the time as there already."""
    step, _ = step_and_away()
    modules = trace().modules
    staying = away_from(step, modules, streamed_blocks(modules), KIB, staying=(*streamed_blocks(modules), "head"))
    assert paged_bytes(step, modules, staying, window_bytes=WINDOW_BYTES) == 3 * MATRIX_BYTES


def test_parameters_that_stay_are_in_memory_throughout_and_their_gradients_leave() -> None:
    step, leanest = step_and_away()
    modules = trace().modules
    blocks = streamed_blocks(modules)
    staying = away_from(step, modules, blocks, KIB, staying=(*blocks, "head"))
    assert (staying.users, staying.gradients) == (leanest.users, leanest.gradients)
    assert (staying.parameter_bytes, staying.gradient_bytes) == (0, leanest.gradient_bytes)
    present = parameters_at(with_parameters_on_disk(step, modules, staying, window_bytes=WINDOW_BYTES))
    all_bytes = NUM_BLOCKS * BLOCK_BYTES + 2 * MATRIX_BYTES
    # In backward one gradient is copied while another waits; a step has a window of gradients, and the next one, while
    # backward's last one may still wait.
    for phase, on_their_way_bytes in (("forward", 0), ("backward", 2 * MATRIX_BYTES), ("optimizer", 3 * MATRIX_BYTES)):
        found = {present[number] for number, op in enumerate(step.ops) if op.phase == phase}
        assert found == {all_bytes + on_their_way_bytes}

    half = away_from(step, modules, blocks, KIB, staying=blocks[:2])
    assert half.parameter_bytes == leanest.parameter_bytes - 2 * BLOCK_BYTES
    peaks = [
        max(parameters_at(with_parameters_on_disk(step, modules, away, window_bytes=WINDOW_BYTES)))
        for away in (leanest, half, staying)
    ]
    assert peaks == sorted(peaks)


def test_a_device_has_a_block_for_each_parameter_and_each_copy_of_a_gradient() -> None:
    """GIVEN an allocator that finds room for each tensor by itself WHEN parameters are below it THEN no block stands
    for several: of gradients' copies there is one from where each is made, as long as it waits."""
    step, away = step_and_away()
    there = tuple(msgspec.structs.replace(storage, device="cuda") for storage in step.storages)
    on_device = msgspec.structs.replace(step, storages=there)
    found = with_parameters_on_disk(on_device, trace().modules, away, window_bytes=WINDOW_BYTES)
    passing = found.storages[len(step.storages) :]
    assert {storage.nbytes for storage in passing} == {MATRIX_BYTES}
    in_backward = [number for number, op in enumerate(step.ops) if op.phase == "backward"]
    accumulated = set(last_gradient_uses(step, away.gradients).values())
    copies = [s for s in passing if s.phase == "backward" and s.birth in accumulated]
    assert len(copies) >= len(away.gradients)
    assert all(one.death - one.birth < len(in_backward) / 2 for one in copies)
    beside = live_curve(passing, len(step.ops))[in_backward] - 2 * BLOCK_BYTES
    assert beside.min() <= 0 < beside.max() <= 2 * MATRIX_BYTES
    present, below_a_cpu = parameters_at(found), parameters_at(streamed())
    assert (present[0], present[-1]) == (below_a_cpu[0], below_a_cpu[-1])
    in_optimizer = {present[number] for number, op in enumerate(step.ops) if op.phase == "optimizer"}
    assert in_optimizer == {MATRIX_BYTES + 5 * MATRIX_BYTES}

    stay = away_from(step, trace().modules, streamed_blocks(trace().modules), KIB, staying=("blocks.0",))
    standing = with_parameters_on_disk(on_device, trace().modules, stay, window_bytes=WINDOW_BYTES)
    assert [s.birth for s in standing.storages[len(step.storages) :]].count(-1) == 2


def test_a_backward_that_adds_to_gradients_has_those_of_two_blocks_in_memory_too() -> None:
    step = streamed(2)
    present = parameters_at(step)
    on_their_way_bytes = 2 * MATRIX_BYTES
    calls = [c for c in step.calls if trace(2).modules[c.module].path in ("blocks.2", "blocks.3")]
    assert len(calls) == 4  # two passes
    # What one backward has left to be written may be there in the next forward.
    for (before, call), waiting_bytes in zip((calls[:2], calls[2:]), (0, on_their_way_bytes), strict=True):
        between = set(present[call.backward_start : before.backward_start])
        assert between == {4 * BLOCK_BYTES + MATRIX_BYTES + on_their_way_bytes}
        assert set(present[call.start : call.end]) == {2 * BLOCK_BYTES + MATRIX_BYTES + waiting_bytes}


def test_a_block_that_is_recomputed_has_its_parameters_once() -> None:
    recorded = trace()
    step, away = step_and_away()
    under = with_parameters_on_disk(step, recorded.modules, away, window_bytes=WINDOW_BYTES)
    model = StepModel(under, recorded.names, find_blocks(recorded, under))
    treated = model.treated({block.path: Treatment(recompute=True) for block in model.blocks})
    assert len(treated.ops) > len(under.ops)
    assert max(parameters_at(treated)) == max(parameters_at(under))
