"""Resident peak under each malloc policy: predicted by replaying a recorded step against measured in fresh processes.

    python benchmarks/malloc_replay.py [--workloads NAME ...] [--rounds N] [--steps N] [--output FILE]

Each workload is recorded once. Then each policy trains it in processes of its own, policies taking turns, so that a
slow spell of the machine hits them all. What tensors do not explain (library buffers, thread stacks) is one constant
per workload: measured under `mmap`, where malloc keeps nothing, in the first step. Prints a table, writes JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.apply.malloc import MallocHandler
from memwall.predict.malloc import (
    MallocPolicy,
    candidate_policies,
    environment,
    fault_seconds_per_byte,
    policy_named,
    replay,
    trim_operations,
)
from memwall.predict.malloc_events import events_of
from memwall.predict.treatment import BlockCalls
from memwall.trace.meter import process_bytes, process_peak_bytes, reset_process_peak, return_free_memory
from memwall.trace.record import record
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

_RESULTS = Path(__file__).parent / "results" / "cpu" / "malloc_replay.json"
_MIB = 1 << 20


class Attention(nn.Module):
    """A pre-norm transformer layer; [batch, tokens, width] in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        mixed = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip; [batch, channels, height, width] in and out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def gpt() -> Workload:
    """Six transformer layers on 16 sequences of 256 tokens."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(256, 256), *(Attention(256, 4) for _ in range(6)), nn.Linear(256, 256))

    def batch() -> tuple[Tensor, Tensor]:
        text = torch.randint(0, 256, (16, 257))
        return text[:, :-1], text[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(model=model, batch=batch, loss=loss, optimizer=_adamw)


def conv() -> Workload:
    """Five residual blocks at three resolutions on 32 images of 48 x 48 pixels."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        down = [nn.Conv2d(n, 2 * n, 3, stride=2, padding=1) for n in (32, 64)]
        body = [Residual(32), Residual(32), down[0], Residual(64), Residual(64), down[1], Residual(128)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
        return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *body, *head)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(32, 3, 48, 48), torch.randint(0, 10, (32,))

    return Workload(model=model, batch=batch, loss=_classify, optimizer=_adamw)


