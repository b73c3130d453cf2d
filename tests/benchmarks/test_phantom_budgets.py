"""The table of budgets on the phantom device: which rows are failures, and where the published ones are shown."""

import json
from typing import Any

import phantom_budgets
import pytest

PAGE = phantom_budgets.OUTPUT.parents[3] / "docs" / "measured.md"
KEPT = {
    "model": "mlp",
    "share_percent": 60,
    "status": 0,
    "counted_bytes": 9,
    "exceeded_bytes": 0,
    "is_digest_equal": True,
}
REFUSED = {"model": "mlp", "share_percent": 25, "status": 3, "smallest_told_bytes": 10}


@pytest.mark.parametrize(
    ("row", "has_failed"),
    [
        (KEPT, False),
        ({**KEPT, "exceeded_bytes": 1}, True),
        ({**KEPT, "is_digest_equal": False}, True),
        ({**KEPT, "status": 5}, True),
        (REFUSED, False),
        ({**REFUSED, "smallest_told_bytes": None}, True),
        ({**REFUSED, "share_percent": None}, True),
        ({**REFUSED, "status": 1}, True),
    ],
)
def test_a_row_fails_over_its_budget_with_other_weights_or_where_a_told_budget_is_refused(
    row: dict[str, Any], has_failed: bool
) -> None:
    assert phantom_budgets.has_failed(row) is has_failed


def test_the_published_table_is_the_result_file() -> None:
    rows = json.loads(phantom_budgets.OUTPUT.read_text())["rows"]
    shown = [row for row in rows if row["share_percent"] != 100]
    assert shown
    for row in shown:
        assert phantom_budgets.line(row) in PAGE.read_text()
