"""Bytes of a rank, foreseen and metered: DDP, FSDP2 by each way to reshard, and ZeRO; plain, recomputed and offloaded.

    python benchmarks/ranks_bytes.py                 # two and four gloo processes on a CPU; ten minutes
    python benchmarks/ranks_bytes.py --only zero     # the part by DeepSpeed, which `make test-deepspeed` installs

The forecast is that of `memwall plan --ranks`, made from the step of one process; the measure is the most bytes that
tensors hold at once in a step of a rank, looked at after each operation, on the rank that holds most. Every block is
recomputed, or all its saved tensors of a size leave. Beside it stands the most that the process of such a rank holds
(VmHWM) in a step that nobody looks at. Of steps under a plan that is foreseen from what the process holds as the step
begins, what the forecast says that a step adds, what the plain step held beyond its tensors, and what may be on its way
to the disk. Writes results/cpu/ranks_bytes.json and the table of docs/ranks.md.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from revision import commit

from memwall.planning.blocks import find_blocks
from memwall.planning.ranks.forecast import AnySharding
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_peak_bytes
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.units import find_units
from memwall.predict.sharding.zero import DeepSpeedZero
from memwall.predict.treatment import StepModel
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from sharded_runs import network_for, ranked_plan, workload  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cpu" / "ranks_bytes.json", ROOT / "docs" / "ranks.md"
NUM_BLOCKS, MIN_BYTES, WINDOW_BYTES, MIB = 4, 1 << 16, 32 << 20, 1 << 20
FORMS: dict[str, Treatment | None] = {
    "plain": None,
    "recompute": Treatment(recompute=True),
    "offload": Treatment(offload=True, min_bytes=MIN_BYTES),
}
_EVERYWHERE: dict[str, AnySharding] = {
    "ddp": Ddp(),
    "ddp-views": Ddp(are_views=True),
    "fsdp2": Fsdp2(),
    "fsdp2-kept": Fsdp2(reshard="no"),
}
KINDS: dict[int, dict[str, AnySharding]] = {2: _EVERYWHERE, 4: _EVERYWHERE | {"fsdp2-node": Fsdp2(reshard="node")}}
ZERO: dict[str, AnySharding] = {f"zero{stage}": DeepSpeedZero(stage=stage) for stage in (1, 2, 3)}  # type: ignore[arg-type]
ZERO_RANKS = (2, 4)
REFUSED = "zero3, offload"
"""Under ZeRO-3 weights come and go in what autograd saved: memwall moves none of it."""
DEEPSPEED = ROOT / ".venv" / "deepspeed"


def made_batch() -> torch.Tensor:
    return torch.randint(0, 2048, (8, 128), generator=torch.Generator().manual_seed(0))


def foreseen(num_ranks: int, kinds: dict[str, AnySharding], folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the peak of each cell, and what of it stands between steps; leaves a plan for each kind."""
    trace = record(dataclasses.replace(workload(), batch=made_batch))
    step, network = steady_step(trace), network_for(num_ranks, 2)
    units = find_units(trace, step)
    found: dict[str, tuple[int, int]] = {}
    for name, kind in kinds.items():
        paths = tuple(unit.path for unit in units if not unit.is_root)
        ranked_plan(kind, network, units=paths).save(folder / name)
        of_rank = kind.cost(trace, step, units, network).step
        standing_bytes = sum(each.nbytes for each in of_rank.storages if each.birth < 0 and each.device == "cpu")
        model = StepModel(of_rank, trace.names, find_blocks(trace, of_rank))
        blocks = [f"blocks.{number}" for number in range(NUM_BLOCKS)]
        for form, treatment in FORMS.items():
            treated = {} if treatment is None else dict.fromkeys(blocks, treatment)
            found[f"{name}, {form}"] = live_peak_bytes(model.treated(treated), "cpu"), standing_bytes
    return found


