"""Result files of the benchmarks: every figure has a unit and says how it was obtained."""

import json
from pathlib import Path

import pytest
from figures import figures_of, untagged, without_unit

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = sorted(str(path.relative_to(RESULTS)) for path in RESULTS.glob("**/*.json"))


@pytest.mark.parametrize("name", FILES)
def test_every_figure_has_a_unit_and_a_tag(name: str) -> None:
    record = json.loads((RESULTS / name).read_text())
    assert any(figures_of(record))
    assert without_unit(record) == []
    assert untagged(record) == []


@pytest.mark.parametrize(
    ("record", "units", "tags"),
    [
        ({"tag": "simulated", "peak_bytes": 1}, [], []),
        ({"tag": "simulated", "peak": 1}, ["peak"], []),
        ({"rows": [{"tag": "external", "peak_bytes": 1}, {"peak_bytes": 2}]}, [], [".rows.peak_bytes"]),
        ({"tag": "predicted", "num_steps": 1}, [], [".num_steps", ": tag 'predicted'"]),
        ({"kind": "cpu-measured", "rows": [{"seconds": {"median": 1.0}, "value": 2.0}]}, ["rows.value"], []),
    ],
)
def test_what_counts_as_missing(record: dict[str, object], units: list[str], tags: list[str]) -> None:
    assert (without_unit(record), untagged(record)) == (units, tags)
