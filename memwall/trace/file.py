"""The trace file: one line that says what it is, then zstandard-compressed MessagePack, decoded strictly.

Whoever reads a trace later follows its indices without looking, and a file may be damaged, or a stranger's: every index
has to point somewhere, and every number has to be what it can say.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from memwall.errors import TraceError
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes
from memwall.versioned_files import FileKind, whole_file

_KIND = FileKind(noun="trace", schema="memwall.trace", version=2, error=TraceError, way_out="record it again")
MAGIC = f"{_KIND.schema}/".encode()
# Traces shrink to a quarter, those of many equal layers further; a file made for it would grow 30,000-fold.
_LARGEST_RATIO = 200
_SMALL_BYTES = 64 << 20


def save_trace(trace: Trace, path: Path) -> None:
    """Writes a trace; a file half written never takes the place of a whole one.

    Raises:
        TraceError: the file cannot be written.
    """
    payload = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(msgspec.msgpack.encode(trace))
    with whole_file(path, noun="trace", error=TraceError, way_out="choose another -o FILE") as file:
        file.write(MAGIC + f"{_KIND.version}\n".encode() + payload)


def load_trace(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        TraceError: no such file, not a trace, another version, cut short or damaged; the message says which.
    """
    content = _KIND.read_bytes(path)
    head, newline, payload = content[:64].partition(b"\n")
    if not content.startswith(MAGIC) or not newline or not head[len(MAGIC) :].isdigit():
        raise TraceError(f"{path} is not a memwall trace; expected a file written by `memwall profile -o FILE`")
    _KIND.require_version(path, int(head[len(MAGIC) :]))
    payload = content[len(head) + 1 :]
    try:
        size_bytes = zstandard.frame_content_size(payload)
        if size_bytes > max(_SMALL_BYTES, _LARGEST_RATIO * len(payload)):
            raise TraceError(
                f"{path} is cut short or damaged (it claims to hold {format_bytes(size_bytes)} in "
                f"{format_bytes(len(payload))}); record it again"
            )
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=max(size_bytes, 1))
    except (zstandard.ZstdError, MemoryError) as error:  # its header may claim any size
        raise TraceError(
            f"{path} is cut short or damaged ({str(error) or 'it claims to be huge'}); record it again"
        ) from error
    try:
        trace = msgspec.msgpack.decode(data, type=Trace)
        _check_sound(trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise TraceError(f"{path} is not a valid trace: {error}; record it again") from error
    return trace


def _check_sound(trace: Trace) -> None:
    """Returns if this can be a trace."""
    for index, module in enumerate(trace.modules):
        if not -1 <= module.parent < index:  # whoever goes from a module to the root would otherwise not arrive there
            raise ValueError(
                f"module {index} has parent {module.parent}, expected one before it, or -1 - at `$.modules`"
            )
    for name in ("base_bytes", "workspace_bytes", "micro_batch", "num_micro_batches", "num_threads"):
        _check_range([getattr(trace, name)], 0, math.inf, f"$.{name}")
    for key, value in msgspec.structs.asdict(trace.machine).items():
        if isinstance(value, float):
            _check_range([value], -math.inf, math.inf, f"$.machine.{key}")
    for number, step in enumerate(trace.steps):
        _check_step(trace, step, f"$.steps[{number}]")


def _check_step(trace: Trace, step: Step, place: str) -> None:
    num_ops, last_storage, last_module = len(step.ops), len(step.storages) - 1, len(trace.modules) - 1
    ops, storages, saved, calls = step.ops, step.storages, step.saved, step.calls
    _check_range((op.name for op in ops), 0, len(trace.names) - 1, f"{place}.ops[...].name")
    _check_range((op.seconds for op in ops), 0, math.inf, f"{place}.ops[...].seconds")
    _check_range((op.flops for op in ops), 0, math.inf, f"{place}.ops[...].flops")
    for field in ("inputs", "outputs", "writes"):
        used = (index for op in ops for index in getattr(op, field))
        _check_range(used, 0, last_storage, f"{place}.ops[...].{field}")
    for rows, name in ((ops, "ops"), (storages, "storages"), (saved, "saved"), (calls, "calls")):
        modules: Iterable[Any] = (row.module for row in rows)
        _check_range(modules, -1, last_module, f"{place}.{name}[...].module")
    _check_range((s.nbytes for s in storages), 0, math.inf, f"{place}.storages[...].nbytes")
    _check_range((s.line for s in storages), -1, len(trace.lines) - 1, f"{place}.storages[...].line")
    for field in ("birth", "dropped", "death"):
        times = (getattr(storage, field) for storage in storages)
        _check_range(times, -1, num_ops, f"{place}.storages[...].{field}")
    _check_range((s.storage for s in saved), 0, last_storage, f"{place}.saved[...].storage")
    _check_range((s.nbytes for s in saved), 0, math.inf, f"{place}.saved[...].nbytes")
    for field in ("packed", "unpacked", "released"):
        _check_range((getattr(s, field) for s in saved), 0, num_ops, f"{place}.saved[...].{field}")
    for field in ("start", "end", "backward_start", "backward_end"):
        _check_range((getattr(call, field) for call in calls), -1, num_ops, f"{place}.calls[...].{field}")
    for field in ("inputs", "outputs"):
        used = (index for call in calls for index in getattr(call, field))
        _check_range(used, 0, last_storage, f"{place}.calls[...].{field}")
    _check_range((op for _, op in step.marks), 0, num_ops, f"{place}.marks")
    _check_range([step.wall_seconds, step.process_peak_bytes, step.launch_seconds], 0, math.inf, place)


def _check_range(values: Iterable[float], least: float, most: float, place: str) -> None:
    for value in values:
        if not least <= value <= most or value in (math.inf, -math.inf):
            raise ValueError(f"Expected a number from {least} to {most}, got {value} - at `{place}`")