def measured(num_ranks: int, folder: Path) -> list[dict[str, list[int]]]:
    """Returns what each rank of a run found."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    child = [str(Path(__file__).with_name("ranks_bytes_child.py")), str(folder), *KINDS[num_ranks]]
    subprocess.run([*launch, *child], check=True, timeout=580, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def measured_zero(num_ranks: int, folder: Path) -> list[dict[str, list[int]]]:
    """Returns what each rank found under DeepSpeed: a run for each cell, since an engine leaves buffers behind."""
    python = DEEPSPEED / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"there is no {python}: make test-deepspeed installs DeepSpeed")
    own = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(DEEPSPEED / "extensions"), "OMP_NUM_THREADS": "1"}
    own["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    launch = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    child = str(Path(__file__).with_name("ranks_bytes_zero_child.py"))
    ranks: list[dict[str, list[int]]] = [{} for _ in range(num_ranks)]
    for name in ZERO:
        for form in FORMS:
            if f"{name}, {form}" == REFUSED:
                continue
            subprocess.run([*launch, child, str(folder), name, form], check=True, timeout=180, env=os.environ | own)
            for rank, found in enumerate(ranks):
                found |= json.loads((folder / f"{rank}.json").read_text())
    return ranks


def table(cells: dict[str, Any]) -> str:
    """Returns the rows of docs/ranks.md."""
    lines = ["| by | ranks | " + " | ".join(FORMS) + " |", "| --- | --- | " + " | ".join("---" for _ in FORMS) + " |"]
    for num_ranks, kinds in (*KINDS.items(), *((num, ZERO) for num in ZERO_RANKS)):
        for name, kind in kinds.items():
            row = []
            for form in FORMS:
                cell = cells.get(f"{name}, {form}, {num_ranks}")
                if cell is None:
                    row.append("refused" if f"{name}, {form}" == REFUSED else "-")
                    continue
                plain = cells[f"{name}, plain, {num_ranks}"]
                process = f"{plain['process_bytes'] / MIB:.0f} MiB"
                if form != "plain":
                    process = _compared(cell["process_bytes"], foreseen_process_bytes(form, cell, plain))
                row.append(f"{_compared(cell['measured_bytes'], cell['predicted_bytes'])}; {process}")
            lines.append(f"| {kind.words} | {num_ranks} | {' | '.join(row)} |")
    return "\n".join(lines)


def foreseen_process_bytes(form: str, cell: dict[str, int], plain: dict[str, int]) -> int:
    """Returns what a process is to hold in a step under a plan, by what it held beyond tensors in the plain one."""
    num_bytes = cell["process_before_bytes"] + cell["predicted_added_bytes"]
    num_bytes += plain["process_bytes"] - plain["process_before_bytes"] - plain["predicted_added_bytes"]
    if form == "offload":
        num_bytes += min(WINDOW_BYTES, plain["predicted_bytes"] - cell["predicted_bytes"])
    return num_bytes


def _compared(measured_bytes: int, predicted_bytes: int) -> str:
    return f"{measured_bytes / MIB:.1f} MiB, {100 * (predicted_bytes / measured_bytes - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["torch", "zero"])
    only = parser.parse_args().only
    cells: dict[str, Any] = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}
    parts = [] if only == "zero" else [(n, kinds, measured) for n, kinds in KINDS.items()]
    if only != "torch":
        parts.extend((num, ZERO, measured_zero) for num in ZERO_RANKS)
    for num_ranks, kinds, measure in parts:
        with tempfile.TemporaryDirectory() as folder:
            predicted = foreseen(num_ranks, kinds, Path(folder))
            ranks = measure(num_ranks, Path(folder))
        for name, (num_bytes, standing_bytes) in predicted.items():
            if name != REFUSED:
                live, process, before = zip(*(of_rank[name] for of_rank in ranks), strict=True)
                cells[f"{name}, {num_ranks}"] = {
                    "predicted_bytes": num_bytes,
                    "predicted_added_bytes": num_bytes - standing_bytes,
                    "measured_bytes": max(live),
                    "process_bytes": max(process),
                    "process_before_bytes": before[process.index(max(process))],
                    "commit": commit(),
                }
        about = {"tag": "cpu-measured", "torch": torch.__version__, "cells": cells}
        RESULTS.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        head, _, rest = PAGE.read_text().partition("<!-- bytes: begin -->\n")
        _, _, tail = rest.partition("<!-- bytes: end -->")
        PAGE.write_text(f"{head}<!-- bytes: begin -->\n{table(cells)}\n<!-- bytes: end -->{tail}")
    print(table(cells))


if __name__ == "__main__":
    main()
