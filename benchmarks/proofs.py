"""Measures what verification and the watch take of a step, in processor seconds and in pairs within one run.

    python benchmarks/proofs.py [--steps 1000]

A small GPT and a convolutional net train under a plan that recomputes every other block and offloads the saved tensors
of the rest. Steps take turns: with the watch and without it, and every so many one in which all actions prove
themselves, as in a run every 1,000th step does. Of the watch the median of the differences within neighbours counts, of
proofs the median of what such a step takes longer than its neighbours, divided by 1,000 steps. Writes
results/cpu/proofs.json; the goal is 1 % of a step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Block

import memwall
from memwall.apply.applied import PROOF_STEPS
from memwall.planning.planfile import Plan
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session
from memwall.session.watch.budget_watch import BudgetWatch
from memwall.session.watch.growth import GrowthWatch
from memwall.session.watch.step_metrics import StepLog

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from plans import plan_of

RESULTS = Path(__file__).parent / "results" / "cpu"
_PROVES_EVERY = 20
_WARM_STEPS = 8
_GOAL_RATIO = 0.01
_WATCHES = {GrowthWatch: ("begin_step", "end_step"), BudgetWatch: ("look",), StepLog: ("begin_step", "end_step")}


def gpt() -> tuple[nn.Module, Tensor]:
    """Four layers of width 128, 4 x 128 tokens."""
    layers = [Block(128, 4, is_causal=True) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(128, 128)), torch.randn(4, 128, 128)


def conv() -> tuple[nn.Module, Tensor]:
    """Four residual-free blocks of 32 channels, 8 images of 24 x 24 pixels."""
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.Flatten(), nn.LazyLinear(10)), torch.randn(
        8, 3, 24, 24
    )


def leaving(path: str) -> Offload:
    """Sends what a block saves to disk and back."""
    return Offload(block=path, scope="saved", tier="disk", min_bytes=1 << 16, window_bytes=1 << 22)


def plan_for(model: nn.Module, paths: Sequence[str], batch: Tensor) -> Plan:
    """A plan that recomputes every other block, and offloads what the others save."""
    actions = [Recompute(block=path) if number % 2 else leaving(path) for number, path in enumerate(paths)]
    return plan_of(model, *actions, micro_batch=batch.shape[0])


@contextmanager
def unwatched() -> Iterator[None]:
    """Leaves the watch out of what runs inside."""
    kept = [(kind, name, vars(kind)[name]) for kind, names in _WATCHES.items() for name in names]
    for kind, name, _ in kept:
        setattr(kind, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for kind, name, method in kept:
            setattr(kind, name, method)


def measure(name: str, num_steps: int) -> dict[str, Any]:
    """Returns the shares of one model."""
    torch.manual_seed(0)
    model, batch = {"gpt": gpt, "conv": conv}[name]()
    model(batch)
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_for(model, ["0", "1", "2", "3"] if name == "gpt" else ["1", "2", "3", "4"], batch)
        optimizer = torch.optim.AdamW(model.parameters())
        with memwall.fit(model, optimizer, plan=plan, disk=folder) as session:
            seconds = _steps(session, model, optimizer, batch, num_steps)
    step_seconds = statistics.median(seconds["watched"])
    watch = statistics.median(a - b for a, b in zip(seconds["watched"], seconds["unwatched"], strict=False))
    proof = statistics.median(seconds["proving"]) - step_seconds
    ratio = (watch + proof / PROOF_STEPS) / step_seconds
    return {
        "num_steps": num_steps,
        "actions": sorted({type(action).__name__ for action in plan.actions}),
        "step_cpu_seconds": step_seconds,
        "watch_cpu_seconds": watch,
        "cpu_seconds_more_in_a_proving_step": proof,
        "share_of_step_ratio": ratio,
        "meets_goal": ratio < _GOAL_RATIO,
    }


def _steps(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, num_steps: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"watched": [], "unwatched": [], "proving": []}

    def step() -> float:
        begin = time.process_time()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin

    for _ in range(_WARM_STEPS):
        step()
    applied = session._live.in_effect.applied
    assert applied is not None
    for number in range(num_steps):
        if number % _PROVES_EVERY == 0:
            applied._num_steps = 0
            seconds["proving"].append(step())
            step()  # ends the proving
        order = ("watched", "unwatched") if number % 2 else ("unwatched", "watched")
        for arm in order:
            if arm == "watched":
                seconds[arm].append(step())
            else:
                with unwatched():
                    seconds[arm].append(step())
    return seconds


def main() -> None:
    """Prints and writes the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"tag": "cpu-measured", "torch": torch.__version__, "num_threads": 1}
    for name in ("gpt", "conv"):
        record[name] = found = measure(name, args.steps // 2)
        print(f"{name}: {json.dumps(found)}", flush=True)
    (RESULTS / "proofs.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
