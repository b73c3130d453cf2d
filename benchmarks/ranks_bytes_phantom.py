"""Bytes of eight ranks on phantom CUDA devices, foreseen and counted: DDP and FSDP2 by each way to reshard.

    phantom/run python benchmarks/ranks_bytes_phantom.py    # eight processes, by the phantom's NCCL; a minute

The forecast is that of `memwall plan --ranks`, from the step of one process that was translated for the card; the count
is that of torch's own caching allocator (`torch.cuda.max_memory_allocated`) in a steady step, on the rank that holds
most. Nothing here is a measurement of a GPU. Writes results/simulated/ranks_bytes.json and a table of docs/ranks.md.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ranks_bytes import KINDS, MIN_BYTES, NUM_BLOCKS, made_batch
from revision import commit
from torch import distributed, nn

import memwall
from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.planning.action import Action
from memwall.planning.blocks import find_blocks
from memwall.planning.planfile import Plan
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.call_rules import Treatment
from memwall.predict.cuda_allocator.step_peaks import allocated_peak_bytes
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.units import find_units
from memwall.predict.treatment import StepModel
from memwall.trace.modules import fingerprint
from memwall.trace.steps import steady_step

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from plans import a_plan  # noqa: E402
from sharded_runs import Model, loss_of, network_for, ranked_plan, workload  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "simulated" / "ranks_bytes.json", ROOT / "docs" / "ranks.md"
CARD, NUM_RANKS, NUM_PER_NODE, HOST_BYTES, MIB = "h100-80gb", 8, 4, 4 << 30, 1 << 20
WINDOW_BYTES = 4 << 20
ALL_KINDS = KINDS[4] | {"ddp-compressed": Ddp(are_views=True, is_compressed=True)}
"""Kinds of sharding that gloo runs too, as in ranks_bytes.py, and one that NCCL alone does."""
FORMS: dict[str, Treatment | None] = {
    "plain": None,
    "recompute": Treatment(recompute=True),
    "offload": Treatment(offload=True, min_bytes=MIN_BYTES, window_bytes=WINDOW_BYTES),
}
_BEGIN, _END = "<!-- phantom bytes: begin -->\n", "<!-- phantom bytes: end -->"


def foreseen(folder: Path) -> dict[str, int]:
    """Returns the allocated bytes of each cell; leaves a plan for each kind."""
    whole = dataclasses.replace(workload(), batch=made_batch)
    trace = device_run_of_spec(whole, hardware_named(CARD), is_evaluated=False, host_bytes=HOST_BYTES).training
    step, network = steady_step(trace), network_for(NUM_RANKS, NUM_PER_NODE)
    units = find_units(trace, step)
    found = {}
    for name, kind in ALL_KINDS.items():
        ranked_plan(kind, network, units=tuple(unit.path for unit in units if not unit.is_root)).save(folder / name)
        of_rank = kind.cost(trace, step, units, network).step
        model = StepModel(of_rank, trace.names, find_blocks(trace, of_rank))
        for form in FORMS:
            treatment = FORMS[form]
            blocks = [] if treatment is None else [f"blocks.{number}" for number in range(NUM_BLOCKS)]
            treated = model.treated({block: treatment for block in blocks if treatment is not None})
            found[f"{name}, {form}"] = allocated_peak_bytes(treated)
    return found


def actions_of(form: str, prefix: str) -> list[Action]:
    """Returns what a form does to each block."""
    blocks = [f"{prefix}blocks.{number}" for number in range(NUM_BLOCKS)] if form != "plain" else []
    if form == "recompute":
        return [Recompute(block=block) for block in blocks]
    return [
        Offload(block=block, scope="saved", tier="host", min_bytes=MIN_BYTES, window_bytes=WINDOW_BYTES)
        for block in blocks
    ]


def counted(plan: Path, form: str) -> int:
    """Returns the most that torch's allocator hands out in the fifth step: the first ones prove a plan's actions."""
    torch.manual_seed(0)
    model: nn.Module = memwall.shard(Model().cuda(), Plan.load(plan))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), foreach=False), made_batch().cuda()
    prefix = "module." if hasattr(model, "module") else ""
    made = a_plan(
        *actions_of(form, prefix),
        micro_batch=len(tokens),
        device="cuda",
        model_fingerprint=fingerprint([model]),
        process_bytes=1,
    )
    with memwall.fit(model, optimizer, plan=made):
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats()
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            num_bytes = torch.cuda.max_memory_allocated()
    return num_bytes


def of_rank(folder: Path) -> None:
    """Counts every cell as one rank of a run, and leaves what it found in FOLDER/rank.json."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    found = {f"{kind}, {form}": counted(folder / kind, form) for kind in ALL_KINDS for form in FORMS}
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def table(about: dict[str, Any]) -> str:
    """Returns the rows of docs/ranks.md."""
    cells = about["cells"]
    lines = ["| by | " + " | ".join(FORMS) + " |", "| --- | " + " | ".join("---" for _ in FORMS) + " |"]
    for name, kind in ALL_KINDS.items():
        row = [cells[f"{name}, {form}"] for form in FORMS]
        told = [
            f"{c['counted_bytes'] / MIB:.1f} MiB, {100 * (c['predicted_bytes'] / c['counted_bytes'] - 1):+.1f} %"
            for c in row
        ]
        lines.append(f"| {kind.words} | {' | '.join(told)} |")
    return "\n".join(lines)


def main() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(NUM_RANKS),
        __file__,
    ]
    own = {"OMP_NUM_THREADS": "1", "PHANTOM_DEVICES": str(NUM_RANKS), "PHANTOM_CARD": CARD, "PHANTOM_NUMBERS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        predicted = foreseen(Path(folder))
        subprocess.run([*launch, folder], check=True, timeout=900, env=os.environ | own)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    cells = {
        name: {"predicted_bytes": num_bytes, "counted_bytes": max(of_one[name] for of_one in ranks)}
        for name, num_bytes in predicted.items()
    }
    about = {
        "tag": "simulated",
        "torch": torch.__version__,
        "card": CARD,
        "num_ranks": NUM_RANKS,
        "commit": commit(),
        "cells": cells,
    }
    RESULTS.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    head, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{head}{_BEGIN}{table(about)}\n{_END}{rest.partition(_END)[2]}")
    print(table(about))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        of_rank(Path(sys.argv[1]))
    else:
        main()
