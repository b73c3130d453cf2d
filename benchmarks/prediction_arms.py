"""What `prediction.py` compares on the zoo: memwall, libraries that estimate, and the step itself as it runs.

Each arm takes a workload and answers in bytes of live CPU tensors at the highest point of the first two steps. An arm
that cannot answer raises `NoAnswer` with the reason.
"""

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_steps import record_fake
from prediction_zoo import Batch
from torch import Tensor, nn

from memwall.predict.curve import live_peak_bytes
from memwall.trace.workload import Workload
from memwall.trace.workspaces import Workspaces

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "trace"))
from oracle import count_allocations


class NoAnswer(Exception):
    """An arm has nothing to say about a case."""


def measured(workload: Workload) -> dict[str, int]:
    """Bytes live at most in the first step and in a steady one, by the allocator's own events.

    torch's profiler counts them (`tests/trace/oracle.py`), which shares no code with the recorder.
    """
    model, batch = workload.make_model(), workload.make_batch()
    optimizer = workload.make_optimizer(model)
    standing = [*model.parameters(), *model.buffers(), *batch.values()]

    def step() -> None:
        _train(workload, model, batch, optimizer)

    first = count_allocations(step, [*standing, *_state(optimizer)])
    steady = count_allocations(step, [*standing, *_state(optimizer)], warm_steps=1)
    return {"first_bytes": first.peak_bytes, "steady_bytes": steady.peak_bytes}


def memwall(workload: Workload, workspaces: Workspaces, mask_share: float | None) -> dict[str, Any]:
    """Two steps recorded on fake tensors.

    Args:
        workspaces: of operators, measured once for cases of the same shapes.
    """
    begin = time.perf_counter()
    trace = record_fake(workload, workspaces=workspaces, mask_share=mask_share)
    seconds = time.perf_counter() - begin
    first, steady = (live_peak_bytes(step, "cpu") for step in trace.steps)
    return {"first_bytes": first, "steady_bytes": steady, "seconds": seconds}


def mem_tracker(workload: Workload) -> int:
    """torch's own tracker over fake tensors, as its documentation runs it; the model is made with values."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    model, batch = workload.make_model(), workload.make_batch()
    mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), MemTracker()
    try:
        with mode:
            with FakeCopyMode(mode):
                model = copy.deepcopy(model)
            batch = {name: mode.from_tensor(value) for name, value in batch.items()}
            optimizer = workload.make_optimizer(model)
            tracker.track_external(model, optimizer, *batch.values())
            with tracker:
                for _ in range(2):
                    _train(workload, model, batch, optimizer)
                    tracker.reset_mod_stats()
    except Exception as error:  # whatever a private tool trips over
        raise NoAnswer(f"MemTracker: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def accelerate_estimate(workload: Workload) -> int:
    """`accelerate estimate-memory`'s "training with Adam": the largest of its four figures."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError as error:
        raise NoAnswer("accelerate is not installed") from error
    model = workload.make_model()
    item_bytes = next(model.parameters()).element_size()
    num_bytes = calculate_maximum_sizes(model)[0] * 4 // item_bytes  # the command loads models in float32
    return int(max(estimate_training_usage(num_bytes, "float32" if item_bytes == 4 else "bfloat16").values()))


def deepspeed_estimate(workload: Workload) -> int:
    """DeepSpeed's ZeRO-2 estimate of model states on one GPU, without offload."""
    try:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError as error:
        raise NoAnswer("deepspeed is not installed") from error
    num_parameters = sum(parameter.numel() for parameter in workload.make_model().parameters())
    return int(estimate_zero2_model_states_mem_needs(num_parameters, 1, 1, cpu_offload=False)[1])


LIBRARIES: dict[str, Callable[[Workload], int]] = {
    "MemTracker": mem_tracker,
    "accelerate": accelerate_estimate,
    "DeepSpeed": deepspeed_estimate,
}


def two_probes(sizes: tuple[int, int], peaks_bytes: tuple[int, int], asked: int) -> int:
    """A line through two measured peaks, in samples."""
    slope = (peaks_bytes[1] - peaks_bytes[0]) / (sizes[1] - sizes[0])
    return round(peaks_bytes[1] + slope * (asked - sizes[1]))


def _train(workload: Workload, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    workload.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
