"""Says what a trace was recorded with, in the words that a forecast repeats: dtype, optimizer, batch and length."""

from collections import Counter
from typing import Literal

from msgspec import Struct

from memwall.trace.records import Trace
from memwall.trace.steps import steady_step


class WorkloadFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the training step that a forecast is for: what was asked for, and what was assumed where nothing was."""

    dtype: str
    """Names those of the parameters, the one with most bytes first, as "bfloat16 + float32"; "" if the
    trace does not say."""
    autocast: Literal["none", "bfloat16", "float16"]
    optimizer: str
    """Its class; of several all of them, as "Muon + AdamW"."""
    micro_batch: int
    """Samples in one forward; 0 if it could not be told."""
    num_micro_batches: int
    """Forwards and backwards in a step."""
    input_shape: tuple[int, ...] = ()
    """Holds that of the first tensor that the model is called with; () if it is not known."""
    tokens_per_sample: int | None = None
    """The length of that tensor where it is [samples, tokens] of whole numbers; None for other inputs."""


def workload_facts(trace: Trace, *, num_micro_batches: int | None = None) -> WorkloadFacts:
    """Returns what is known of the step that a trace holds.

    Args:
        num_micro_batches: forwards and backwards in a step, where fewer of them were recorded; None: as recorded.
    """
    num_bytes: Counter[str] = Counter()
    for storage in steady_step(trace).storages:
        if storage.category == "parameter" and storage.dtype:
            num_bytes[storage.dtype] += storage.nbytes
    shape = trace.input_shape
    is_text = len(shape) == 2 and trace.input_dtype in ("int32", "int64")
    return WorkloadFacts(
        dtype=" + ".join(sorted(num_bytes, key=lambda name: (-num_bytes[name], name))),
        autocast=trace.autocast,
        optimizer=trace.optimizer,
        micro_batch=trace.micro_batch,
        num_micro_batches=num_micro_batches or trace.num_micro_batches,
        input_shape=shape,
        tokens_per_sample=shape[1] if is_text else None,
    )
