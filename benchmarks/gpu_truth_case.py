"""One training run of the zoo on this machine's GPU, in a process of its own: run by `gpu_truth.py`.

    python benchmarks/gpu_truth_case.py llama bfloat16 adamw-foreach --used-bytes N --device h200 [--history FILE]

Prints one JSON object: what memwall predicts for the device, made before CUDA starts, and what torch and the driver
count while the run trains.
"""

import argparse
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prediction_child import own_standard_output
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, Precision, workload

from memwall.plan.estimate import estimate
from memwall.predict.hardware import Hardware, hardware_named
from memwall.predict.roofline import Roofline
from memwall.predict.translate import recording_for, translated
from memwall.trace.fake import record_fake

NUM_STEADY = 3
SAMPLES_FACTOR = 8
"""The zoo is made for a CPU core; so many times its batch, peaks are not the allocator's smallest segments alone."""
_MOST_EVENTS = 2_000_000


def predicted(family: str, precision: Precision, optimizer: str, hardware: Hardware) -> dict[str, int]:
    """Allocated, reserved and process bytes by memwall, at the peak of the run's steps. Simulated."""
    chosen = FAMILIES[family]
    recording = recording_for(hardware)
    trace = record_fake(
        workload(family, optimizer, precision, SAMPLES_FACTOR * chosen.num_samples),
        target="cuda",
        seconds_of=Roofline(hardware),
        mask_share=chosen.mask_share,
        workspaces=recording.workspaces,
        choices=recording.choices(),
    )
    found = estimate(translated(trace, hardware, autocast=recording.autocast), hardware)
    return {
        "allocated_bytes": found.peak.allocated_bytes,
        "reserved_bytes": found.peak.reserved_bytes or 0,
        "process_bytes": found.peak.process_bytes,
        "margin_bytes": found.margin_bytes,
    }


def measured(
    family: str, precision: Precision, optimizer: str, used_bytes: int, history: Path | None
) -> dict[str, Any]:
    """Peaks of the first step and of steady ones by torch's allocator, and of the process by the driver.

    Args:
        used_bytes: what the device held before this process came.
        history: file for a snapshot with every allocation since before the model was built.
    """
    if history is not None:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, context=None)
    chosen = FAMILIES[family]
    run = workload(family, optimizer, precision, SAMPLES_FACTOR * chosen.num_samples)
    model = run.make_model().to("cuda")
    batch = {name: value.to("cuda") for name, value in run.make_batch().items()}
    made = OPTIMIZERS[optimizer](model.parameters())
    peaks = []
    for _ in range(1 + NUM_STEADY):
        torch.cuda.reset_peak_memory_stats()
        # The zoo's own loss casts for a CPU.
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast-bfloat16"):
            loss = chosen.loss(model, batch)
        loss.backward()
        made.step()
        made.zero_grad(set_to_none=True)
        del loss
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    # The allocator gave nothing back meanwhile, or the driver's figure now were not that of the peak.
    assert torch.cuda.memory_reserved() == max(reserved for _, reserved in peaks), "segments were released"
    if history is not None:
        torch.cuda.memory._dump_snapshot(str(history))
    return {
        "first": {"allocated_bytes": peaks[0][0], "reserved_bytes": peaks[0][1]},
        "steady": {
            "allocated_bytes": max(allocated for allocated, _ in peaks[1:]),
            "reserved_bytes": max(reserved for _, reserved in peaks[1:]),
        },
        "allocated_bytes": max(allocated for allocated, _ in peaks),
        "reserved_bytes": max(reserved for _, reserved in peaks),
        "process_bytes": total_bytes - free_bytes - used_bytes,
    }


def main() -> None:
    """Standard output carries nothing but the one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("--used-bytes", type=int, required=True)
    parser.add_argument("--device", type=hardware_named, required=True)
    parser.add_argument("--history", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    case = {"family": options.family, "precision": options.precision, "optimizer": options.optimizer}
    train = partial(measured, **case, used_bytes=options.used_bytes, history=options.history)
    with own_standard_output() as lines:
        ours = predicted(**case, hardware=options.device)
        print(json.dumps({**case, "predicted": ours, "measured": train()}), file=lines, flush=True)


if __name__ == "__main__":
    main()
