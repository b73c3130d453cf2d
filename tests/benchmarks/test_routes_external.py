"""Others' runs by both routes: the published table is the result file, and what the page says of it holds."""

import json
from typing import Any

import pytest
import routes_external
from prediction_runs import Run

PAGE = (routes_external.OUTPUT.parents[3] / "docs" / "measured.md").read_text().replace("\n", " ")


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    found = json.loads(routes_external.OUTPUT.read_text())
    assert found["tag"] == "simulated against external"
    return found["tables"]  # type: ignore[no-any-return]


def test_the_published_table_is_the_result_file(tables: dict[str, Any]) -> None:
    for kind in routes_external.kinds_of(tables):
        assert routes_external.line(kind, tables) in PAGE
    assert f"Of all {tables['num_rows']} models" in PAGE


def test_the_phantoms_route_is_nearer_for_every_kind(tables: dict[str, Any]) -> None:
    for kind in routes_external.kinds_of(tables):
        for name in ("median", "p90"):
            assert tables["phantom"][kind][name] < tables["translate"][kind][name], (kind, name)


def test_the_margin_covers_what_the_page_says(tables: dict[str, Any]) -> None:
    for route, name in (("phantom", "covered_share"), ("phantom", "covered_share_without_convolutions")):
        assert f"{100 * tables[route][name]:.1f} %" in PAGE


def run_of(model: str, family: str, batch_size: int, flag: str = "ok") -> Run:
    return Run(
        model=model,
        family=family,
        kind="cnn",
        batch_size=batch_size,
        input_shape="3x224x224",
        params=1,
        fake_peak_mib=1.0,
        measured_gpu_mib=1,
        flag=flag,
    )


def test_each_model_is_asked_once_and_families_take_turns() -> None:
    runs = [run_of("a1", "a", 8), run_of("a1", "a", 32), run_of("a1", "a", 128), run_of("a2", "a", 16)]
    runs += [run_of("b1", "b", 32, "spike"), run_of("b1", "b", 64)]
    assert [run.key for run in routes_external.asked(runs)] == ["a1/32", "b1/64", "a2/16"]
