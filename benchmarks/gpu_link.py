"""How fast bytes go between this machine's GPU and its memory, and how much of that training hides.

    python benchmarks/gpu_link.py [--seconds N] [--tiny] [--output FILE]

Copies by size, from and to pageable, pinned and memwall's own pinned memory, one way and both ways at once, alone and
beside matmuls; what `probe_link`, on which plans count, says of the same link; and a chain of layers whose saved
tensors leave for pinned memory and come back: what of their way does not show in the step. On the phantom device all
times are its model's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_device import device_name, hardware_here, has_device, slug_of, tag
from knob_report import provenance
from torch import Tensor

from memwall.apply.offload.engine import ActivationOffload
from memwall.machine.link_speed import probe_link
from memwall.store.pinned_arena import PinnedArena

MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64, 256)
LEAST_SHARE = 0.8
"""The share of the data sheet's rate that pinned copies of the largest size should reach one way."""
MOST_ERROR = 0.2
"""The most that the rate that plans count on may be above large copies."""
_LAYERS = 12
Way = tuple[str, str]
WAYS: tuple[Way, ...] = (
    ("pageable", "to host"),
    ("pageable", "to device"),
    ("pinned", "to host"),
    ("pinned", "to device"),
    ("arena", "to host"),
    ("arena", "to device"),
    ("arena", "both"),
    ("arena", "both beside matmuls"),
)


def timed(run: Callable[[], object], num_repetitions: int) -> float:
    """Returns the median seconds of a function's work on the device."""
    found = []
    for _ in range(num_repetitions + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(found[1:])


class _Copies:
    """Copies of one size: host memory of three kinds, and a stream for each direction."""

    def __init__(self, size_bytes: int, matrix_width: int) -> None:
        def on_device() -> Tensor:
            return torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")

        self._arena = PinnedArena(2 * size_bytes + 64 * MIB, chunk_bytes=0, device=torch.device("cuda", 0))
        self._host = {
            "pageable": [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2)],
            "pinned": [torch.zeros(size_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)],
            "arena": [self._arena.allocate(size_bytes).memory for _ in range(2)],
        }
        self._device = [on_device(), on_device()]
        self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self._matrix = torch.zeros(matrix_width, matrix_width, device="cuda", dtype=torch.bfloat16)

    def run(self, kind: str, way: str) -> None:
        """Copies once; the current stream waits for the end of it."""
        main = torch.cuda.current_stream()
        ways = {"to host": (0,), "to device": (1,)}.get(way, (0, 1))
        for index in ways:
            stream, host, device = self._streams[index], self._host[kind][index], self._device[index]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                target, source = (host, device) if index == 0 else (device, host)
                target.copy_(source, non_blocking=kind != "pageable")
        if way.endswith("matmuls"):
            self.multiply()
        for index in ways:
            main.wait_stream(self._streams[index])

    def multiply(self) -> None:
        """Keeps the multiprocessors busy."""
        for _ in range(4):
            self._matrix @ self._matrix

    def close(self) -> None:
        """Gives the pinned memory back."""
        torch.cuda.synchronize()
        self._arena.close()


def copy_rows(sizes_bytes: tuple[int, ...], num_repetitions: int, stop: float, width: int) -> Iterator[dict[str, Any]]:
    """Yields the rate of each kind of copy, the largest first, as long as there is time."""
    for size_bytes in sorted(sizes_bytes, reverse=True):
        if time.monotonic() > stop:
            return
        copies = _Copies(size_bytes, width)
        alone_seconds = timed(copies.multiply, num_repetitions)
        for kind, way in WAYS:
            seconds = timed(lambda kind=kind, way=way, copies=copies: copies.run(kind, way), num_repetitions)  # type: ignore[misc]
            moved_bytes = size_bytes * (2 if way.startswith("both") else 1)
            row = {"kind_of_memory": kind, "way": way, "size_bytes": size_bytes, "seconds": seconds}
            row["bytes_per_second"] = moved_bytes / seconds
            if way.endswith("matmuls"):
                row["matmul_seconds_alone"] = alone_seconds
            yield row
        copies.close()


