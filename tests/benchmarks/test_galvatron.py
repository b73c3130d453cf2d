"""Galvatron's published plan is what its own figures ask for, and the page says what was computed beside it."""

import json
from typing import Any

import galvatron
import pytest
from galvatron_table import LayerTable, TheirPlan, read_plan, read_table, reserved_mib

NUMBERS: dict[str, Any] = json.loads(galvatron.NUMBERS.read_text())
RESULT: dict[str, Any] = json.loads(galvatron.OUT.read_text())
LIMIT_MIB = galvatron.BUDGET_MIB - reserved_mib(galvatron.BUDGET_MIB)


@pytest.fixture
def theirs() -> TheirPlan:
    return read_plan(NUMBERS["plan"])


@pytest.fixture
def table(theirs: TheirPlan) -> LayerTable:
    return read_table(NUMBERS["memory"], NUMBERS["computation"], theirs, num_devices=8, length=2048)


def test_the_solver_checkpoints_as_many_layers_as_the_published_plan(table: LayerTable, theirs: TheirPlan) -> None:
    """GIVEN Galvatron's figures, constants and fifth for the allocator THEN 20 of 32, and 19 would not fit."""
    assert (sum(theirs.checkpointed), table.num_layers) == (20, 32)
    assert table.num_checkpointed(LIMIT_MIB) == 20
    assert table.needed_mib(20) <= LIMIT_MIB < table.needed_mib(19)


def test_less_that_is_left_is_fewer_layers_checkpointed(table: LayerTable) -> None:
    assert table.num_checkpointed(galvatron.BUDGET_MIB) == 13
    assert table.num_checkpointed(table.needed_mib(32)) == 32
    assert table.num_checkpointed(table.needed_mib(32) - 1) is None


def test_a_fifth_is_left_of_large_devices_alone() -> None:
    assert (reserved_mib(20 * 1024), reserved_mib(galvatron.BUDGET_MIB)) == (0, 7372)


@pytest.mark.parametrize(
    "changed",
    [{"pp_deg": 2}, {"chunks": 4}, {"embed_sdp": 0}, {"tp_sizes_enc": "2,1"}, {"dp_types_enc": "0,1"}],
)
def test_a_plan_that_divides_layers_otherwise_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ZeRO-3 alone in every layer"):
        read_plan(NUMBERS["plan"] | changed)


def test_bytes_are_told_as_tensors() -> None:
    wide, hidden = 2 * 2048 * 11008, 2 * 2048 * 4096
    assert galvatron.composition(6 * wide + 16 * hidden + 1000) == (6, 16)
    assert galvatron.composition(3 * hidden) == (0, 3)


def test_the_page_is_the_result(table: LayerTable) -> None:
    assert galvatron.section(RESULT) in galvatron.PAGE.read_text()
    first = RESULT["decisions"][0]
    assert (first["num_checkpointed"], first["needed_bytes"]) == (20, table.needed_mib(20) << 20)


def test_the_result_is_what_the_page_says_of_it() -> None:
    """GIVEN one budget and one forecast THEN memwall's plan fits with its margin, in less time than Galvatron's."""
    ours, published = RESULT["plans"]["memwall's"], RESULT["plans"]["Galvatron's"]
    assert ours["process_bytes"] + RESULT["margin_bytes"] <= RESULT["budget_bytes"]
    assert ours["process_bytes"] == pytest.approx(published["process_bytes"], rel=0.02)
    assert round(1 - ours["step_seconds"] / published["step_seconds"], 2) == 0.07
    assert [one["num_checkpointed"] for one in RESULT["decisions"]] == [20, 18, 13]


@pytest.mark.slow(seconds=15)
def test_a_layer_holds_what_the_result_says() -> None:
    for is_mixed, name in ((False, "memwall, bfloat16"), (True, "memwall, autocast")):
        said = RESULT["layer"][name]
        found = galvatron.layer_bytes(is_mixed=is_mixed)
        assert found == {"kept_bytes": said["kept_bytes"], "recomputed_bytes": said["recomputed_bytes"]}


@pytest.mark.slow(seconds=40)
def test_both_plans_are_foreseen_as_the_result_says(theirs: TheirPlan, table: LayerTable) -> None:
    found = galvatron.compare(table, theirs, NUMBERS["memory"])
    for name, said in RESULT["plans"].items():
        assert found["plans"][name] == pytest.approx(said, rel=0.02), name
    assert found["plans"]["memwall's"]["step_seconds"] < found["plans"]["Galvatron's"]["step_seconds"]
