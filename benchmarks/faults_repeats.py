"""Trains for long, and again and again, in one process: what it holds stays flat. A part of benchmarks/faults.py."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from faults_runs import digest_of, made

import memwall
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute

__all__ = ["Held", "fits", "held_now", "soak"]

_WARM_FITS = 10


class Held(dict[str, int]):
    """Holds what this process has at one instant: bytes, handles, threads."""

    def grown_since(self, before: "Held") -> dict[str, int]:
        """Returns by how much each is more than before."""
        return {name: value - before[name] for name, value in self.items()}


def held_now(folder: Path) -> Held:
    """Measures what this process holds, and what lies in a folder."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return Held(
        resident_bytes=resident,
        num_handles=len(os.listdir("/proc/self/fd")),
        num_threads=threading.active_count(),
        disk_bytes=on_disk,
    )


def _plan(model: Any) -> Any:
    """A plan with something to recompute, and state on disk."""
    from plans import plan_of  # the tests' own, put on the path by the signals' part

    return plan_of(
        model,
        Recompute(block="blocks.0"),
        OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=32768, min_bytes=1024),
        micro_batch=16,
    )


def _train(folder: Path, num_steps: int, *, is_planned: bool) -> tuple[str, Any]:
    model, optimizer = made()
    how: dict[str, Any] = {"plan": _plan(model)} if is_planned else {"budget": "1TiB"}
    with memwall.fit(model, optimizer, disk=str(folder), **how):
        for _ in range(num_steps):
            model(torch.randn(16, 24))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest_of(model, optimizer), None


def fits(folder: Path, *, num_fits: int = 50) -> Iterator[tuple[str, str, str]]:
    """Yields one outcome: so many sessions in this process leave the same weights, and nothing else behind.

    What the first ten leave is not counted: libraries load, and the heap finds its size.
    """
    expected: dict[bool, str] = {}
    for number in range(num_fits):
        is_planned = number % 2 == 1
        digest, _ = _train(folder, 3, is_planned=is_planned)
        if digest != expected.setdefault(is_planned, digest):
            yield f"fit {number + 1}", "different", ""
        if number + 1 == _WARM_FITS:
            before = held_now(folder)
    grown = held_now(folder).grown_since(before)
    if expected[False] != expected[True]:
        yield "plain and planned", "different", ""
    is_flat = grown["resident_bytes"] < 4 << 20 and not (grown["num_handles"] or grown["num_threads"])
    yield f"{num_fits} fits", "flat" if is_flat else "grows", str(grown)


def soak(folder: Path, *, minutes: float) -> dict[str, Any]:
    """Trains under a plan for so long; returns what was held after a tenth of it and at the end."""
    model, optimizer = made()
    begin, num_steps, before = time.monotonic(), 0, None
    with memwall.fit(model, optimizer, plan=_plan(model), disk=str(folder)):
        for number in itertools.count():
            model(torch.randn(16, 24))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            num_steps = number + 1
            passed = time.monotonic() - begin
            if before is None and passed > 6 * minutes:
                before = held_now(folder)
            if before is not None and passed > 60 * minutes:
                break
        after = held_now(folder)
    grown = after.grown_since(before)
    return {
        "minutes_of_60_seconds": minutes,
        "num_steps": num_steps,
        "after_a_tenth": dict(before),
        "at_the_end": dict(after),
        "grown": grown,
        "is_flat": grown["resident_bytes"] < 8 << 20 and not (grown["num_handles"] or grown["num_threads"]),
    }
