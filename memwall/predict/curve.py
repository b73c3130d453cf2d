"""The byte curve of a step: live bytes while each operation runs, and what the peak is made of."""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from memwall.trace.records import Step, Storage, Trace


class Share(Struct, frozen=True, kw_only=True):
    """Names one holder of bytes at an instant."""

    name: str
    num_bytes: int


class LineShare(Struct, frozen=True, kw_only=True):
    """Says what one line of the user's code holds at an instant."""

    name: str
    """`path:line function`; in brackets what was there before the step, or came from a line that is not known."""
    num_bytes: int
    categories: tuple[str, ...]
    """The uses of the bytes, the largest part first."""


class Peak(Struct, frozen=True, kw_only=True):
    """The instant at which most bytes are live, and who holds them."""

    live_bytes: int
    op: int
    phase: str
    module: str
    """Module whose operation runs then."""
    by_category: tuple[Share, ...]
    by_module: tuple[Share, ...]
    by_line: tuple[LineShare, ...] = ()
    """Empty where the trace has no lines."""


def live_curve(storages: Iterable[Storage], num_ops: int, *, device: str | None = None) -> NDArray[np.int64]:
    """Live bytes [num_ops] while each operation runs: sum of storages with birth <= op < death.

    Args:
        device: count only storages of this device type, e.g. "cuda"; None counts all.
    """
    change = np.zeros(num_ops + 1, dtype=np.int64)
    is_counted: dict[str, bool] = {}
    for storage in storages:
        if storage.device not in is_counted:
            is_counted[storage.device] = device in (None, storage.device_type)
        if not is_counted[storage.device]:
            continue
        begin = storage.birth if storage.birth > 0 else 0
        end = storage.death if storage.death < num_ops else num_ops
        if begin < end:
            change[begin] += storage.nbytes
            change[end] -= storage.nbytes
    return np.cumsum(change[:-1], dtype=np.int64)


def live_peak_bytes(step: Step, device: str) -> int:
    """The highest point of a step's curve on a device type."""
    return int(live_curve(step.storages, len(step.ops), device=device).max())


def peak_of(trace: Trace, step: Step) -> Peak:
    """Explains the highest point of a step's curve, largest holders first."""
    curve = live_curve(step.storages, len(step.ops), device=trace.device)
    op = int(np.argmax(curve))
    categories: dict[str, int] = {}
    modules: dict[str, int] = {}
    lines: dict[str, dict[str, int]] = {}
    for storage in step.storages:
        if storage.birth <= op < storage.death and storage.device_type == trace.device:
            categories[storage.category] = categories.get(storage.category, 0) + storage.nbytes
            name = module_name(trace, storage.module) if storage.birth >= 0 else f"({storage.category})"
            modules[name] = modules.get(name, 0) + storage.nbytes
            held = lines.setdefault(_line_name(trace, storage), {})
            held[storage.category] = held.get(storage.category, 0) + storage.nbytes
    return Peak(
        live_bytes=int(curve[op]),
        op=op,
        phase=step.ops[op].phase,
        module=module_name(trace, step.ops[op].module),
        by_category=_ranked(categories),
        by_module=_ranked(modules),
        by_line=_ranked_lines(lines) if trace.lines else (),
    )


def module_name(trace: Trace, module: int) -> str:
    """Path of a module for a person: the class name for the root, "(outside)" for none."""
    if module < 0:
        return "(outside)"
    return trace.modules[module].path or trace.modules[module].class_name


def step_seconds(step: Step) -> float:
    """Returns the seconds of a step that moves nothing: its operations', or the host's where it issues them slower."""
    return max(sum(op.seconds for op in step.ops), step.launch_seconds * len(step.ops))


def _line_name(trace: Trace, storage: Storage) -> str:
    if storage.birth < 0:
        return f"({storage.category})"
    if 0 <= storage.line < len(trace.lines):
        return trace.lines[storage.line]
    return f"({storage.phase})" if storage.phase in ("backward", "optimizer") else "(unknown)"


def _ranked_lines(lines: dict[str, dict[str, int]]) -> tuple[LineShare, ...]:
    totals = _ranked({name: sum(held.values()) for name, held in lines.items()})
    return tuple(
        LineShare(
            name=share.name,
            num_bytes=share.num_bytes,
            categories=tuple(part.name for part in _ranked(lines[share.name])),
        )
        for share in totals
    )


def _ranked(holders: dict[str, int]) -> tuple[Share, ...]:
    ordered = sorted(holders.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Share(name=name, num_bytes=num_bytes) for name, num_bytes in ordered)
