"""The claim: an embedding table of 15.4 GB trains under a cap of 1.5 GiB, about as fast as one that fits.

    python benchmarks/embedding_table.py [--quick] [--rounds 3]

20M x 64 with Adam's two moments, against 1M x 64 under the same cap with the same cache and the same law of ids; and
torch's own tables, which the kernel kills where they do not fit. Runs take turns, each in a memory control group of its
own. Then: equal to torch's own on a small table, two ranks equal to one, and saved on two, loaded on three. Writes
results/cpu/embedding_table.json.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cgroup import CapUnavailable, memory_cap, own_group
from free_ports import meeting_place
from knob_report import provenance

ROOT = Path(__file__).resolve().parent.parent
RUN = Path(__file__).with_name("embedding_table_run.py")
RANKS = Path(__file__).with_name("embedding_table_ranks.py")
_MAX_TIME_RATIO = 1.10
_TIMEOUT_S = 1800.0


def measure(arguments: Sequence[str], cap_bytes: int) -> dict[str, Any]:
    """One run under the cap."""
    with memory_cap(cap_bytes) as cap:
        done = cap.run([sys.executable, "-W", "ignore", str(RUN), *arguments], timeout_s=_TIMEOUT_S)
    found = json.loads(done.output) if done.status == 0 else {}
    return found | {
        "status": done.status,
        "is_oom_killed": done.is_oom_killed,
        "group_peak_bytes": done.peak_bytes,
        "num_limit_hits": done.num_limit_hits,
        "errors": "" if done.is_oom_killed else done.errors[-1000:],
    }


def ranks(folder: Path, num_ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of one run says."""
    common = os.environ | meeting_place(num_ranks)
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RANKS), str(folder), *arguments],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"a rank of {num_ranks} failed: {[process.returncode for process in running]}")
    return [json.loads(output) for output in outputs]


def exactness(folder: Path, num_rows: int) -> dict[str, bool]:
    """Whether hashes of all rows agree where they should."""
    size = ("--rows", str(num_rows))
    (torchs,) = ranks(folder, 1, *size, "--steps", "0", "12", "--plain")
    (alone,) = ranks(folder, 1, *size, "--steps", "0", "12")
    two = ranks(folder, 2, *size, "--steps", "0", "12", "--save", "two")
    (alone_further,) = ranks(folder, 1, *size, "--steps", "0", "20")
    three = ranks(folder, 3, *size, "--steps", "12", "20", "--load", "two")
    return {
        "equals_torch": alone["sha256"] == torchs["sha256"],
        "two_ranks_equal_one": {one["sha256"] for one in two} == {alone["sha256"]},
        "saved_on_2_loaded_on_3_equals_one": {one["sha256"] for one in three} == {alone_further["sha256"]},
        "had_cold_rows": alone["read_bytes"] > 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all parts and writes the results.

    Returns:
        0 if every claim held, 1 if one did not, 2 if there is no cap to be had here.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, one round; writes no results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "embedding_table.json")
    options = parser.parse_args(arguments)
    large, small, cap_bytes, cache_mib, fill, steps = 20_000_000, 1_000_000, 3 << 29, 960, 450, 300
    if options.quick:
        large, small, cap_bytes, cache_mib, fill, steps = 2_000_000, 100_000, 640 << 20, 96, 60, 60
        options.rounds = 1
    folder = Path(tempfile.mkdtemp(prefix="memwall-embedding-"))
    common = ["--fill", str(fill), "--steps", str(steps), "--cache", f"{cache_mib}MiB", "--disk", str(folder)]
    arms = {
        "memwall, large": ["--rows", str(large), *common],
        "memwall, small": ["--rows", str(small), *common],
        "torch, small": ["--rows", str(small), *common, "--plain"],
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    try:
        version = own_group()[1]
        torch_large = measure(["--rows", str(large), *common, "--plain"], cap_bytes)
        for number in range(options.rounds):
            names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
            for name in names:
                runs[name].append(measure(arms[name], cap_bytes))
                print(f"{name}: {json.dumps(runs[name][-1])}", file=sys.stderr, flush=True)
        same = exactness(folder, 20_000)
    except CapUnavailable as reason:
        print(f"no cap can be enforced here: {reason}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder)
    pairs = zip(runs["memwall, large"], runs["memwall, small"], strict=True)
    ratios = [
        ours["step_seconds_quartiles"][1] / theirs["step_seconds_quartiles"][1]
        for ours, theirs in pairs
        if not ours["status"] and not theirs["status"]
    ]
    result = {
        **provenance(),
        "schema": "memwall.bench-embedding/1",
        "kind": "cpu-measured",
        "command": f"python benchmarks/embedding_table.py --rounds {options.rounds}",
        "meter": f"cgroup v{version}: peak of the group with page cache; swap off",
        "cap_bytes": cap_bytes,
        "dense_bytes": large * 64 * 4 * 3,
        "torch_large": torch_large,
        "runs": runs,
        "time_ratios_large_to_small": ratios,
        "time_ratio_large_to_small": statistics.median(ratios) if ratios else None,
        "exactness": same,
        "benchmark_sha256": hashlib.sha256(RUN.read_bytes()).hexdigest(),
    }
    print(table(result))
    if not options.quick:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if holds(result) else 1


def holds(result: dict[str, Any]) -> bool:
    """Whether every claim held."""
    large = result["runs"]["memwall, large"]
    return bool(
        result["torch_large"]["is_oom_killed"]
        and all(run["status"] == 0 and run["group_peak_bytes"] <= result["cap_bytes"] for run in large)
        and all(run["read_bytes_per_step"] > 0 for run in large)
        and result["time_ratio_large_to_small"] <= _MAX_TIME_RATIO
        and all(result["exactness"].values())
    )


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| table | step ms (quartiles) | group peak MiB | rows touched | read, written KiB a step |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, found in [("torch, large", [result["torch_large"]]), *result["runs"].items()]:
        done = [run for run in found if run["status"] == 0]
        peak = max(run["group_peak_bytes"] for run in found) / 2**20
        if not done:
            lines.append(f"| {name} | killed | {peak:,.0f} | | |")
            continue
        low, middle, high = (statistics.median(run["step_seconds_quartiles"][n] for run in done) for n in range(3))
        touched = statistics.median(run.get("rows_touched", run["rows"]) for run in done)
        moved = [statistics.median(run.get(f"{way}_bytes_per_step", 0) for run in done) for way in ("read", "written")]
        lines.append(
            f"| {name} | {middle * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f}) | {peak:,.0f} | {touched:,.0f} "
            f"| {moved[0] / 1024:,.0f}, {moved[1] / 1024:,.0f} |"
        )
    ratio = result["time_ratio_large_to_small"]
    lines.append("")
    lines.append(f"Step time, large to small: {'-' if ratio is None else format(ratio, '.2f')}. {result['exactness']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