def offload_row(width: int, num_repetitions: int) -> dict[str, Any]:
    """Trains a chain of layers plainly and with what they save in pinned memory; weights' gradients must be equal."""
    x = torch.linspace(-1, 1, width * width, device="cuda").reshape(width, width).div_(width).requires_grad_()
    saved_bytes = x.nbytes

    def step() -> None:
        x.grad = None
        y = x
        for _ in range(_LAYERS):
            y = (y @ x).sin()
        y.square().sum().backward()

    plain_seconds = timed(step, num_repetitions)
    assert x.grad is not None
    plain_grad = x.grad.clone()
    plain_peak_bytes = _peak_bytes(step)
    with ActivationOffload(
        None, window_bytes=4 * saved_bytes, min_bytes=saved_bytes, is_excluded=lambda tensor: tensor is x
    ) as offload:

        def offloaded() -> None:
            with offload.hooks():
                step()

        seconds = timed(offloaded, num_repetitions)
        peak_bytes = _peak_bytes(offloaded)
    return {
        "layers": _LAYERS,
        "saved_bytes": 2 * _LAYERS * saved_bytes,
        "plain_step_seconds": plain_seconds,
        "step_seconds": seconds,
        "plain_peak_bytes": plain_peak_bytes,
        "peak_bytes": peak_bytes,
        "is_gradient_equal": torch.equal(x.grad, plain_grad),
    }


def _peak_bytes(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def judged(document: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns what went wrong, and the goals that are not met."""
    failures, missed = [], []
    offload = document["offload"]
    if not offload["is_gradient_equal"]:
        failures.append("offload: gradients are not those of the plain step")
    if offload["peak_bytes"] >= offload["plain_peak_bytes"]:
        failures.append("offload: the peak is no lower than the plain step's")
    largest = max((row["size_bytes"] for row in document["rows"]), default=0)
    rates = {
        row["way"]: row["bytes_per_second"]
        for row in document["rows"]
        if (row["kind_of_memory"], row["size_bytes"]) == ("arena", largest)
    }
    for way, probed in (("to host", "write_bytes_per_second"), ("to device", "read_bytes_per_second")):
        if way not in rates:
            continue
        share, ratio = rates[way] / document["sheet_bytes_per_second"], document["probe"][probed] / rates[way]
        if share < LEAST_SHARE:
            missed.append(
                f"memwall's pinned memory {way}: {share:.0%} of the data sheet's rate, goal {LEAST_SHARE:.0%}"
            )
        if abs(ratio - 1) > MOST_ERROR:
            missed.append(f"probe_link {way}: {ratio:.2f} times the measured rate")
    return failures, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tiny", action="store_true", help="small copies, few repetitions")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not has_device("gpu_link"):
        return 2
    stop = time.monotonic() + options.seconds
    num_repetitions = 2 if options.tiny else 10
    sizes = (64 << 10, 4 * MIB) if options.tiny else tuple(mib * MIB for mib in SIZES_MIB)
    tier = probe_link(torch.device("cuda", 0), limit_bytes=256 * MIB)
    document: dict[str, Any] = {
        **provenance(),
        "schema": "memwall.gpu-link/1",
        "tag": tag(),
        "device": device_name(),
        "sheet_bytes_per_second": hardware_here().host_link_bytes_per_second,
        "probe": {
            "write_bytes_per_second": tier.write_bytes_per_second,
            "read_bytes_per_second": tier.read_bytes_per_second,
        },
        "offload": offload_row(256 if options.tiny else 4096, num_repetitions),
        "rows": list(copy_rows(sizes, num_repetitions, stop, 64 if options.tiny else 8192)),
    }
    reached = {row["size_bytes"] for row in document["rows"]}
    document["not_reached"] = [f"copies of {size // 1024} KiB" for size in sizes if size not in reached]
    document["failures"], missed = judged(document)
    document["missed"] = [] if options.tiny else missed
    output = options.output or Path(__file__).parent / "results" / slug_of(device_name()) / "link.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        size, rate = f"{row['size_bytes'] / MIB:8.2f} MiB", f"{row['bytes_per_second'] / 1e9:7.2f} GB/s"
        print(f"{size} {row['kind_of_memory']:<9} {row['way']:<20} {rate}")
    print(document["offload"])
    wrong = document["failures"] + document["missed"]
    print(f"wrote {output}; {'; '.join(wrong) or 'every goal is met'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
