"""The claim: where the disk is slow, a step is shorter if saved tensors leave in int8; and what that does to the loss.

    python benchmarks/packed_offload.py [--rounds 3] [--disk DIR]
    python benchmarks/packed_offload.py --quick           # one round on one disk; nothing is written

A discriminator with spectral norms, whose layers write to buffers in forward: they cannot be run again, so what they
save stays or leaves; of others a plan would recompute the cheap part and move nothing. One budget, on this
machine's disk and on the same disk held to less: one transfer at a time, each of which takes as long as it would at
that speed. For each disk a plan made without and one with `--allow low-bit-offload`, in processes of their own, in
turns. Shown are the median step, the forecast's, bytes moved in a step, and the mean loss of the last steps beside
plain PyTorch's, from which the exact arm may not differ in a bit. Before them what packing and unpacking cost here for
each number. Writes results/cpu/packed_offload.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import memwall
from memwall.apply.offload.packed import pack_seconds_per_element
from memwall.machine.meter import process_peak_bytes, reset_process_peak
from memwall.planning.techniques.offload import Offload
from memwall.store import scratch
from memwall.store.backend import SystemBackend

OUTPUT = Path(__file__).parent / "results" / "cpu" / "packed_offload.json"
SHARE, NUM_STEPS, NUM_LAST = 0.7, 16, 4
NUM_STAGES, CHANNELS, IMAGE, BATCH = 12, 32, 64, 12
DISKS_MIB_PER_SECOND = (0, 400, 200, 100)
_TIMEOUT_S = 900.0


class HeldDisk(SystemBackend):
    """This machine's disk, held to a speed: what is faster waits, and one transfer follows the other."""

    bytes_per_second = 0.0
    _lock = threading.Lock()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """See `SystemBackend`."""
        with self._lock:
            begin = time.perf_counter()
            done = super().pwrite(fd, data, offset)
            self._wait(begin, done)
        return done

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """See `SystemBackend`."""
        with self._lock:
            begin = time.perf_counter()
            done = super().pread(fd, buffer, offset)
            self._wait(begin, done)
        return done

    def _wait(self, begin: float, num_bytes: int) -> None:
        time.sleep(max(0.0, begin + num_bytes / self.bytes_per_second - time.perf_counter()))


def hold_disk(mib_per_second: int) -> None:
    """What is opened on disk from now on passes at that speed; at the disk's own for 0."""
    if mib_per_second:
        HeldDisk.bytes_per_second = mib_per_second * 2.0**20
        scratch.SystemBackend = HeldDisk


