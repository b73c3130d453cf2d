"""The table of forecasts against the phantom device's allocator: what it says of failures, and where it is shown."""

import json

import phantom_truth
import pytest

PAGE = phantom_truth.OUTPUT.parents[3] / "docs" / "measured.md"


def test_a_card_on_which_every_case_fails_has_a_table_that_says_so() -> None:
    found = phantom_truth.table([{"device": "l4", "case": "gpt2/float32/sgd", "failure": "RuntimeError: no"}])
    assert found["missed"] == ["every case failed"]
    assert found["failed"] == {"gpt2/float32/sgd": "RuntimeError: no"}


def test_a_row_beyond_its_goal_is_missed_and_explained() -> None:
    counted = {"allocated_bytes": 1000, "reserved_bytes": 2000}
    row = {"device": "l4", "case": "one", "counted": dict.fromkeys(("first", "steady"), counted)}
    row["foreseen"] = {"first": counted, "steady": {"allocated_bytes": 1020, "reserved_bytes": 2000}}
    found = phantom_truth.table([row])
    assert found["missed"] == ["steady allocated_bytes median", "steady allocated_bytes worst"]
    assert found["deviating"] == {"one": {"steady allocated_bytes": [pytest.approx(0.02), ""]}}


def test_families_that_are_not_modelled_are_counted_and_stand_apart_as_well() -> None:
    counted = {"allocated_bytes": 1000, "reserved_bytes": 2000}
    same = dict.fromkeys(("first", "steady"), counted)
    high = {step: {"allocated_bytes": 1500, "reserved_bytes": 2000} for step in same}
    rows = [
        {"device": "l4", "case": "gpt2/float32/sgd", "counted": same, "foreseen": same},
        {"device": "l4", "case": "recurrent/float32/sgd", "counted": same, "foreseen": high},
    ]
    tables = phantom_truth.result_of(rows)["tables"]
    assert {name: figures["num_rows"] for name, figures in tables.items()} == {"l4": 2, "l4, without recurrent": 1}
    assert tables["l4"]["first allocated_bytes"]["worst"] == pytest.approx(0.5)
    assert tables["l4, without recurrent"]["missed"] == []


def test_the_published_table_is_the_result_file() -> None:
    tables = json.loads(phantom_truth.OUTPUT.read_text())["tables"]
    for device, figures in tables.items():
        assert phantom_truth.line(device, figures) in PAGE.read_text()
