"""Holds what a process on the phantom device is asked, and what it answers: files in a folder of their own."""

from typing import Any

from msgspec import Struct

REQUEST, ANSWER, TRAINING, EVALUATION = "request.json", "answer.json", "training.trace", "evaluation.trace"


class Request(Struct, frozen=True, kw_only=True):
    """Holds what is to be recorded."""

    spec: str
    device: str
    """Name of the card, as in hardware.toml."""
    eval_batch: int | None
    mask_share: float | None
    num_micro_batches: int
    options: dict[str, Any]
    """Holds what `workload_of_spec` is told."""


class Answer(Struct, frozen=True, kw_only=True):
    """Holds how the recording went; the traces lie beside it."""

    error: str = ""
    """Says to the user why there is none; "" where the step was recorded."""
    is_usage: bool = False
    """Whether that is an error of what the user gave."""
    failure: str = ""
    """Why there is no evaluation."""
