"""A rank holds and waits for as much under each kind of sharding as formulas say that others published."""

import dataclasses
from collections import Counter

import pytest
import torch
from msgspec.structs import replace
from sharded_runs import VOCABULARY, Model, TiedModel, loss_of, network_for, workload
from torch import nn

from memwall.predict.curve import step_seconds
from memwall.predict.sharding import zero
from memwall.predict.sharding.ddp import Ddp, fullest_part
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.kind import RankCost, Sharding
from memwall.predict.sharding.units import find_units
from memwall.predict.sharding.zero import DeepSpeedZero
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(workload())


def cost_of(kind: Sharding, trace: Trace, num_ranks: int, num_ranks_per_node: int = 8) -> RankCost:
    step = steady_step(trace)
    return kind.cost(trace, step, find_units(trace, step), network_for(num_ranks, num_ranks_per_node))


def standing_bytes(cost: RankCost) -> Counter[str]:
    found: Counter[str] = Counter()
    for storage in cost.step.storages:
        if storage.birth < 0:
            found[storage.category] += storage.nbytes
    return found


def parameter_bytes(trace: Trace) -> int:
    return sum(s.nbytes for s in steady_step(trace).storages if s.category == "parameter")


def test_units_are_blocks_and_what_is_as_large(trace: Trace) -> None:
    units = find_units(trace, steady_step(trace))
    assert [unit.path for unit in units] == ["", "embedding", *(f"blocks.{n}" for n in range(4)), "head"]
    assert [len(unit.parameters) for unit in units] == [2, 1, 6, 6, 6, 6, 1]
    assert [len(unit.gradients) for unit in units] == [2, 1, 6, 6, 6, 6, 1]


def test_a_tied_head_and_its_embedding_are_the_roots() -> None:
    """GIVEN a weight that two modules share THEN its gradient is the root's, and no gradient is nobody's."""
    step = steady_step(trace := record(workload(TiedModel)))
    units = find_units(trace, step)
    assert [unit.path for unit in units] == ["", *(f"blocks.{n}" for n in range(4))]
    made = [n for n, storage in enumerate(step.storages) if storage.category == "gradient" and storage.birth >= 0]
    assert sorted(index for unit in units for index in unit.gradients) == made


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_fsdp2_divides_parameters_and_state(trace: Trace, num_ranks: int) -> None:
    found, whole = standing_bytes(cost_of(Fsdp2(), trace, num_ranks)), parameter_bytes(trace)
    assert found["parameter"] == pytest.approx(whole / num_ranks, rel=1e-3)
    assert found["optimizer_state"] == pytest.approx(2 * whole / num_ranks, rel=1e-3)


def test_fsdp2_gathers_under_autocast_what_is_kept() -> None:
    """GIVEN autocast, which casts no norm THEN what a rank gathers is float32, and casts are one process's."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, tokens)

    trace = replace(record(dataclasses.replace(workload(), loss=loss)), autocast="bfloat16")
    step, unit = steady_step(trace), find_units(trace, steady_step(trace))[2]
    rank = cost_of(Fsdp2(), trace, 4).step
    copies = [number for number, storage in enumerate(step.storages) if storage.dtype == "bfloat16"]
    assert copies
    assert all(rank.storages[number] == step.storages[number] for number in copies)
    gathered = sum(step.storages[index].nbytes for index in unit.parameters)
    assert sum(each.nbytes == gathered for each in rank.storages[len(step.storages) :]) >= 2 * 4


def test_hsdp_divides_among_the_ranks_of_a_node(trace: Trace) -> None:
    hybrid, plain = (standing_bytes(cost_of(Fsdp2(is_hybrid=each), trace, 16, 4)) for each in (True, False))
    assert hybrid["parameter"] == pytest.approx(4 * plain["parameter"], rel=1e-2)


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_zero_holds_what_its_paper_says(trace: Trace, num_ranks: int) -> None:
    """GIVEN float32 THEN weights and gradients are 4 bytes an element, Adam and the master weights 12 (section 3.1).

    Gradients of stage 2, and the bucket of 1 and 2, are there in backward; small parameters of stage 3 are whole.
    """
    elements, small = parameter_bytes(trace) // 4, parameter_bytes(trace) // 4 - 2 * VOCABULARY * 64
    stages = ((1, 4, 0, 0, 0), (2, 4, 0, 0, 0), (3, 4 / num_ranks, 4 / num_ranks, 500_000 * 4, 4 * small))
    for stage, weights, gradients, buffers, persistent in stages:
        found = standing_bytes(cost_of(DeepSpeedZero(stage=stage), trace, num_ranks))  # type: ignore[arg-type]
        assert found["parameter"] == pytest.approx(elements * weights + persistent, rel=1e-3)
        assert found["gradient"] == pytest.approx(elements * gradients, rel=1e-3)
        assert found["optimizer_state"] == pytest.approx(elements * 12 / num_ranks, rel=1e-3)
        assert found["buffer"] == buffers


@pytest.mark.parametrize(("device", "num_buckets"), [("cpu", 1), ("cuda", 2)])
def test_zero_has_a_second_bucket_where_reductions_overlap(trace: Trace, device: str, num_buckets: int) -> None:
    step = cost_of(DeepSpeedZero(stage=1), replace(trace, device=device), 4).step
    (bucket,) = (storage for storage in step.storages if storage.category == "buffer")
    assert bucket.nbytes == num_buckets * 500_000 * 4
    assert {op.phase for op in step.ops[bucket.birth : bucket.death]} == {"backward"}


def test_stage_2_keeps_the_gradients_that_are_made_first_until_the_step(trace: Trace) -> None:
    """GIVEN four ranks THEN one holds no more than a quarter of them, which is there before backward ends."""
    step = cost_of(DeepSpeedZero(stage=2), trace, 4).step
    kept = [storage for storage in step.storages if storage.category == "gradient" and storage.nbytes]
    assert sum(storage.nbytes for storage in kept) == pytest.approx(parameter_bytes(trace) / 4, rel=1e-3)
    assert {step.ops[storage.birth].phase for storage in kept} == {"backward"}
    last = max(number for number, op in enumerate(step.ops) if op.phase == "optimizer")
    assert all(storage.death > last for storage in kept)


@pytest.mark.parametrize("is_near", [True, False])
def test_stage_3_keeps_what_is_used_again_soon_between_its_uses(
    trace: Trace, is_near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an embedding and a head that do not persist THEN both are whole in the loss if few elements lie between."""
    if not is_near:
        monkeypatch.setattr(zero, "_REUSE_ELEMENTS", 1)
    step = cost_of(DeepSpeedZero(stage=3), trace, 4).step
    loss = next(number for number, op in enumerate(step.ops) if op.phase == "loss")
    whole = [s for s in step.storages if s.nbytes == 4 * VOCABULARY * 64 and s.birth <= loss < s.death]
    assert len([s for s in whole if s.category == "parameter"]) == (2 if is_near else 0)


