"""Holds, equals, or is refused: frontends by ways to train on several ranks, on gloo processes of this machine.

    python benchmarks/ranks.py                       # all cells; about 15 minutes on two cores
    python benchmarks/ranks.py --cells fit-fsdp2 fit-ddp-4
    phantom/run python benchmarks/ranks.py           # on phantom CUDA devices, a rank each: simulated; five minutes

A cell has two ranks, or as many as its name ends with.

The budget of a cell is what the process holds before it trains, and 60 % of what plain training adds to that on the
larger rank. A cell holds if no rank exceeded it, in any step; it is equal if every loss and every weight on every rank
is the plain run's, bit for bit. Writes results/cpu/ranks.json, or results/simulated/ranks.json, and prints the table of
docs/ranks.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from revision import commit

HERE = Path(__file__).parent
FRONTENDS, WRAPPERS = ("fit", "run", "accelerate", "trainer"), ("ddp", "fsdp2")
CELLS = (*(f"{frontend}-{wrapper}" for frontend in FRONTENDS for wrapper in WRAPPERS), "fit-ddp-4", "fit-fsdp2-4")
# Accelerate divides a model on devices alone.
SIMULATED_CELLS = tuple(f"{frontend}-fsdp2" for frontend in FRONTENDS)
ON_PHANTOM = torch.cuda.is_available()
SHARE = 0.6
MIB = 1 << 20


def launched(frontend: str, wrapper: str, budget_bytes: int, num_ranks: int) -> dict[str, Any]:
    """Runs so many ranks; returns what each found, or the last lines of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        child = [str(HERE / "ranks_child.py"), frontend, wrapper, str(budget_bytes), folder]
        through = []
        if frontend == "run" and budget_bytes:
            child[3] = "0"
            report = str(Path(folder) / "run.json")
            through = ["-m", "memwall", "run", "--budget", str(budget_bytes), "--report", report]
        result = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(num_ranks), *through, *child),
            ],
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | _devices(num_ranks),
        )
        paths = [Path(folder) / f"{rank}.json" for rank in range(num_ranks)]
        if result.returncode or not all(path.exists() for path in paths):
            lines = [line for line in result.stderr.splitlines() if "Error: " in line or line.startswith("memwall:")]
            said = (lines or result.stderr.splitlines()[-1:] or ["no message"])[0]
            return {"failure": said.partition("Error: ")[2] or said}
        ranks = [json.loads(path.read_text()) for path in paths]
        if through:
            joint = json.loads((Path(folder) / "run.json").read_text())
            for rank in ranks:
                rank |= {
                    "peak_bytes": joint["ranks"]["most_peak_bytes"],
                    "steady_bytes": joint["measured"]["steady_peak_bytes"],
                    "predicted_bytes": joint["forecast"]["peak"]["process_bytes"],
                    "plan": joint["plan_hash"],
                    "num_actions": len(joint["forecast"]["actions"]),
                    "num_replans": joint["measured"]["num_replans"],
                }
        return {"ranks": ranks}


def _devices(num_ranks: int) -> dict[str, str]:
    """Returns what makes a phantom device for each rank, which computes on the host; nothing on a CPU."""
    if not ON_PHANTOM:
        return {}
    return {"PHANTOM_DEVICES": str(num_ranks), "PHANTOM_CARD": "h100-80gb", "PHANTOM_NUMBERS": "1"}


def parts_of(name: str) -> tuple[str, str, int]:
    """Returns the frontend, the wrapper and the number of ranks of a cell."""
    frontend, wrapper, *number = name.split("-")
    return frontend, wrapper, int(number[0]) if number else 2


def measured(frontend: str, wrapper: str, num_ranks: int) -> dict[str, Any]:
    plain = launched(frontend, wrapper, 0, num_ranks)
    if "failure" in plain:
        return {"state": "not run", "reason": f"without memwall: {plain['failure']}"}
    began = max(rank["began_bytes"] for rank in plain["ranks"])
    peak = max(rank["peak_bytes"] for rank in plain["ranks"])
    budget = began + int(SHARE * (peak - began))
    under = launched(frontend, wrapper, budget, num_ranks)
    cell = {"plain_peak_bytes": peak, "budget_bytes": budget}
    if "failure" in under:
        return cell | {"state": "failed", "reason": under["failure"]}
    same = all(
        (one["losses"], one["weights"]) == (other["losses"], other["weights"])
        for one, other in zip(plain["ranks"], under["ranks"], strict=True)
    )
    most = max(under["ranks"], key=lambda rank: rank["steady_bytes"])
    return cell | {
        "state": ("held" if max(rank["peak_bytes"] for rank in under["ranks"]) <= budget else "exceeded")
        + (", equal" if same else ", not equal"),
        "peak_bytes": max(rank["peak_bytes"] for rank in under["ranks"]),
        "predicted_bytes": most["predicted_bytes"],
        "steady_bytes": most["steady_bytes"],
        "num_actions": most["num_actions"],
        "num_replans": most["num_replans"],
        "one_plan": len({rank["plan"] for rank in under["ranks"]}) == 1,
    }


def row(name: str, cell: dict[str, Any]) -> str:
    frontend, wrapper, num_ranks = parts_of(name)
    wrapper += f", {num_ranks} ranks" if num_ranks != 2 else ""
    if "peak_bytes" not in cell:
        return f"| {frontend} | {wrapper} | {cell['state']} | {cell['reason']} |"
    steady = 100 * (cell["predicted_bytes"] / cell["steady_bytes"] - 1)
    figures = (
        f"{cell['plain_peak_bytes'] / MIB:.0f} -> {cell['peak_bytes'] / MIB:.0f} of {cell['budget_bytes'] / MIB:.0f}"
    )
    return (
        f"| {frontend} | {wrapper} | {cell['state']} | {figures} MiB; {steady:+.1f} %; {cell['num_actions']} actions |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", default=SIMULATED_CELLS if ON_PHANTOM else CELLS)
    chosen = parser.parse_args().cells
    path = HERE / "results" / ("simulated" if ON_PHANTOM else "cpu") / "ranks.json"
    for name in chosen:
        cell = measured(*parts_of(name)) | {"commit": commit(), "num_ranks": parts_of(name)[2]}
        print(row(name, cell), flush=True)
        cells = json.loads(path.read_text())["cells"] if path.exists() else {}
        about = {"tag": "simulated" if ON_PHANTOM else "cpu-measured", "torch": torch.__version__, "share": SHARE}
        path.write_text(json.dumps(about | {"cells": cells | {name: cell}}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
