"""Micro-batch times accumulation: which splits there are, what one runs, and when the search splits."""

from collections.abc import Callable

import msgspec
import pytest
from plans import LINK
from torch import Tensor, nn
from zoo import MODELS, Case

from memwall.errors import UsageError
from memwall.machine.tiers import Machine
from memwall.planning.block_problem import build_menus
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import Costs
from memwall.planning.search import plan
from memwall.planning.techniques.accumulate import Accumulate, candidate_micro_batches, with_micro_batch
from memwall.predict.curve import live_peak_bytes
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")
without_malloc = pytest.mark.usefixtures("without_malloc")


@without_malloc
def test_the_batch_is_split_only_if_the_loop_said_its_global_batch(
    a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]], without_disk: Callable[[Trace], Trace]
) -> None:
    trace = without_disk(a_trace("gpt"))
    (budget_bytes,) = budgets(trace, (0.0,))
    assert not any(isinstance(action, Accumulate) for action in plan(trace, budget=budget_bytes).actions)
    less = budget_bytes - 40 * MIB
    found = plan(trace, budget=less, global_batch=4)
    (split,) = [action for action in found.actions if isinstance(action, Accumulate)]
    assert split.micro_batch * split.num_micro_batches == 4
    assert split.exactness == "equivalent"
    assert found.actions[0] == split


@without_malloc
def test_another_global_batch_than_the_traces_is_an_error(a_trace: Callable[[str], Trace]) -> None:
    with pytest.raises(UsageError) as error:
        plan(a_trace("gpt"), budget="1TiB", global_batch=8)
    assert str(error.value) == (
        "the trace ran 4 samples per optimizer step, asked for is a global batch of 8; record a trace with that batch"
    )


@pytest.mark.slow
@without_malloc
def test_a_batch_with_batch_norm_is_never_split(
    a_trace: Callable[[str], Trace], smallest_bytes: Callable[..., int]
) -> None:
    trace = a_trace("resnet")
    assert smallest_bytes(trace, allow_accumulation=True) == smallest_bytes(trace)


def test_micro_batches_are_divisors_so_that_all_are_equal(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    assert candidate_micro_batches(trace) == (4, 2, 1)
    assert candidate_micro_batches(msgspec.structs.replace(trace, micro_batch=12)) == (12, 6, 4, 3, 2, 1)


@pytest.mark.slow
def test_half_the_batch_is_predicted_as_it_runs(magnified_trace: Callable[[Case], Trace]) -> None:
    """GIVEN a step of four samples WHEN it is halved THEN its peak is that of a recorded accumulation of two."""
    whole = MODELS["gpt"]("tiny")
    trace = magnified_trace(whole)

    def two_halves(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        whole.loss(model, {name: value[:2] for name, value in batch.items()}).backward()
        return whole.loss(model, {name: value[2:] for name, value in batch.items()})

    halved = magnified_trace(Case(whole.model, whole.batch, two_halves))
    assert halved.num_micro_batches == 2
    predicted = live_peak_bytes(with_micro_batch(trace, steady_step(trace), 2), "cpu")
    # The whole batch is held by the loop in both.
    assert predicted == pytest.approx(live_peak_bytes(steady_step(halved), "cpu"), rel=0.02)


@pytest.mark.slow
@without_malloc
def test_what_is_moved_in_parts_is_moved_as_often_as_there_are_parts(
    a_trace: Callable[[str], Trace], smallest_bytes: Callable[..., int], fast_disk: Machine
) -> None:
    """A step of four parts sends the same bytes to disk as an undivided one, a quarter at a time."""
    trace = a_trace("gpt")
    step = with_micro_batch(trace, steady_step(trace), 1)
    model = StepModel(step, trace.names, find_blocks(trace, step))
    prices = []
    for num_passes in (1, 4):
        costs = Costs(copy_seconds_per_byte=1e-9, min_bytes=MIB, link=LINK, num_passes=num_passes)
        menu = build_menus(trace, model, costs)[0]
        prices.append({option.name: option for option in menu.options})
    assert prices[1]["offload"].moved_bytes == prices[0]["offload"].moved_bytes
    assert prices[1]["offload"].extra_seconds == pytest.approx(4 * prices[0]["offload"].extra_seconds)
    # Recomputed are the same operations; only the checkpoints are four.
    recomputed = [price["full"].extra_seconds for price in prices]
    assert 0 < recomputed[1] - recomputed[0] < 0.25 * recomputed[0]

    # Of an optimizer that nobody knows: its state stays in memory.
    trace = msgspec.structs.replace(trace, machine=fast_disk, optimizer="Own")
    least = smallest_bytes(trace, allow_accumulation=True)
    found = plan(trace, budget=least + 64 * MIB, global_batch=4)
    (split,) = [action for action in found.actions if isinstance(action, Accumulate)]
    moved = found.forecast.moved_bytes_per_step
    assert moved > 0
    assert found.forecast.peak.disk_bytes == moved // split.num_micro_batches
