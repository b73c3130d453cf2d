"""How long a plan for many ranks takes, and how much memory: processor seconds and peak of `memwall plan --ranks`.

    python benchmarks/ranks_planning.py              # two models on 512 ranks; two minutes

Llama 3 of 8 and 70 billion parameters, sequences of 4096 tokens, on H100s of 80 GB in DGX nodes, all ways to divide the
model. No device is there. Seconds are those of the processor, start of the process included, so that other work on the
machine counts little. Writes results/cpu/ranks_planning.json and the table of docs/ranks.md.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from revision import commit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from hf_configurations import LLAMA_3_8B, LLAMA_3_70B  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cpu" / "ranks_planning.json", ROOT / "docs" / "ranks.md"
MODELS = {"Llama 3 8B": LLAMA_3_8B, "Llama 3 70B": LLAMA_3_70B}
OPTIONS = shlex.split("--device h100-80gb --budget 76GiB --dtype float32 --autocast bfloat16 --batch 1 --seq 4096")
LINKED = shlex.split("--link dgx-h100 --host 1TiB")
MIB = 1 << 20


def planned(model: str, num_ranks: int) -> dict[str, Any]:
    """Plans in a process of its own; returns what that took and what was chosen."""
    with tempfile.TemporaryDirectory() as folder:
        config, plan = Path(folder) / "config.json", Path(folder) / "plan.json"
        config.write_text(json.dumps(MODELS[model]))
        command = [sys.executable, "-m", "memwall", "plan", str(config), *OPTIONS, "--ranks", str(num_ranks), *LINKED]
        with (Path(folder) / "printed").open("w") as printed:
            process = subprocess.Popen([*command, "-o", str(plan)], stdout=printed, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3) or not plan.exists():
            raise SystemExit((Path(folder) / "printed").read_text()[-2000:])
        ranks = json.loads(plan.read_text())["forecast"]["ranks"]
    return {
        "commit": commit(),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": used.ru_maxrss * 1024,
        "num_choices": len(ranks["choices"]),
        "num_curve_points": len(ranks["curve"]),
        "chosen": ranks["chosen"],
    }


def table(about: dict[str, Any]) -> str:
    """Returns the rows of docs/ranks.md."""
    lines = [
        "| model | ranks | ways weighed | processor seconds | peak of the process |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in sorted(about["plans"].items(), key=lambda item: (len(item[0]), item[0])):
        model, _, num_ranks = name.rpartition(", ")
        figures = f"{row['num_choices']} | {row['processor_seconds']:.1f} | {row['peak_bytes'] / MIB:,.0f} MiB"
        lines.append(f"| {model} | {num_ranks} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[512])
    chosen = parser.parse_args()
    for model in chosen.models:
        for num_ranks in chosen.ranks:
            row = planned(model, num_ranks)
            print(model, num_ranks, row, flush=True)
            known = json.loads(RESULTS.read_text())["plans"] if RESULTS.exists() else {}
            about = {
                "tag": "cpu-measured",
                "torch": torch.__version__,
                "plans": known | {f"{model}, {num_ranks}": row},
            }
            RESULTS.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
            before, _, rest = PAGE.read_text().partition("<!-- planning: begin -->\n")
            _, _, after = rest.partition("<!-- planning: end -->")
            PAGE.write_text(f"{before}<!-- planning: begin -->\n{table(about)}\n<!-- planning: end -->{after}")


if __name__ == "__main__":
    main()
