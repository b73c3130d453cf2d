"""One training run of the zoo on this machine's GPU, in a process of its own: run by `gpu_truth.py`.

    python benchmarks/gpu_truth_case.py llama bfloat16 adamw-foreach --device h200 < ORDER

Predicts before CUDA starts, then waits for its order, a line of JSON: `used_bytes`, what the device holds without this
process, and perhaps `limit_bytes`, what it may reserve. Prints one JSON object: what memwall predicts for the device,
and what torch and the driver count while the run trains.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from gpu_device import is_phantom
from msgspec.structs import replace
from prediction_child import own_standard_output
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, Precision, workload

from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import Hardware, hardware_named
from memwall.patches import Patches
from memwall.planning.estimate import estimate
from memwall.trace.fake import RecordedRun

NUM_STEADY = 3
SAMPLES_FACTOR = 8
"""The zoo is made for a CPU core; so many times its batch, peaks are not the allocator's smallest segments alone."""

_PEAKS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
    "requested_bytes": "requested_bytes.all.peak",
    "small_reserved_bytes": "reserved_bytes.small_pool.peak",
}
"""Holds what torch's allocator counts of a step, by the names that its statistics have."""


def translated_run(family: str, precision: Precision, optimizer: str, hardware: Hardware) -> RecordedRun:
    """Returns the steps of a case of the zoo, and an evaluation, as they would run on a card. Simulated."""
    chosen = FAMILIES[family]
    return device_run_of_spec(
        workload(family, optimizer, precision, SAMPLES_FACTOR * chosen.num_samples),
        hardware,
        mask_share=chosen.mask_share,
    )


def predicted(family: str, precision: Precision, optimizer: str, hardware: Hardware) -> dict[str, int]:
    """Allocated, reserved and process bytes by memwall, at the peak of the run's steps. Simulated."""
    found = estimate(translated_run(family, precision, optimizer, hardware).training, hardware)
    return {
        "allocated_bytes": found.peak.allocated_bytes,
        "reserved_bytes": found.peak.reserved_bytes or 0,
        "process_bytes": found.peak.process_bytes,
        "margin_bytes": found.margin_bytes,
    }


def measured(
    family: str, precision: Precision, optimizer: str, used_bytes: int, limit_bytes: int | None = None
) -> dict[str, Any]:
    """Peaks of the first step and of steady ones by torch's allocator, and of the process by the driver.

    Args:
        used_bytes: what the device held before this process came.
        limit_bytes: what may be reserved; a run that needs more has `outcome` "out of memory" and nothing else.
    """
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        with as_with_values() if is_phantom() else nullcontext():
            peaks, seconds = _trained(family, precision, optimizer)
    except torch.cuda.OutOfMemoryError:
        return {"outcome": "out of memory"}
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if limit_bytes is None:
        # The allocator gave nothing back meanwhile, or the driver's figure now were not that of the peak.
        assert torch.cuda.memory_reserved() == max(p["reserved_bytes"] for p in peaks), "segments were released"
    return {
        "outcome": "finished",
        "first": peaks[0],
        "steady": {name: max(peak[name] for peak in peaks[1:]) for name in _PEAKS},
        **{name: max(peak[name] for peak in peaks) for name in _PEAKS},
        "process_bytes": total_bytes - free_bytes - used_bytes,
        "num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "step_seconds": median(seconds[1:]),
    }


@contextmanager
def as_with_values() -> Iterator[None]:
    """Has transformers hear what a device would tell it: that positions do not restart within a row.

    Kernels do nothing on the phantom device, and all positions read as 0. What the question allocates is allocated.
    """
    from transformers import masking_utils

    def asked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)

    with Patches("trains on a device whose kernels do nothing") as patches:
        patches.wrap(masking_utils, "find_packed_sequence_indices", asked)
        yield


def _trained(family: str, precision: Precision, optimizer: str) -> tuple[list[dict[str, int]], list[float]]:
    """Returns the peaks of each step by torch's allocator, see `_PEAKS`, and its seconds."""
    chosen = FAMILIES[family]
    run = workload(family, optimizer, precision, SAMPLES_FACTOR * chosen.num_samples)
    model = run.make_model().to("cuda")
    batch = {name: value.to("cuda") for name, value in run.make_batch().items()}
    made = OPTIMIZERS[optimizer](model.parameters())
    peaks, seconds = [], []
    for _ in range(1 + NUM_STEADY):
        begin = time.perf_counter()
        peaks.append(train_step((family, precision, optimizer), model, made, batch))
        seconds.append(time.perf_counter() - begin)
    return peaks, seconds


def train_step(
    case: tuple[str, ...], model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> dict[str, int]:
    """Runs one step of a case on the device; returns its peaks, see `_PEAKS`."""
    family, precision, _ = case
    torch.cuda.reset_peak_memory_stats()
    # The zoo's own loss casts for a CPU.
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast-bfloat16"):
        loss = FAMILIES[family].loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del loss
    torch.cuda.synchronize()
    return peaks_now()


def peaks_now() -> dict[str, int]:
    """Returns the peaks by torch's allocator since they were reset last, see `_PEAKS`."""
    found = torch.cuda.memory_stats()
    return {name: found[statistic] for name, statistic in _PEAKS.items()}


def main() -> None:
    """Standard output carries nothing but the one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("--device", type=hardware_named, help="without it nothing is predicted")
    parser.add_argument("--context-bytes", type=int, nargs=2, metavar=("LEAST", "MOST"), help="as measured here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    case = {"family": options.family, "precision": options.precision, "optimizer": options.optimizer}
    hardware = options.device
    if hardware is not None and options.context_bytes:
        hardware = replace(hardware, context_bytes=tuple(options.context_bytes))
    with own_standard_output() as lines:
        ours = predicted(**case, hardware=hardware) if hardware is not None else None
        order = json.loads(sys.stdin.readline())
        print(json.dumps({**case, "predicted": ours, "measured": measured(**case, **order)}), file=lines, flush=True)


if __name__ == "__main__":
    main()