def mlp() -> Workload:
    """Six feed-forward layers of width 1024 on 1024 rows; parameters and their state weigh as much as activations."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.LayerNorm(1024)) for _ in range(6)
        ]
        return nn.Sequential(*layers, nn.Linear(1024, 10))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(1024, 1024), torch.randint(0, 10, (1024,))

    return Workload(model=model, batch=batch, loss=_classify, optimizer=_adamw)


WORKLOADS: dict[str, Callable[[], Workload]] = {"gpt": gpt, "conv": conv, "mlp": mlp}


def train(workload_name: str, policy: MallocPolicy, num_steps: int) -> dict[str, Any]:
    """Trains in this process, which should be fresh; measures resident bytes per step and the time of each."""
    workload = WORKLOADS[workload_name]()
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    return_free_memory()
    handler = MallocHandler()
    standing_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    base_bytes = process_bytes() - standing_bytes
    handler.apply(policy)
    for block in model.children():
        if policy.trims_forward:
            block.register_forward_pre_hook(lambda *_: handler.trim())
        if policy.trims_backward:
            # torch warns for a first layer whose inputs need no gradient; it is called all the same.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            block.register_full_backward_pre_hook(lambda *_: handler.trim())
    peaks, seconds = [], []
    for _ in range(num_steps):
        batch = workload.make_batch()
        reset_process_peak()
        begin = time.perf_counter()
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
        seconds.append(time.perf_counter() - begin)
        peaks.append(process_peak_bytes())
    return {"base_bytes": base_bytes, "peak_bytes": peaks, "step_seconds": seconds}


def predict(trace: Trace, policy: MallocPolicy, num_steps: int) -> tuple[list[int], int, float]:
    """Peak of tensors and malloc per step, bytes faulted in per steady step, and how long the replay took."""
    top = [i for i, module in enumerate(trace.modules) if module.parent == 0]
    blocks = [
        BlockCalls(
            path=trace.modules[i].path,
            module=i,
            calls=tuple(c for c in trace.steps[0].calls if c.module == i),
            saved=(),
        )
        for i in top
    ]
    first, steady = (events_of(step, trims=trim_operations(step, policy, blocks)) for step in trace.steps)
    begin = time.perf_counter()
    forecast = replay(policy, [first] + [steady] * (num_steps - 1))
    seconds = time.perf_counter() - begin
    return [step.peak_resident_bytes for step in forecast.steps], forecast.fresh_bytes, seconds


def _in_fresh_process(workload_name: str, policy: MallocPolicy, num_steps: int) -> dict[str, Any]:
    threads = str(torch.get_num_threads())
    done = subprocess.run(
        [
            sys.executable,
            __file__,
            "--train",
            workload_name,
            policy.name,
            "--steps",
            str(num_steps),
            "--threads",
            threads,
        ],
        stdout=subprocess.PIPE,
        env=dict(os.environ) | environment(policy),
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(workload_name: str, num_rounds: int, num_steps: int, fault_seconds: float) -> list[dict[str, Any]]:
    """One row per policy."""
    policies = candidate_policies(can_restart=True)
    trace = record(WORKLOADS[workload_name]())
    runs: dict[str, list[dict[str, Any]]] = {policy.name: [] for policy in policies}
    for number in range(num_rounds):
        for policy in policies if number % 2 == 0 else policies[::-1]:
            runs[policy.name].append(_in_fresh_process(workload_name, policy, num_steps))
    predicted = {policy.name: predict(trace, policy, num_steps) for policy in policies}
    workspace_bytes = statistics.median(
        run["peak_bytes"][0] - run["base_bytes"] - predicted["mmap"][0][0] for run in runs["mmap"]
    )
    fastest = {name: min(s for run in found for s in run["step_seconds"][1:]) for name, found in runs.items()}
    rows = []
    for policy in policies:
        found = runs[policy.name]
        measured = sorted(max(run["peak_bytes"]) for run in found)
        steps, fresh_bytes, replay_seconds = predicted[policy.name]
        base_bytes = statistics.median(run["base_bytes"] for run in found)
        predicted_bytes = base_bytes + workspace_bytes + max(steps)
        rows.append(
            {
                "workload": workload_name,
                "policy": policy.name,
                "tag": "cpu-measured",
                "base_bytes": base_bytes,
                "workspace_bytes": workspace_bytes,
                "predicted_peak_bytes": predicted_bytes,
                "measured_peak_bytes": statistics.median(measured),
                "measured_peak_bytes_range": [measured[0], measured[-1]],
                "error": predicted_bytes / statistics.median(measured) - 1,
                "fresh_bytes": fresh_bytes,
                "predicted_fault_seconds": fresh_bytes * fault_seconds,
                "measured_step_seconds": fastest[policy.name],
                "time_ratio_to_default": fastest[policy.name] / fastest["default"],
                "replay_seconds": replay_seconds,
            }
        )
    return rows


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=2, metavar=("WORKLOAD", "POLICY"), help=argparse.SUPPRESS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="1 keeps times steady on a shared machine")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.train:
        print(json.dumps(train(options.train[0], policy_named(options.train[1]), options.steps)))
        return
    fault_seconds = fault_seconds_per_byte()
    print(
        f"{'workload':9}{'policy':24}{'predicted':>10}{'measured':>10}{'range':>14}{'error':>8}{'time':>7}{'faulted':>9}"
    )
    rows = []
    for name in options.workloads:
        found = measure(name, options.rounds, options.steps, fault_seconds)
        rows += found
        for row in found:
            low, high = (round(value / _MIB) for value in row["measured_peak_bytes_range"])
            print(
                f"{row['workload']:9}{row['policy']:24}{row['predicted_peak_bytes'] / _MIB:10.0f}"
                f"{row['measured_peak_bytes'] / _MIB:10.0f}{f'{low}-{high}':>14}{row['error']:8.1%}"
                f"{row['time_ratio_to_default']:7.2f}{row['fresh_bytes'] / _MIB:9.0f}",
                flush=True,
            )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "torch": str(torch.__version__),
        "libc": " ".join(platform.libc_ver()),
        "device": f"cpu, {os.cpu_count()} cores, {options.threads} threads",
        "commit": commit,
        "fault_seconds_per_byte": fault_seconds,
        "rows": rows,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    _main()
