"""A share of what benchmarks/faults.py does to training runs: nothing comes of it but the same, or one clear error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults_instants import Found, Instant, Kept, counted, table

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        ("signals", "--share", "1/60"),
        ("clocks",),
        ("resumes", "--share", "1/13"),  # without other releases of torch
        ("allocations", "--share", "1/150"),
        ("soak", "--minutes", "0.15"),
    ],
    ids=lambda options: options[0],
)
def test_harm_ends_well(tmp_path: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, str(PROGRAM), *options, "--scratch", "--kept", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_call_goes_on_where_the_last_one_ended_and_repeats_what_ended_badly(tmp_path: Path) -> None:
    outcomes = {"a": "identical", "b": "different", "c": "not reached"}

    def instants() -> list[Instant]:
        return [Instant(key, ("harm",), lambda key=key: [(outcomes[key], "said")]) for key in "abc"]

    first = Kept(tmp_path / "part.jsonl", "torch 1")
    for instant in instants()[:2]:
        first.run(instant)

    again = Kept(tmp_path / "part.jsonl", "torch 1")
    assert [again.has(key) for key in "abc"] == [True, False, False]
    found = [each for instant in instants() for each in again.of(instant)]
    assert found == [
        Found("harm", outcome, said)
        for outcome, said in zip(("identical", "different", "not run"), ("said", "said", ""), strict=True)
    ]
    assert not Kept(tmp_path / "part.jsonl", "torch 2").has("a")

    record = counted(found)
    assert record["bad"] == [{"name": "harm", "outcome": "different", "said": "said"}]
    assert [*table({"clocks": record}, ["clocks"])][-1] == "| clocks: harm | 2 of 3 | 1 identical, 1 different |"
