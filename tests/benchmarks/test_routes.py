"""Both routes beside an H100: the published table is the result file, and what the page says of it holds."""

import json

import pytest
import routes
import routes_cases

from memwall.trace.workload import Workload

PAGE = (routes.HERE.parent / "docs" / "measured.md").read_text()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    found = json.loads(routes.OUTPUT.read_text())
    assert found["tag"] == "simulated"
    return found["rows"]  # type: ignore[no-any-return]


def test_the_published_table_is_the_result_file(rows: list[dict[str, object]]) -> None:
    assert routes.table(rows) in PAGE
    assert [row["case"] for row in rows] == list(routes.recorded_cases())


def test_the_phantoms_route_is_as_near_or_nearer_in_every_case(rows: list[dict[str, dict[str, int]]]) -> None:
    for row in rows:
        for quantity in routes.QUANTITIES:
            held = row["h100"][quantity]
            translated, phantom = (abs(row[route][quantity] - held) for route in routes.ROUTES)
            assert phantom <= translated + held / 1000, (row["case"], quantity)
    missing = [row["h100"]["allocated_bytes"] - row["phantom"]["allocated_bytes"] for row in rows]
    assert (missing.count(1 << 20), missing.count(0)) == (6, 2)
    assert "In six cases the H100 had 1 MiB more allocated" in PAGE.replace("\n", " ")


def test_a_case_is_a_spec() -> None:
    assert isinstance(getattr(routes_cases, "gpt2/float32/adamw-foreach"), Workload)
    for name in ("gpt2", "nobody/float32/adamw-foreach"):
        assert not hasattr(routes_cases, name)
