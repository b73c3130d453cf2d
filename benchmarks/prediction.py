"""How near predictions come: the zoo against real CPU execution, and others' measured runs against their card's meter.

    python benchmarks/prediction.py --runs CSV       # everything, about an hour of one core; writes result and README
    python benchmarks/prediction.py --part cpu       # the zoo alone, a quarter of an hour; keeps the other part
    python benchmarks/prediction.py --quick [--runs CSV]         # a small part, a minute or two; writes nothing
    python benchmarks/prediction.py --runs CSV --reuse           # new tables from the published rows

The zoo (`prediction_zoo.py`) is frozen: 12 families x 6 optimizers x 3 precisions. Each case runs for real, with
torch's profiler counting bytes, and is predicted on fake tensors; libraries that estimate answer beside memwall. The
measured runs (`prediction_runs.py`) are predicted by fake recording, translation, allocator simulation and a context
that is fitted on other families. Ends with status 1 if the zoo's median error is above 1 % or its p95 above 5 %, or if
memwall does not beat the three-term fit of the published estimates on the measured runs in median and p90.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import astuple
from prediction_child import answers
from prediction_external import AFTER_A_STEP, MEMWALL, THREE_TERMS, TWO_PROBES, external_tables
from prediction_report import RESULT, part_provenance, summaries, write_result
from prediction_rows import KNOWN_RUNS, KnownRun
from prediction_runs import ALLOCATOR, DEVICE, file_sha256, read_runs
from prediction_truth import truth_tables
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, zoo_sha256

from memwall.errors import UsageError

MAX_MEDIAN, MAX_P95 = 0.01, 0.05
QUICK_FAMILIES, QUICK_OPTIMIZERS = ("gpt2", "recurrent"), ("adamw-foreach", "adafactor")
QUICK_MODELS = {"vgg": ("vgg16",), "volo": ("volo_d1_224",), "resnet": ("resnet10t",)}


def cpu_part(is_quick: bool) -> dict[str, Any]:
    """Runs and predicts the zoo."""
    begin, rows = time.perf_counter(), []
    for family in QUICK_FAMILIES if is_quick else FAMILIES:
        for precision in PRECISIONS:
            start = time.perf_counter()
            optimizers = QUICK_OPTIMIZERS if is_quick else tuple(OPTIMIZERS)
            rows += list(answers("prediction_case.py", (family, precision, *optimizers)))
            _progress(f"{family} in {precision}", start)
    return part_provenance("cpu-measured") | {
        "quantity": "live bytes on CPU dispatch, highest point of the first two steps",
        "zoo_sha256": zoo_sha256(),
        "wall_seconds": time.perf_counter() - begin,
        "tables": truth_tables(rows),
        "rows": rows,
    }


def external_part(path: Path, is_quick: bool) -> dict[str, Any]:
    """Predicts the measured runs."""
    runs = read_runs(path)
    if is_quick:
        runs = [run for run in runs if run.model in QUICK_MODELS.get(run.family, ())]
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    for family in dict.fromkeys(run.family for run in runs):
        start = time.perf_counter()
        models = QUICK_MODELS[family] if is_quick else ()
        rows += list(answers("prediction_runs.py", (str(path), family, *models)))
        _progress(family, start)
    return part_provenance("simulated against external") | {
        "quantity": "used memory of the device at its highest, as nvidia-smi showed it once a second",
        "source": "GPUMemNet, itu-rad/GPUMemNet at f01eb059, doi 10.1145/3805621.3807621; CC BY 4.0 as far as known",
        "runs_sha256": file_sha256(path),
        "device": DEVICE,
        "allocator": ALLOCATOR,
        "settings": "float32, SGD with momentum and weight decay: probable, not recorded",
        "wall_seconds": time.perf_counter() - begin,
        "tables": external_tables(runs, {row["key"]: row for row in rows}),
        "known_runs": [] if is_quick else list(answers("prediction_rows.py", ())),
        "rows": rows,
    }


def cpu_part_again(before: dict[str, Any]) -> dict[str, Any]:
    """New tables from cases that ran before, which keep their commit and their time.

    Raises:
        UsageError: there are none, or they are of another zoo.
    """
    if not before:
        raise UsageError("--reuse: no part of the zoo was published yet; run without --reuse")
    if before["zoo_sha256"] != zoo_sha256():
        raise UsageError("--reuse: the zoo has changed since the published rows were measured; run without --reuse")
    return before | {"tables": truth_tables(before["rows"])}


def external_part_again(path: Path, before: dict[str, Any]) -> dict[str, Any]:
    """New tables from rows that were recorded before, which keep their commit and their time.

    Raises:
        UsageError: there are none, or they are of another file of runs.
    """
    if not before:
        raise UsageError("--reuse: no external part was published yet; run without --reuse")
    if before["runs_sha256"] != file_sha256(path):
        raise UsageError(f"--reuse: the published rows are not of {path}, whose hash differs; run without --reuse")
    return before | {"tables": external_tables(read_runs(path), {row["key"]: row for row in before["rows"]})}


def failures(result: dict[str, Any]) -> list[str]:
    """One line for each target that is missed."""
    found = stale(result)
    if "cpu" in result:
        ours = result["cpu"]["tables"]["arms"]["memwall"]
        for name, most in (("median", MAX_MEDIAN), ("p95", MAX_P95)):
            error = ours.get(name, abs(ours["worst"]))
            if error > most:
                found.append(f"zoo: {name} error {error:.2%}; the target is {most:.0%}")
    if "external" in result:
        for rows, what in (("ok", "measured runs"), ("all", "measured runs with spikes")):
            arms = result["external"]["tables"][rows]
            for name in ("median", "p90"):
                ours, theirs = arms[MEMWALL].get(name), arms[THREE_TERMS].get(name)
                if ours is not None and ours >= theirs:
                    found.append(f"{what}: {name} error {ours:.2%}; the three-term fit has {theirs:.2%}")
        for probes, arms in result["external"]["tables"]["probes"].items():
            ours, theirs = (arms[arm] for arm in (f"{AFTER_A_STEP} {probes.split(', ')[-1]}", TWO_PROBES))
            found += [
                f"larger batches, {probes} known: {name} error {ours[name]:.2%}; "
                f"the line through them {theirs[name]:.2%}"
                for name in ("median", "p90")
                if name in ours and ours[name] >= theirs[name]
            ]
    return found


def stale(result: dict[str, Any]) -> list[str]:
    """One line for each list of cases that was edited after it was measured: what was found then is void."""
    found = []
    if result.get("cpu", {}).get("zoo_sha256", zoo_sha256()) != zoo_sha256():
        found.append("zoo: the list of cases has changed since; run again")
    runs = result.get("external", {}).get("known_runs", [])
    if runs and {tuple(row[field] for field in KnownRun.__struct_fields__) for row in runs} != {
        astuple(run) for run in KNOWN_RUNS
    }:
        found.append("runs with known settings: the list has changed since; run again")
    return found


def _progress(what: str, start: float) -> None:
    print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("cpu", "external"), help="default: both")
    parser.add_argument("--runs", type=Path, metavar="CSV", help="measured runs; without it there is no external part")
    parser.add_argument("--quick", action="store_true", help="a small part; nothing is written")
    parser.add_argument("--reuse", action="store_true", help="take recorded runs from the published result")
    parser.add_argument("--output", type=Path, help="write the result here instead")
    options = parser.parse_args(arguments)
    if options.part == "external" and options.runs is None:
        parser.error("--part external needs --runs CSV, the file of measured runs (see benchmarks/README.md)")
    output = options.output or RESULT
    before = json.loads(output.read_text()) if output.is_file() and not options.quick else {}
    result = {part: before[part] for part in ("cpu", "external") if part in before}
    if options.part != "external":
        result["cpu"] = cpu_part_again(before.get("cpu", {})) if options.reuse else cpu_part(options.quick)
    if options.part != "cpu" and options.runs is not None:
        if options.reuse:
            result["external"] = external_part_again(options.runs, before.get("external", {}))
        else:
            result["external"] = external_part(options.runs, options.quick)
    print(summaries(result))
    if not options.quick:
        write_result(result, output)
    missed = failures(result)
    print(*missed, sep="\n", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