class Stage(nn.Module):
    """Two convolutions, each with its spectral norm, whose power iteration goes on in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)) for _ in range(2))
        self.activation = nn.LeakyReLU(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.activation(self.first(self.activation(x))))
        return out


class Discriminator(nn.Module):
    """Tells stripes from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 1), nn.Linear(CHANNELS, 1)
        self.stages = nn.ModuleList(Stage() for _ in range(NUM_STAGES))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x.mean((2, 3)))[:, 0]
        return logits


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, the same in every process, and what steps it."""
    torch.manual_seed(0)
    model = Discriminator()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-4)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Images and whether each has stripes."""
    generator = torch.Generator().manual_seed(step)
    has_stripes = torch.arange(BATCH) % 2 == 0
    stripes = (torch.arange(IMAGE) * 0.8).sin() * has_stripes[:, None, None, None]
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator) + 0.5 * stripes, has_stripes.float()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step."""
    seconds, losses = [], []
    for step in range(NUM_STEPS):
        images, targets = batch_of(step)
        begin = time.perf_counter()
        loss = nn.functional.binary_cross_entropy_with_logits(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return seconds, losses


def run_child(arm: str, budget_bytes: int, mib_per_second: int, directory: str) -> dict[str, Any]:
    """One arm in this process: plain, exact or packed."""
    torch.set_num_threads(1)
    model, optimizer = make()
    if arm == "plain":
        reset_process_peak()
        seconds, losses = train(model, optimizer)
        return {"peak_bytes": process_peak_bytes(), "step_seconds": statistics.median(seconds[1:]), "losses": losses}
    hold_disk(mib_per_second)
    allow = ("low-bit-offload",) if arm == "packed" else ()
    with memwall.fit(model, optimizer, budget=budget_bytes, allow=allow, disk=directory) as session:
        seconds, losses = train(model, optimizer)
        assert session.plan is not None
        forecast, measured = session.plan.forecast, session.measured
        forms = [action.form for action in session.plan.actions if isinstance(action, Offload)]
        return {
            "peak_bytes": measured.peak_bytes,
            "predicted_peak_bytes": forecast.phases["steady_step"].process_bytes,
            "step_seconds": statistics.median(seconds[2:]),
            "predicted_step_seconds": forecast.step_seconds,
            "moved_bytes": forecast.moved_bytes_per_step,
            "losses": losses,
            "num_exact_blocks": forms.count("exact"),
            "num_packed_blocks": forms.count("int8"),
        }


def in_a_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(disks: Sequence[int], num_rounds: int, directory: str) -> dict[str, Any]:
    """All arms, in turns, and the plain one whose peak the budget is a share of."""
    plain = in_a_process("plain", 0, 0, directory)
    budget_bytes = int(SHARE * plain["peak_bytes"])
    cells = [(arm, disk) for disk in disks for arm in ("exact", "packed")]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for number in range(num_rounds):
        for arm, disk in cells if number % 2 == 0 else reversed(cells):
            runs[arm, disk].append(in_a_process(arm, budget_bytes, disk, directory))
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    rows = []
    for (arm, disk), found in runs.items():
        seconds = [run["step_seconds"] for run in found]
        # The plan of the median run: a forecast goes by what the disk was found to do in that process.
        chosen = sorted(found, key=lambda run: run["step_seconds"])[(len(found) - 1) // 2]
        row = {name: value for name, value in chosen.items() if name not in ("losses", "step_seconds")}
        row["peak_bytes"] = max(run["peak_bytes"] for run in found)
        row["is_plain_loss"] = all(run["losses"] == plain["losses"] for run in found)
        row["mean_of_last_losses"] = statistics.mean(chosen["losses"][-NUM_LAST:])
        rows.append({"arm": arm, "disk_bytes_per_second": disk << 20, "step_seconds": sorted(seconds), **row})
    return {
        "workload": "discriminator with spectral norms",
        "num_steps": NUM_STEPS,
        "num_rounds": num_rounds,
        "budget_bytes": budget_bytes,
        "plain": {
            "peak_bytes": plain["peak_bytes"],
            "step_seconds": plain["step_seconds"],
            "mean_of_last_losses": statistics.mean(plain["losses"][-NUM_LAST:]),
        },
        "rows": rows,
    }


def show(result: dict[str, Any]) -> None:
    plain, mib = result["plain"], 2**20
    print(f"packing and unpacking: {result['pack_seconds_per_element'] * 1e9:.2f} ns for each number of float32")
    print(
        f"plain: {plain['peak_bytes'] / mib:,.0f} MiB, {plain['step_seconds']:.3f} s, loss "
        f"{plain['mean_of_last_losses']:.5f}; budget {result['budget_bytes'] / mib:,.0f} MiB"
    )
    for row in result["rows"]:
        speed = row["disk_bytes_per_second"]
        disk = f"disk at {speed / mib:.0f} MiB/s" if speed else "this disk"
        print(
            f"{disk}, {row['arm']}: step {statistics.median(row['step_seconds']):.3f} s, predicted "
            f"{row['predicted_step_seconds']:.3f} s; {row['moved_bytes'] / mib:,.0f} MiB moved from "
            f"{row['num_exact_blocks']} blocks exactly and {row['num_packed_blocks']} packed; peak "
            f"{row['peak_bytes'] / mib:,.0f} MiB; loss {row['mean_of_last_losses']:.5f}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a budget was exceeded or the exact arm's losses are not the plain run's."""
    parser = argparse.ArgumentParser(description="saved tensors on a slow disk, exactly and in int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="one round on one disk; nothing is written")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        arm, budget_bytes, mib_per_second, directory = options.child
        print(json.dumps(run_child(arm, int(budget_bytes), int(mib_per_second), directory)))
        return 0
    torch.set_num_threads(1)
    disks = DISKS_MIB_PER_SECOND[2:3] if options.quick else DISKS_MIB_PER_SECOND
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        result = {
            "pack_seconds_per_element": pack_seconds_per_element(),
            **measure(disks, 1 if options.quick else options.rounds, directory),
        }
    show(result)
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.packed-offload/1"}
        OUTPUT.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    is_within = all(row["peak_bytes"] <= result["budget_bytes"] for row in result["rows"])
    return 0 if is_within and all(row["is_plain_loss"] for row in result["rows"] if row["arm"] == "exact") else 1


if __name__ == "__main__":
    sys.exit(main())
