"""The published speed of the simulated allocator: the README shows the result file, and misses are named."""

import copy
import json
from typing import Any

import allocator_speed
import pytest


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(allocator_speed.RESULT.read_text())
    return found


def test_the_readme_shows_the_published_result(result: dict[str, Any]) -> None:
    assert allocator_speed.section(result) in allocator_speed.README.read_text()


def test_the_published_result_keeps_what_is_required(result: dict[str, Any]) -> None:
    assert allocator_speed.failures(result) == []
    assert (result["num_settings"], result["num_processes"]) == (64, 2)
    assert all(row["num_events"] >= 100_000 for row in result["rows"])


def test_what_is_too_slow_is_named(result: dict[str, Any]) -> None:
    slow = copy.deepcopy(result)
    slow["rows"][1]["events_per_second"]["expandable"]["median"] = 299_999
    slow["rows"][0]["search"]["processor_seconds"] = 61.0
    missed = [
        "transformer: the search needs 30.5 s, 30 wanted",
        "scattered, expandable: 299,999 events/s, 300,000 wanted",
    ]
    assert allocator_speed.failures(slow) == missed
    assert all(line in allocator_speed.section(slow) for line in missed)
