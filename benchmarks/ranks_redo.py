"""Measures the cost of ranks doing a step again together, where none fails: paired steps with and without, in turns.

    python benchmarks/ranks_redo.py      # two gloo processes each under DDP and FSDP2; about three minutes

A pair is a step in which ranks say whether one has failed (under DDP once, with gradients averaged after backward;
under FSDP2 before each collective as well), and one that they do as plain torch does, in turns. Writes
results/cpu/ranks_redo.json and a table of docs/ranks.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ranks_child import SAMPLES, SEQUENCE, made, wrapped
from revision import commit
from torch import distributed

import memwall
from memwall.session.ranks import joint_parts

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "cpu" / "ranks_redo.json", HERE.parent / "docs" / "ranks.md"
NUM_PAIRS, NUM_RANKS = 20, 2
_BEGIN, _END = "<!-- redo: begin -->\n", "<!-- redo: end -->"


def of_rank(wrapper: str, folder: Path) -> None:
    """Trains as one rank, and leaves the seconds of each step."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    model = wrapped(made(), wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(512, (SAMPLES, SEQUENCE))
    joint_parts._NUM_CAREFUL = 1000  # all of them, not the first ones alone
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with memwall.fit(model, optimizer, budget="8GiB") as session:
        steps = session._steps
        joint = None
        for number in range(3 + 2 * NUM_PAIRS):
            is_joint = number % 4 in (0, 3)  # which comes first changes from pair to pair
            if number == 3:
                joint = steps._joint
                assert joint is not None
            if number >= 3:
                steps._joint = joint if is_joint else None
            distributed.barrier()
            begin = time.perf_counter()
            session.compute_gradients(tokens, lambda rows: model(input_ids=rows, labels=rows).loss)
            if number >= 3:
                seconds[is_joint].append(time.perf_counter() - begin)
            optimizer.step()
            optimizer.zero_grad()
    if distributed.get_rank() == 0:
        (folder / f"{wrapper}.json").write_text(json.dumps([seconds[True], seconds[False]]))
    sys.stdout.flush()
    os._exit(0)


def measured(wrapper: str) -> dict[str, Any]:
    """Returns the quartiles of the ratio of a pair's steps, and the seconds of a plain one."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS), __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, wrapper, folder], check=True, timeout=580, env=environment)
        joint, plain = json.loads((Path(folder) / f"{wrapper}.json").read_text())
    ratios = [one / other for one, other in zip(joint, plain, strict=True)]
    return {"ratio_quartiles": statistics.quantiles(ratios, n=4), "plain_seconds": statistics.median(plain)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows of docs/ranks.md."""
    lines = ["| by | seconds of a step beside one that ranks cannot do again | quartiles | a step |"]
    lines.append("| --- | --- | --- | --- |")
    for wrapper, row in rows.items():
        first, middle, third = (f"{100 * (ratio - 1):+.1f} %" for ratio in row["ratio_quartiles"])
        lines.append(f"| {wrapper} | {middle} | {first} to {third} | {row['plain_seconds']:.2f} s |")
    return "\n".join(lines)


def main() -> None:
    rows = {wrapper: measured(wrapper) for wrapper in ("ddp", "fsdp2")}
    about = {"tag": "cpu-measured", "torch": torch.__version__, "num_ranks": NUM_RANKS, "num_pairs": NUM_PAIRS}
    RESULTS.write_text(json.dumps(about | {"commit": commit(), "rows": rows}, indent=2, sort_keys=True) + "\n")
    head, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{head}{_BEGIN}{table(rows)}\n{_END}{rest.partition(_END)[2]}")
    print(table(rows))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        of_rank(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
