"""Runs that others measured, and what memwall says of each without their device: the external truth of `prediction.py`.

    python benchmarks/prediction_runs.py CSV FAMILY      # run by prediction.py; one JSON object per row

The file is a selection of GPUMemNet's measurements (Yousefzadeh-Asl-Miandoab et al., EuroMLSys '26, doi
10.1145/3805621.3807621, CC BY 4.0 as far as known): timm models in training on an A100 with 40 GB, and the highest
used memory that nvidia-smi showed for the card. Optimizer, precision and versions were not recorded; memwall is asked
for float32 and SGD with momentum and weight decay, which the file's own README names as probable, and for no setting
that a look at the errors suggested.
"""

import csv
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fake_steps import record_fake
from msgspec import Struct, ValidationError, convert
from prediction_child import own_standard_output
from torch import Tensor, nn

from memwall.errors import MemwallError, UsageError
from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.curve import live_peak_bytes
from memwall.predict.device import convolution_bytes
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

DEVICE = "a100-40gb"
ALLOCATOR = "2.11"
"""The oldest release whose allocator memwall knows. With which one the runs were measured is not recorded; 2.6 was
current when the repository published the sheet."""
TIMM = "1.0.12"
"""What the file's input sizes and parameter counts were read from."""


class Run(Struct, frozen=True):
    """One row: a model at a batch size, and what the card showed."""

    model: str
    family: str
    kind: str
    batch_size: int
    input_shape: str
    params: int
    fake_peak_mib: float
    measured_gpu_mib: int
    flag: str

    @property
    def key(self) -> str:
        return f"{self.model}/{self.batch_size}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = (int(size) for size in self.input_shape.split("x"))
        return channels, height, width


def read_runs(path: Path) -> list[Run]:
    """The rows of the file.

    Raises:
        UsageError: the file is missing or has other columns.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}; expected the CSV of measured runs (see benchmarks/README.md)")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [convert(row, Run, strict=False) for row in rows]
    except ValidationError as error:
        raise UsageError(f"{path}: {error}; expected columns {', '.join(Run.__struct_fields__)}") from error


def file_sha256(path: Path) -> str:
    """Hash of the file: what a result was compared with."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def predicted(run: Run) -> dict[str, Any]:
    """What memwall says of a run's first steps: simulated, in bytes.

    Raises:
        MemwallError: the model's step can't be recorded without data.
    """
    begin = time.perf_counter()
    trace = translated_trace(run)
    recorded = time.perf_counter()
    reserved_bytes = reserved_bytes_of(trace)
    return {
        "key": run.key,
        "live_bytes": max(live_peak_bytes(step, "cuda") for step in trace.steps[:2]),
        "reserved_bytes": reserved_bytes,
        "convolution_bytes": convolution_bytes(trace),
        "record_seconds": recorded - begin,
        "simulate_seconds": time.perf_counter() - recorded,
    }


def translated_trace(run: Run) -> Trace:
    """Returns a run's first steps, recorded on fake tensors and translated."""
    hardware = hardware_named(DEVICE)
    recording = recording_for(hardware)
    trace = record_fake(
        workload_of(run), target="cuda", workspaces=recording.workspaces, choices=recording.choices(), mask_share=0.5
    )
    return translated(trace, hardware)


def reserved_bytes_of(trace: Trace) -> int:
    """Returns what the allocator would reserve in a first step and steady ones."""
    peaks = step_peaks((trace.steps[0], trace.steps[1]), profile_for(ALLOCATOR)[0])
    assert peaks is not None, "a simulated device without end has memory for everything"
    return max(peak.reserved_bytes for peak in peaks)


def workload_of(run: Run) -> Workload:
    """Returns the training step of a run."""
    return Workload(
        model=partial(_model, run.model),
        batch=partial(_batch, run.batch_size, run.shape),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    )


def _model(name: str) -> nn.Module:
    from timm import create_model

    model: nn.Module = create_model(name, pretrained=False)
    return model.train()


def _batch(size: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Images, for which no memory is taken, and their classes."""
    return torch.empty(size, *shape).normal_(), torch.zeros(size, dtype=torch.long)


def import_timm() -> str:
    """Imports timm and returns its version.

    Raises:
        UsageError: it is not installed, or does not import.
    """
    # timm imports torchvision, whose wheel for CUDA has no operators beside a CPU build of torch. Models call none of
    # them, but registering their fake versions needs the names.
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass  # timm's own import says it below
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _NAMES.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
    except ImportError as error:
        raise UsageError(
            f"the models of the measured runs are timm's, which does not import ({error}); "
            f"pip install timm=={TIMM} torchvision"
        ) from error
    return str(timm.__version__)


_NAMES = torch.library.Library("torchvision", "FRAGMENT")


def main(arguments: Sequence[str]) -> None:
    """Predicts the rows of one family, or of the models named after it."""
    path, family, *models = arguments
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with own_standard_output() as lines:
        import_timm()
        for run in read_runs(Path(path)):
            if run.family != family or (models and run.model not in models):
                continue
            try:
                answer = predicted(run)
            except MemwallError as error:
                answer = {"key": run.key, "failure": str(error)}
            print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
