"""A compiled GPT whose graph saves less: bytes, seconds and weights, beside the compiled model without memwall.

    python benchmarks/compiled_graphs.py            # five minutes, most of which the compiler takes
    python benchmarks/compiled_graphs.py --tiny     # the smallest model; nothing is written

The model is compiled as a whole, by inductor with g++. `plain` is that alone; each other run is `memwall.fit` under a
share of plain's steady peak, with `--allow graphs`. Each is a process of its own, and starts with an empty cache of the
compiler's. A steady peak is that of steps after the first, which compiles. Seconds are those of its one thread, and so
are the recorded ones that a plan foresees a step from: what else the machine does is in neither. Writes
results/cpu/compiled_graphs.json.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from knob_report import provenance
from torch import Tensor, nn
from torch.nn import functional

import memwall
from memwall.machine.meter import process_peak_bytes, reset_process_peak
from memwall.planning.techniques.compiled_graphs import CompiledGraphs
from memwall.trace import step_recorder

OUTPUT = Path(__file__).parent / "results" / "cpu" / "compiled_graphs.json"
SHARES, NUM_STEPS = (0.95, 0.85), 7
WIDTH, HEADS, LAYERS, LENGTH, BATCH, VOCABULARY = 128, 4, 6, 256, 32, 512
TINY = {"WIDTH": 64, "LAYERS": 2, "BATCH": 8}
_TIMEOUT_S = 900.0


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(self.first(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def run_child(budget_bytes: int) -> dict[str, Any]:
    """Trains in this process, under memwall where a budget is given."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    compiled, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    under = memwall.fit(compiled, optimizer, budget=budget_bytes, allow=["graphs"]) if budget_bytes else nullcontext()
    seconds, peaks = [], []
    with patch.object(step_recorder, "time", SimpleNamespace(perf_counter=time.process_time)), under as session:
        for step in range(NUM_STEPS):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            begin = time.process_time()
            loss = functional.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - begin)
            if session is None:
                peaks.append(process_peak_bytes())
                reset_process_peak()
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    found = {"first_step_seconds": seconds[0], "step_seconds": statistics.median(seconds[2:]), "weights": weights}
    if session is None:
        return found | {"first_step_peak_bytes": peaks[0], "steady_peak_bytes": max(peaks[1:])}
    assert session.plan is not None
    ratios = [action.ratio for action in session.plan.actions if isinstance(action, CompiledGraphs)]
    return found | {
        "budget_bytes": budget_bytes,
        "first_step_peak_bytes": session.measured.first_step_peak_bytes,
        "steady_peak_bytes": session.measured.peak_bytes,
        "saved_ratio": min(ratios, default=1.0),
        "foreseen_step_seconds": session.plan.forecast.step_seconds,
    }


def in_a_process(*arguments: str) -> dict[str, Any]:
    """Returns what a child prints, which starts without what the compiler has kept."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--child", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
        )
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(row: dict[str, Any]) -> str:
    """Returns a run's line of the table in docs/compiled.md."""
    run = f"budget {row['budget_bytes'] / 2**20:,.0f} MiB" if "budget_bytes" in row else "plain"
    first, steady = (f"{row[f'{name}_peak_bytes'] / 2**20:,.0f} MiB" for name in ("first_step", "steady"))
    saved = f"{row.get('saved_ratio', 1.0):.0%}"
    return f"| {run} | {saved} | {first} | {steady} | {row['step_seconds']:.2f} s |"


def main() -> None:
    """Measures plain, and each share of its peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", type=int)
    given = parser.parse_args()
    if given.tiny:
        globals().update(TINY)
    if given.child is not None:
        print(json.dumps(run_child(given.child)))
        return
    more = ["--tiny"] * given.tiny
    rows = [in_a_process("0", *more)]
    print(line(rows[0]), flush=True)
    for share in SHARES:
        rows.append(in_a_process(str(int(share * rows[0]["steady_peak_bytes"])), *more))
        print(line(rows[-1]), flush=True)
    digests = [row.pop("weights") for row in rows]
    for row, digest in zip(rows, digests, strict=True):
        row["is_plain_weights"] = digest == digests[0]
    print("weights are", "plain's" if len(set(digests)) == 1 else "**others**")
    if not given.tiny:
        OUTPUT.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
