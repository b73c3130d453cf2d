"""The simulator against the allocators of torch 2.11.0, 2.12.0, 2.13.0 and 2.15.0: every address, and the statistics.

The recordings are made without a GPU by `python -m benchmarks.allocator_oracle --torch VERSION --write`.
"""

import pytest
from allocator_oracle.recording import first_difference, load_recording
from msgspec.structs import replace

from memwall.predict.cuda_allocator.torch_releases import profile_for

VERSIONS = ("2.11.0", "2.12.0", "2.13.0", "2.15.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_address_and_all_statistics_are_those_of_torch(version: str) -> None:
    recording = load_recording(version)
    assert recording.torch == version
    assert sum(len(run.calls) for run in recording.runs) > 1000
    assert [first_difference(run, profile_for(version)[0]) for run in recording.runs] == [None] * len(recording.runs)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_other_tie_rule_explains_the_addresses(version: str) -> None:
    own = profile_for(version)[0]
    runs = [replace(run, statistics={}) for run in load_recording(version).runs]
    for tie in {"address", "block", "segment"} - {own.tie}:
        assert any(first_difference(run, replace(own, tie=tie)) for run in runs), tie
