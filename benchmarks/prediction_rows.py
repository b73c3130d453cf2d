"""Twenty runs of others whose settings are known, row by row: too few for percentages over them.

    python benchmarks/prediction_rows.py      # run by prediction.py; one JSON object per row

T4: torch-preflight's calibration (docs/vram-estimation.md, tests/calibration/measure_cuda.py): mixed precision, AdamW;
measured is max_reserved after a warm-up step + 135 MiB of context. Which of the half-precision types autocast used was
not recorded, and on a T4 it decides the attention kernel: torch gives bfloat16 to the math kernel alone. So each row is
predicted with both.

CNN: GPUMemNet's twelve runs of `Results_plotter_for_paper/data.csv`: float32, Adam, 224 pixels (Inception 299); device
and meter not stated, taken as an A100's as in `prediction_runs.py`. Models here are timm's, which leave out Inception's
auxiliary head.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fake_steps import record_fake
from msgspec import Struct
from prediction_child import own_standard_output
from prediction_runs import ALLOCATOR, import_timm
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.trace.workload import Workload

_MIB, _GIB = 1 << 20, 1 << 30
T4_CONTEXT_BYTES = 135 * _MIB


class KnownRun(Struct, frozen=True, kw_only=True):
    """A run, and what was measured."""

    source: str
    model: str
    batch_size: int
    size: int
    """Tokens of a sample, or pixels of an image's side."""
    measured_bytes: int
    theirs_bytes: int
    """The estimate published with it."""


def _t4(model: str, batch: int, size: int, measured_gib: float, theirs_gib: float) -> KnownRun:
    return KnownRun(
        source="T4",
        model=model,
        batch_size=batch,
        size=size,
        measured_bytes=round(measured_gib * _GIB),
        theirs_bytes=round(theirs_gib * _GIB),
    )


def _cnn(model: str, size: int, few: tuple[int, int], many: tuple[int, int]) -> Iterator[KnownRun]:
    for batch, (measured_mib, theirs_mib) in ((32, few), (128, many)):
        yield KnownRun(
            source="CNN",
            model=model,
            batch_size=batch,
            size=size,
            measured_bytes=measured_mib * _MIB,
            theirs_bytes=theirs_mib * _MIB,
        )


KNOWN_RUNS = (
    _t4("gpt2", 4, 128, 2.97, 3.04),
    _t4("gpt2", 8, 256, 5.81, 5.09),
    _t4("bert", 4, 128, 2.44, 2.39),
    _t4("bert", 8, 256, 3.38, 3.33),
    _t4("distilbert", 4, 128, 1.53, 1.48),
    _t4("distilbert", 8, 256, 1.95, 1.94),
    _t4("resnet50", 16, 224, 1.24, 1.31),
    _t4("resnet50", 32, 224, 1.99, 2.02),
    *_cnn("vgg16", 224, (8222, 3121), (24408, 9894)),
    *_cnn("resnet50", 224, (5262, 2673), (15120, 10666)),
    *_cnn("legacy_xception", 224, (7202, 4166), (22978, 16642)),
    *_cnn("mobilenetv2_100", 224, (4544, 2425), (12578, 9686)),
    *_cnn("efficientnet_b0", 224, (4958, 2730), (13832, 10905)),
    *_cnn("inception_v3", 299, (6346, 1590), (19018, 6298)),
)


def predicted(run: KnownRun, dtype: torch.dtype | None) -> int:
    """What memwall says is reserved, in bytes.

    Args:
        dtype: autocast's; None without it.
    """
    hardware = hardware_named("t4" if run.source == "T4" else "a100-40gb")
    recording = recording_for(hardware)
    workload = _workload(run, dtype)
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    trace = translated(trace, hardware, autocast=recording.autocast)
    profile = profile_for(ALLOCATOR)[0]
    peaks = step_peaks((trace.steps[0], trace.steps[1]), profile)
    assert peaks is not None, "a simulated device without end has memory for everything"
    return max(peak.reserved_bytes for peak in peaks)


def _workload(run: KnownRun, dtype: torch.dtype | None) -> Workload:
    make: Callable[[], nn.Module]
    if run.model in _TEXT:
        make, batch, plain_loss = partial(_text_model, run.model), partial(_text, run), _TEXT[run.model][2]
    else:
        make, batch, plain_loss = partial(_image_model, run.model), partial(_images, run), _image_loss

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return plain_loss(model, batch)

    is_adamw = run.source == "T4"
    optimizer = partial(torch.optim.AdamW if is_adamw else torch.optim.Adam, lr=1e-5 if is_adamw else 1e-3)
    return Workload(model=make, batch=batch, loss=loss, optimizer=optimizer)


def _image_model(name: str) -> nn.Module:
    from timm import create_model

    model: nn.Module = create_model(name, pretrained=False)
    return model.train()


def _images(run: KnownRun) -> dict[str, Tensor]:
    images = torch.empty(run.batch_size, 3, run.size, run.size).normal_()
    return {"images": images, "classes": torch.zeros(run.batch_size, dtype=torch.long)}


def _image_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["classes"])


def _text_model(name: str) -> nn.Module:
    import transformers

    model_class = getattr(transformers, _TEXT[name][0])
    model: nn.Module = model_class._from_config(model_class.config_class(use_cache=False))
    return model.train()


def _text(run: KnownRun) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, _TEXT[run.model][1], (run.batch_size, run.size))}


def _labelled_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
    return loss


def _bare_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).last_hidden_state.square().mean()
    return loss


_TEXT: dict[str, tuple[str, int, Callable[[Any, Any], Tensor]]] = {
    "gpt2": ("GPT2LMHeadModel", 50257, _labelled_loss),
    "bert": ("BertModel", 30522, _bare_loss),
    "distilbert": ("DistilBertModel", 30522, _bare_loss),
}


def main() -> None:
    """Predicts every row; on a T4 with both types."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with own_standard_output() as lines:
        import_timm()
        for run in KNOWN_RUNS:
            has_both = run.source == "T4" and run.model in _TEXT
            dtypes = (torch.float16, torch.bfloat16) if has_both else (torch.float16 if run.source == "T4" else None,)
            for dtype in dtypes:
                answer = {
                    "source": run.source,
                    "model": run.model,
                    "batch_size": run.batch_size,
                    "size": run.size,
                    "autocast": str(dtype).removeprefix("torch.") if dtype else "none",
                    "measured_bytes": run.measured_bytes,
                    "theirs_bytes": run.theirs_bytes,
                    "reserved_bytes": predicted(run, dtype),
                }
                print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main()
