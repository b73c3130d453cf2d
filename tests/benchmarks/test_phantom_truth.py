"""The table of forecasts against the phantom device's allocator: what it says of failures, and where it is shown."""

import json

import phantom_truth
import pytest
from phantom_forecast import PHASES

PAGE = phantom_truth.OUTPUT.parents[3] / "docs" / "measured.md"


def test_a_card_on_which_every_case_fails_has_a_table_that_says_so() -> None:
    found = phantom_truth.table([{"device": "l4", "case": "gpt2/float32/sgd", "failure": "RuntimeError: no"}])
    assert found["missed"] == ["every case failed"]
    assert found["failed"] == {"gpt2/float32/sgd": "RuntimeError: no"}


def test_a_row_beyond_its_goal_is_missed_and_explained() -> None:
    counted = {"allocated_bytes": 1000, "reserved_bytes": 2000}
    row = {"device": "l4", "case": "one", "counted": dict.fromkeys(PHASES, counted)}
    row["foreseen"] = dict.fromkeys(PHASES, counted) | {"steady": {"allocated_bytes": 1020, "reserved_bytes": 2000}}
    found = phantom_truth.table([row])
    assert found["missed"] == ["steady allocated_bytes median", "steady allocated_bytes worst"]
    assert found["deviating"] == {"one": {"steady allocated_bytes": [pytest.approx(0.02), ""]}}


def test_the_published_table_is_the_result_file() -> None:
    tables = json.loads(phantom_truth.OUTPUT.read_text())["tables"]
    for device, figures in tables.items():
        for quantity in phantom_truth.GOALS:
            assert phantom_truth.line(device, figures, quantity) in PAGE.read_text()


def test_what_the_page_says_of_misses_is_the_result_file() -> None:
    """GIVEN the published rows WHEN one misses a goal THEN it is of the recurrent model, after an evaluation."""
    rows = json.loads(phantom_truth.OUTPUT.read_text())["rows"]
    missed = {
        (row["device"], row["case"], phase)
        for row in rows
        for phase in PHASES
        for quantity, goals in phantom_truth.GOALS.items()
        if abs(phantom_truth.error(row, phase, quantity)) > goals["worst"]
    }
    assert {(case.partition("/")[0], phase) for _, case, phase in missed} == {
        ("recurrent", "eval"),
        ("recurrent", "save"),
    }
    num_cases = len({(device, case) for device, case, _ in missed})
    assert f"miss one in {num_cases} of the {len(rows)}," in PAGE.read_text().replace("\n", " ")
