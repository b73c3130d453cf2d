"""The simulator of the CUDA caching allocator against torch's own, without a GPU.

    python -m benchmarks.allocator_oracle --torch 2.13.0 --check

Takes `libc10_cuda.so` out of torch's CUDA wheel, loads it over a stub of the CUDA runtime (runtime.cpp, driver.cpp),
has it allocate and free at random (cases.py), and feeds the same calls to the simulator, which must give every address
and every statistic. `--check` also asks whether torch still answers as in the recording that the tests keep; `--write`
replaces that recording. `--golden` has it do what `allocator_programs.py` does on a GPU, and keeps the histories under
tests/golden. Prints one JSON object; the exit status is 1 if anything differs. Needs Linux on x86_64, g++,
pip and, for the first run of a release, the package index: wheels of several hundred MB, of which 10 MB stay in the
cache.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from benchmarks.allocator_oracle.cases import record
from benchmarks.allocator_oracle.golden import stub_records
from benchmarks.allocator_oracle.libraries import Oracle, prepare
from benchmarks.allocator_oracle.recording import (
    Recording,
    first_difference,
    load_recording,
    recording_path,
    save_recording,
)
from benchmarks.allocator_record import first_difference as history_difference
from benchmarks.allocator_record import save_record
from memwall.errors import UsageError
from memwall.predict.cuda_allocator.torch_releases import profile_for

# The recording: these seeds, and the statistics after every tenth call.
_SEEDS = range(220, 226)
_NUM_RECORDED_CALLS = 220
_NUM_CALLS = 400
_GOLDEN = Path(__file__).parents[2] / "tests" / "golden"


def _recorded(version: str, oracle: Oracle) -> Recording:
    runs = []
    for seed in _SEEDS:
        run = record(oracle, seed, num_calls=_NUM_RECORDED_CALLS)
        last = len(run.calls) - 1
        kept = {number: counts for number, counts in run.statistics.items() if number % 10 == 9 or number == last}
        runs.append(replace(run, statistics=kept))
    return Recording(torch=version, runs=runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, metavar="VERSION", help="2.11.0 or later, as on PyPI")
    parser.add_argument("--cases", type=int, default=100, help="random processes to compare")
    parser.add_argument("--cache", type=Path, default=Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser())
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="also compare torch with the recording of the tests")
    action.add_argument("--write", action="store_true", help="replace the recording of the tests")
    parser.add_argument("--golden", action="store_true", help="write histories of whole programs to tests/golden")
    arguments = parser.parse_args()
    version = arguments.torch
    try:
        profile, note = profile_for(version)
    except UsageError as error:
        raise SystemExit(str(error)) from None
    if note:
        print(note, file=sys.stderr)
    if arguments.check and not recording_path(version).is_file():
        raise SystemExit(f"there is no recording of torch {version} to check; leave --check out, or --write one")
    differences = {}
    num_equal = 0
    with tempfile.TemporaryDirectory() as build:
        oracle = prepare(version, arguments.cache / "memwall-allocator-oracle", Path(build))
        for seed in range(arguments.cases):
            run = record(oracle, seed, num_calls=_NUM_CALLS)
            difference = first_difference(run, profile)
            if difference is None:
                num_equal += len(run.calls)
            else:
                differences[f"case {seed}"] = difference
        if arguments.check or arguments.write:
            recording = _recorded(version, oracle)
            for number, run in enumerate(recording.runs):
                difference = first_difference(run, profile)
                if difference is not None:
                    differences[f"recorded run {number}"] = difference
        for history in stub_records(oracle, version) if arguments.golden else ():
            save_record(history, _GOLDEN / f"stub-torch-{version}")
            difference = history_difference(history)
            if difference is not None:
                differences[history.name] = difference
    result = {
        "torch": version,
        "provenance": "cpu-measured",
        "num_cases": arguments.cases,
        "num_equal_calls": num_equal,
    }
    if arguments.check:
        result["is_recording_equal"] = recording == load_recording(version)
    if arguments.write:
        save_recording(recording)
    print(json.dumps({**result, "differences": differences}, indent=2))
    return int(bool(differences) or result.get("is_recording_equal") is False)


if __name__ == "__main__":
    sys.exit(main())
