"""memwall against the knobs: step time and peak at equal byte budgets, on a CPU.

    python benchmarks/knobs.py                  # all workloads, about an hour on two cores
    python benchmarks/knobs.py --quick          # one workload, two budgets
    python benchmarks/knobs.py --only-knobs     # what the knobs alone do

Every arm is a fresh process that builds the same seeded workload. First each knob runs alone for a few steps: its peak
gives `keep_all` (plain PyTorch) and `floor` (the leanest of full checkpointing and memwall's tightest plan), and with
them the budgets `floor + share x (keep_all - floor)` of process bytes. Then all arms race: the coordinator hands out
single steps in turn, each round in another random order, so that drift of the machine hits all alike and nobody always
follows the same arm. Two plain arms give the noise floor. A knob fits a budget that it never exceeded, in no race and
no probe. Knobs with memwall's heap for tensors, and nothing else of it, race plain PyTorch: no gate counts them; they
tell the planner's share of a gain from the allocator's.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from knob_arms import heap_arms, knob_arms, work
from knob_report import provenance, score, write_results
from workloads import WORKLOADS

SHARES_PERCENT = (90, 70, 50, 30, 10)
FITS_PERCENT = 110
"""The cell in which nothing is needed."""
TIGHTEST = "memwall-tightest"
NUM_WARM_STEPS, NUM_PROBE_STEPS, NUM_ROUNDS = 2, 4, 12
MEMORY_SHARE = 0.8
"""How much of the available memory the racing processes may be expected to hold at once."""


class Worker:
    """One arm in its own process; computes only inside `step`.

    Args:
        checkout: a folder with another state of the project, installed in its `.venv`, that the arm runs from.
    """

    def __init__(
        self, workload: str, arm: str, budget_bytes: int | None = None, *, checkout: Path | None = None
    ) -> None:
        command = [sys.executable, __file__, "--worker", workload, arm]
        if checkout is not None:
            command[:2] = [str(checkout / ".venv/bin/python"), str(checkout / "benchmarks/knobs.py")]
        if budget_bytes is not None:
            command.append(str(budget_bytes))
        self.arm, self.budget_bytes = arm, budget_bytes
        self.step_seconds: list[float] = []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.record: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            self.record = self._read()
            for _ in range(NUM_WARM_STEPS):
                self.record["warm_peak_bytes"] = self._request("step")["peak_bytes"]
        except BaseException:
            self.close()
            raise
        self.record["warm_seconds"] = time.perf_counter() - start

    def step(self) -> None:
        self.step_seconds.append(self._request("step")["step_seconds"])

    def finish(self) -> dict[str, Any]:
        self.record |= {"arm": self.arm, "budget_bytes": self.budget_bytes, "step_seconds": self.step_seconds}
        self.record |= self._request("finish")
        self.close()
        return self.record

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _request(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the worker for {self.arm} ended with status {self._process.wait()}: see its message above"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


def race(workload: str, arms: Sequence[tuple[str, int | None]], num_rounds: int) -> list[dict[str, Any]]:
    """Trains all arms at once, one step at a time in turn; returns one record per arm."""
    workers: list[Worker] = []
    try:
        for arm, budget_bytes in arms:
            progress(f"{workload}: starting {arm}" + (f" with {budget_bytes / 2**20:.0f} MiB" if budget_bytes else ""))
            workers.append(Worker(workload, arm, budget_bytes))
        order = random.Random(0)
        for _ in range(num_rounds):
            # No arm always follows the same one, whose caches and dirty pages it finds.
            for worker in order.sample(workers, len(workers)):
                worker.step()
                if worker.arm == "save-to-disk":
                    os.sync()  # its gigabytes of dirty pages are its own cost, not the next arm's
                    time.sleep(1.0)
        return [worker.finish() for worker in workers]
    finally:
        for worker in workers:
            worker.close()


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(workload: str, shares_percent: Sequence[int], num_rounds: int, has_memwall: bool) -> dict[str, Any]:
    """Runs the probe and the race of one workload; returns its part of the result file."""
    start = time.perf_counter()
    knobs = knob_arms(WORKLOADS[workload])
    # Plain PyTorch's process grows for some steps and differs between runs: probed as long as it races, twice.
    plain_arms = ("plain", "plain-again")
    probes = {arm: race(workload, [(arm, None)], num_rounds)[0] for arm in plain_arms}
    probes["checkpoint-every-1"] = race(workload, [("checkpoint-every-1", None)], NUM_PROBE_STEPS)[0]
    keep_all_bytes = max(probes[arm]["peak_bytes"] for arm in plain_arms)
    floor_bytes = probes["checkpoint-every-1"]["peak_bytes"]
    if has_memwall:
        at_floor = race(workload, [(TIGHTEST, floor_bytes)], NUM_PROBE_STEPS)[0]
        probes[TIGHTEST] = race(workload, [(TIGHTEST, int(at_floor["smallest_feasible_bytes"] * 1.01))], 1)[0]
        floor_bytes = min(floor_bytes, probes[TIGHTEST]["peak_bytes"])
    budgets_bytes = {
        share: floor_bytes + (keep_all_bytes - floor_bytes) * share // 100 for share in (FITS_PERCENT, *shares_percent)
    }
    for arm, probe in probes.items():
        progress(
            f"{workload}: {arm} peaks at {probe['peak_bytes'] / 2**20:.0f} MiB, {min(probe['step_seconds']):.2f} s"
        )
    knob_racers: list[tuple[str, int | None]] = [(arm, None) for arm in knobs]
    plans = [(f"memwall-{share}", size) for share, size in budgets_bytes.items()] if has_memwall else []
    groups = grouped(plans, keep_all_bytes * len(knobs))  # none holds more than keeping everything
    raced = [race(workload, [*knob_racers, *group], num_rounds) for group in groups]
    if has_memwall:
        heap_racers = [(arm, None) for arm in heap_arms(knobs)]
        raced.append(race(workload, [*knob_racers[: len(plain_arms)], *heap_racers], num_rounds))
    races = score(raced, list(probes.values()), budgets_bytes)
    return {
        "workload": workload,
        "keep_all_bytes": keep_all_bytes,
        "floor_bytes": floor_bytes,
        "budgets_bytes": {str(share): budget_bytes for share, budget_bytes in budgets_bytes.items()},
        "probes": list(probes.values()),
        "races": races,
        "wall_seconds": time.perf_counter() - start,
    }


def grouped(plans: Sequence[tuple[str, int]], knob_bytes: int) -> list[list[tuple[str, int]]]:
    """Splits memwall's arms so that each group fits in memory together with all knobs, with which it races."""
    room_bytes = int(MEMORY_SHARE * psutil.virtual_memory().available) - knob_bytes
    most_bytes = max((budget_bytes for _, budget_bytes in plans), default=0)
    if most_bytes > room_bytes:
        raise SystemExit(
            f"the knobs hold {knob_bytes / 2**30:.1f} GiB at once, which leaves {room_bytes / 2**30:.1f} GiB of "
            f"{MEMORY_SHARE:.0%} of the available memory, and a plan needs {most_bytes / 2**30:.1f} GiB: "
            "free some memory"
        )
    groups: list[list[tuple[str, int]]] = [[]]
    for plan in plans:
        if sum(budget_bytes for _, budget_bytes in [*groups[-1], plan]) > room_bytes:
            groups.append([])
        groups[-1].append(plan)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs="+", metavar="ARG", help=argparse.SUPPRESS)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: all")
    parser.add_argument(
        "--shares", type=int, nargs="+", default=list(SHARES_PERCENT), help="budgets, percent of the range"
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="timed steps per arm")
    parser.add_argument(
        "--quick", action="store_true", help="one workload, two budgets, four rounds; nothing is written"
    )
    parser.add_argument("--only-knobs", action="store_true", help="leave memwall out; nothing is written")
    parser.add_argument("--output", type=Path, help="write the result here, also with --quick or --only-knobs")
    options = parser.parse_args()
    if options.worker:
        workload, arm, *budget = options.worker
        work(workload, arm, int(budget[0]) if budget else None)
        return
    names = options.workload or list(WORKLOADS)
    shares_percent, num_rounds = options.shares, options.rounds
    if options.quick:
        names, shares_percent, num_rounds = names[:1], [70, 30], 4
    result: dict[str, Any] = {**provenance(), "load_average_before": os.getloadavg()}
    result["workloads"] = []
    for name in names:
        result["workloads"].append(measure(name, shares_percent, num_rounds, not options.only_knobs))
        # After each workload: what is measured stays measured if a later one fails.
        write_results(result, options.output, is_published=not (options.quick or options.only_knobs))


if __name__ == "__main__":
    main()
