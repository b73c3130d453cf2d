"""Trains for long, and again and again, in one process: what it holds stays flat. A part of benchmarks/faults.py."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faults_instants import Instant
from faults_runs import digest_of, made, plan_for

import memwall

__all__ = ["Held", "fits", "held_now", "soak"]

_NUM_FITS, _WARM_FITS = 50, 10


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


def _train(folder: Path, num_steps: int, *, is_planned: bool) -> str:
    model, optimizer = made()
    how: dict[str, Any] = {"plan": plan_for(model)} if is_planned else {"budget": "1TiB"}
    with memwall.fit(model, optimizer, disk=str(folder), **how):
        for _ in range(num_steps):
            model(torch.randn(16, 24))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest_of(model, optimizer)


def fits(folder: Path) -> Iterator[Instant]:
    """Yields one instant: fifty sessions in this process leave the same weights, and nothing else behind."""
    name = f"{_NUM_FITS} in one process"
    yield Instant(name, (name,), partial(_many_fits, folder))


def _many_fits(folder: Path) -> list[tuple[str, str]]:
    """Counts from the tenth on: libraries load, and the heap finds its size."""
    expected: dict[bool, str] = {}
    before = held_now(folder)
    for number in range(_NUM_FITS):
        is_planned = number % 2 == 1
        digest = _train(folder, 3, is_planned=is_planned)
        if digest != expected.setdefault(is_planned, digest):
            return [("different", f"fit {number + 1}, {is_planned=}")]
        if number + 1 == _WARM_FITS:
            before = held_now(folder)
    grown = held_now(folder).grown_since(before)
    if expected[False] != expected[True]:
        return [("different", "plain and planned")]
    is_flat = grown["resident_bytes"] < 4 << 20 and not (
        grown["num_handles"] or grown["num_threads"] or grown["disk_bytes"]
    )
    return [("flat" if is_flat else "grows", str(grown))]


def soak(folder: Path, *, minutes: float) -> dict[str, Any]:
    """Trains under a plan for so long; returns what was held after a tenth of it and at the end."""
    model, optimizer = made()
    begin, num_steps, before = time.monotonic(), 0, None
    with memwall.fit(model, optimizer, plan=plan_for(model), disk=str(folder)):
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
