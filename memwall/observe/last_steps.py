"""Reads the last steps of a run from the JSON lines that `memwall run --metrics` writes, while it writes them."""

from pathlib import Path

import msgspec

from memwall.errors import UsageError
from memwall.session.watch.step_metrics import StepMetrics

_MOST_BYTES = 64 << 10
"""The part at the end of the file that is read: a step has some 300 bytes."""


def last_steps(path: Path) -> list[StepMetrics]:
    """Returns the last steps in a file, the oldest first; a line that is being written is left out.

    Raises:
        UsageError: it cannot be read, or is no file of steps.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            file.seek(max(0, num_bytes - _MOST_BYTES))
            *lines, _ = file.read().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read the metrics {path}: {error.strerror or error}") from error
    if num_bytes > _MOST_BYTES:
        del lines[:1]  # its beginning is missing
        if not lines:
            raise _no_steps(path, f"one line of more than {_MOST_BYTES} bytes")
    decoder = msgspec.json.Decoder(StepMetrics)
    try:
        return [decoder.decode(line) for line in lines]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_steps(path, f"a line that is none ({error})") from error


def _no_steps(path: Path, found: str) -> UsageError:
    return UsageError(f"{path} holds no steps of a run: expected the file of memwall run --metrics FILE, found {found}")