def test_offloading_leaves_nothing_on_the_device(trace: Trace) -> None:
    whole = parameter_bytes(trace)
    on_host = cost_of(Fsdp2(is_offloaded=True), trace, 4)
    assert standing_bytes(on_host)["parameter"] == 0
    assert on_host.host_bytes == pytest.approx(whole, rel=1e-3)  # a quarter of weights, gradients and two moments
    state = cost_of(DeepSpeedZero(stage=3, offloads_state=True), trace, 4)
    assert standing_bytes(state)["optimizer_state"] == 0
    small = whole - 2 * 4 * VOCABULARY * 64
    assert standing_bytes(state)["parameter"] == pytest.approx(whole / 4 + small, rel=1e-3)


def test_buckets_of_ddp_stand_beside_gradients_which_may_be_views_of_them(trace: Trace) -> None:
    apart, views, divided = (
        standing_bytes(cost_of(kind, trace, 4))
        for kind in (Ddp(), Ddp(are_views=True), Ddp(are_views=True, divides_state=True))
    )
    assert apart["buffer"] == views["buffer"] == parameter_bytes(trace)
    for kind, of_their_own in ((Ddp(), parameter_bytes(trace)), (Ddp(are_views=True), 0)):
        storages = cost_of(kind, trace, 4).step.storages
        assert sum(storage.nbytes for storage in storages if storage.category == "gradient") == of_their_own
    assert divided["optimizer_state"] == pytest.approx(views["optimizer_state"] / 4, rel=1e-2)


def test_compressed_buckets_have_copies_of_half_the_bytes_until_backward_ends(trace: Trace) -> None:
    """GIVEN gradients that are averaged in bfloat16 THEN half as many bytes go over links, and stand beside them."""
    views, compressed = (
        cost_of(Ddp(are_views=True, is_compressed=is_compressed), trace, 4) for is_compressed in (False, True)
    )
    copies = compressed.step.storages[len(views.step.storages) :]
    assert sum(copy.nbytes for copy in copies) == parameter_bytes(trace) // 2
    assert {compressed.step.ops[copy.death - 1].phase for copy in copies} == {"backward"}
    assert compressed.communication_seconds == pytest.approx(views.communication_seconds / 2, abs=1e-4)
    assert compressed.exposed_seconds < views.exposed_seconds


def test_gradients_of_16_bits_are_not_compressed() -> None:
    half = record(dataclasses.replace(workload(), model=lambda: Model().bfloat16()))
    views, compressed = (
        cost_of(Ddp(are_views=True, is_compressed=is_compressed), half, 4) for is_compressed in (False, True)
    )
    assert compressed == views


def test_the_optimizer_of_zero_redundancy_divides_no_parameter(trace: Trace) -> None:
    """GIVEN GPT-2, whose embedding is more than an eighth, THEN a rank has it whole; here the head, and the steps."""
    block = (2304, 768 * 2304, 768, 768 * 768, 3072, 768 * 3072, 768, 3072 * 768, *(768,) * 4)
    assert fullest_part((50257 * 768, 1024 * 768, *(12 * block), 768, 768), 8) == 50257 * 768
    found = standing_bytes(cost_of(Ddp(are_views=True, divides_state=True), trace, 16))
    assert found["optimizer_state"] == pytest.approx(2 * 4 * VOCABULARY * 64, rel=1e-3)


def test_communication_is_that_of_the_paper_of_zero(trace: Trace) -> None:
    """GIVEN stages 1 and 2 THEN they move as much as DDP's all-reduce; stage 3 half as much again (section 7)."""
    whole, share = parameter_bytes(trace), 3 / 4
    latency_free = 1e-3  # seconds of starts, which do not grow with bytes
    once = whole * share / 100e9
    for kind, times in (
        (Ddp(), 2),
        (DeepSpeedZero(stage=1), 2),
        (DeepSpeedZero(stage=2), 2),
        (DeepSpeedZero(stage=3), 3),
        (Fsdp2(), 3),
    ):
        assert cost_of(kind, trace, 4).communication_seconds == pytest.approx(times * once, abs=latency_free)


def test_what_is_not_hidden_is_no_more_than_all_of_it(trace: Trace) -> None:
    for kind in (Ddp(), DeepSpeedZero(stage=3), Fsdp2(), Fsdp2(reshard="no"), Fsdp2(is_hybrid=True)):
        cost = cost_of(kind, trace, 16)
        assert 0 < cost.exposed_seconds <= cost.communication_seconds
        assert step_seconds(cost.step) <= step_seconds(steady_step(trace))
