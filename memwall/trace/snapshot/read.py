"""Imports a CUDA memory snapshot: a pickle read without executing it, then checked value by value.

Fields that this version does not know are passed over, because torch adds some with almost every release; those it
needs are checked, and an error names the place inside the file. Versions differ in what they write: `pool_id`,
`frames` and `requested_size` may be missing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

from memwall.errors import TraceError
from memwall.trace.snapshot.records import (
    Action,
    BlockState,
    Event,
    Frame,
    Snapshot,
    SnapshotBlock,
    SnapshotSegment,
)
from memwall.trace.snapshot.restricted_pickle import DEFAULT_MEMORY_LIMIT_BYTES, read_plain_pickle

_ACTIONS = frozenset(get_args(Action))
_STATES: dict[object, BlockState] = {
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    # As torch's docstring spells it.
    "active_awaiting_free": "active_pending_free",
    "inactive": "inactive",
}
_DEFAULT_POOL = (0, 0)
_LARGEST_ADDRESS = 1 << 64
_LARGEST_BYTES = 1 << 60


def load_snapshot(path: Path, *, memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES) -> Snapshot:
    """Reads what `torch.cuda.memory._dump_snapshot(path)` wrote; nothing in the file is executed.

    Args:
        path: the pickle.
        memory_limit_bytes: the values of the file may take about this much.

    Raises:
        TraceError: no such file, cut short, no snapshot, hostile, or too large; the message says which and where.
    """
    importer = _Importer(path)
    plain = read_plain_pickle(path, memory_limit_bytes=memory_limit_bytes)
    return importer.snapshot(plain.value, plain.num_opcodes)


class _Importer:
    """Turns plain values into records, each stack and frame once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values_left = 0
        self._frames: dict[Frame, Frame] = {}
        self._stacks: dict[tuple[Frame, ...], int] = {(): 0}
        # By identity: torch writes equal stacks as one list, equal frames as one dict. Both are kept, so that their
        # identity stays their own.
        self._stack_of_list: dict[int, tuple[object, int]] = {}
        self._frame_of_dict: dict[int, tuple[object, Frame]] = {}
        self._unknown_actions: set[str] = set()

    def snapshot(self, root: object, most_values: int) -> Snapshot:
        self._values_left = most_values
        # `torch.cuda.memory_snapshot()` is the list of segments alone.
        fields = {"segments": root} if isinstance(root, list) else self._fields(root, "$")
        if "segments" not in fields:
            raise self._error("$", "a dict with 'segments' and 'device_traces'", f"the keys {_shown(list(fields))}")
        segments = tuple(self._segment(item, at) for item, at in self._items(fields["segments"], "$.segments"))
        traces = tuple(
            tuple(self._trace(events, at))
            for events, at in self._items(fields.get("device_traces", []), "$.device_traces")
        )
        return Snapshot(
            segments=segments,
            traces=traces,
            stacks=tuple(self._stacks),
            settings=self._settings(fields.get("allocator_settings", {})),
            unknown_actions=tuple(sorted(self._unknown_actions)),
        )

    def _segment(self, value: object, at: str) -> SnapshotSegment:
        fields = self._fields(value, at)
        address = self._integer(fields, "address", at, most=_LARGEST_ADDRESS)
        num_bytes = self._integer(fields, "total_size", at)
        blocks = []
        end = address
        for item, block_at in self._items(fields.get("blocks", []), f"{at}.blocks"):
            block = self._block(item, end, block_at)
            blocks.append(block)
            end += block.num_bytes
        if end != address + num_bytes:
            raise self._error(f"{at}.blocks", f"blocks of {num_bytes} bytes together", f"{end - address} bytes")
        kind = fields.get("segment_type", "unknown")
        return SnapshotSegment(
            device=self._integer(fields, "device", at, missing=0),
            address=address,
            num_bytes=num_bytes,
            stream=self._integer(fields, "stream", at, missing=0, least=-_LARGEST_ADDRESS, most=_LARGEST_ADDRESS),
            kind=kind if kind in ("small", "large") else "unknown",
            pool=self._pool(fields, "segment_pool_id", at),
            is_expandable=fields.get("is_expandable") is True,
            blocks=tuple(blocks),
        )

    def _block(self, value: object, address: int, at: str) -> SnapshotBlock:
        fields = self._fields(value, at)
        num_bytes = self._integer(fields, "size", at)
        if self._integer(fields, "address", at, missing=address, most=_LARGEST_ADDRESS) != address:
            raise self._error(f"{at}.address", f"{address}, where the block before it ends", _shown(fields["address"]))
        state = fields.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise self._error(f"{at}.state", "active_allocated, active_pending_free or inactive", _shown(state))
        requested_bytes = self._integer(fields, "requested_size", at, missing=num_bytes)
        stack = self._stack(fields.get("frames"), f"{at}.frames")
        return SnapshotBlock(address, num_bytes, requested_bytes, _STATES[state], stack)

    def _trace(self, value: object, at: str) -> Iterator[Event]:
        for item, event_at in self._items(value, at):
            event = self._event(item, event_at)
            if event is not None:
                yield event

    def _event(self, value: object, at: str) -> Event | None:
        fields = self._fields(value, at)
        action = fields.get("action")
        if not isinstance(action, str):
            raise self._error(f"{at}.action", "the name of an action", _shown(action))
        if action not in _ACTIONS:
            self._unknown_actions.add(_printable(action)[:40])
            return None
        # An event of these two has no place in memory; older versions leave `addr` out, newer ones put 0 in it.
        has_address = action not in ("oom", "snapshot")
        free_bytes = self._integer(fields, "device_free", at, missing=0) if action == "oom" else 0
        category = fields.get("category", "")
        return Event(
            cast(Action, action),
            self._integer(fields, "addr", at, most=_LARGEST_ADDRESS) if has_address else 0,
            self._integer(fields, "size", at),
            self._integer(fields, "stream", at, missing=0, least=-_LARGEST_ADDRESS, most=_LARGEST_ADDRESS),
            self._stack(fields.get("frames"), f"{at}.frames"),
            self._pool(fields, "pool_id", at),
            _printable(category) if isinstance(category, str) else "",
            free_bytes,
        )

    def _stack(self, value: object, at: str) -> int:
        if value is None:
            return 0
        known = self._stack_of_list.get(id(value))
        if known is not None:
            return known[1]
        if not isinstance(value, list | tuple):
            raise self._error(at, "a list", _shown(value))
        seen = self._frame_of_dict
        frames = tuple(
            seen[id(item)][1] if id(item) in seen else self._frame(item, f"{at}[{index}]")
            for index, item in enumerate(value)
        )
        stack = self._stacks.setdefault(frames, len(self._stacks))
        self._stack_of_list[id(value)] = (value, stack)
        return stack

    def _frame(self, value: object, at: str) -> Frame:
        fields = self._fields(value, at)
        texts = [fields.get(key, "") for key in ("filename", "name")]
        for key, text in zip(("filename", "name"), texts, strict=True):
            if not isinstance(text, str):
                raise self._error(f"{at}.{key}", "a text", _shown(text))
        line = self._integer(fields, "line", at, missing=0, least=-_LARGEST_BYTES)
        frame = Frame(_printable(cast(str, texts[0])), line, _printable(cast(str, texts[1])))
        frame = self._frames.setdefault(frame, frame)
        self._frame_of_dict[id(value)] = (value, frame)
        return frame

    def _settings(self, value: object) -> dict[str, str]:
        settings = {}
        for key, setting in self._fields(value, "$.allocator_settings").items():
            if isinstance(setting, dict):
                # Only the rounding divisions are a table: by size in MiB.
                pairs = [f"{_shown(size)}:{_shown(number)}" for size, number in list(setting.items())[:64]]
                settings[str(key)] = f"[{','.join(pairs)}]"
            else:
                settings[str(key)] = _printable(setting) if isinstance(setting, str) else _shown(setting)
        return settings

    # -- plain values --------------------------------------------------------------------------------------------------

    def _fields(self, value: object, at: str) -> dict[Any, Any]:
        self._count(at)
        if not isinstance(value, dict):
            raise self._error(at, "a dict", _shown(value))
        return value

    def _count(self, at: str) -> None:
        # A list of a million references to one dict takes a few bytes of a file and hours of a reader.
        self._values_left -= 1
        if self._values_left < 0:
            raise self._error(at, "values of their own", "the same ones used again and again")

    def _items(self, value: object, at: str) -> Iterator[tuple[object, str]]:
        if not isinstance(value, list | tuple):
            raise self._error(at, "a list", _shown(value))
        return ((item, f"{at}[{index}]") for index, item in enumerate(value))

    def _integer(
        self,
        fields: dict[Any, Any],
        key: str,
        at: str,
        *,
        missing: int | None = None,
        least: int = 0,
        most: int = _LARGEST_BYTES,
    ) -> int:
        value = fields.get(key, missing)
        if type(value) is not int:
            raise self._error(f"{at}.{key}", "an integer", "nothing" if key not in fields else _shown(value))
        if not least <= value < most:
            raise self._error(f"{at}.{key}", f"an integer from {least} to {most - 1}", _shown(value))
        return value

    def _pool(self, fields: dict[Any, Any], key: str, at: str) -> tuple[int, int]:
        value = fields.get(key, (0, 0))
        if isinstance(value, list | tuple) and len(value) == 2 and all(type(part) is int for part in value):
            # One tuple for most events instead of one each.
            return _DEFAULT_POOL if tuple(value) == _DEFAULT_POOL else (int(value[0]), int(value[1]))
        raise self._error(f"{at}.{key}", "two integers", _shown(value))

    def _error(self, at: str, expected: str, found: str) -> TraceError:
        return TraceError(
            f"{self._path} is not a valid memory snapshot: at {at} expected {expected}, found {found}; expected a file "
            "written by torch.cuda.memory._dump_snapshot()"
        )


def _printable(text: str) -> str:
    """Returns the text that is safe on a terminal: control characters are spelled out."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _shown(value: object) -> str:
    """Returns a value for an error, short whatever it is: containers may be endless."""
    if isinstance(value, str | int | float | bool) or value is None:
        return _printable(repr(value))[:60]
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | dict | tuple) else "another value"
