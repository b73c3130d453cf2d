"""Reads a pickle of plain values without executing it: an interpreter for the opcodes that only build values.

A pickle is a program. Python's own unpickler runs it, and refusing imports (`find_class`) is not enough for a file from
a stranger: extension codes may be cached, a memo index allocates gigabytes, a length prefix likewise, and hashing a
deeply nested key ends the process. So nothing here imports, calls or hashes anything but text and integers; every
length is limited before memory is taken; and the values built are counted against a limit.
Opcodes: CPython's Lib/pickletools.py, protocols 2 to 5.
"""

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from memwall.errors import TraceError

DEFAULT_MEMORY_LIMIT_BYTES = 8 << 30
_WINDOW_BYTES = 4 << 20
_MOST_TEXT_BYTES = 16 << 20
_MOST_MARKS = 100
# Pickle adds elements by the thousand, so honest files keep far fewer.
_MOST_WAITING = 1 << 22
_LONGEST_INTEGER_BYTES = 16
_PROTO = 0x80
# Stacks are lists of references to frames, so most of a large file are these.
_LONG_GETS = re.compile(rb"(?:j.{4})+", re.DOTALL)
_LONG_GET = struct.Struct("<xI")

# What CPython takes for a value, about; only the order of magnitude matters.
_BYTES_PER_CONTAINER = 64
_BYTES_PER_PAIR = 100
_BYTES_PER_REFERENCE = 16
_BYTES_PER_TEXT = 56
_BYTES_PER_NUMBER = 32


class PlainPickle(Struct, frozen=True):
    """Holds dicts, lists, tuples, text, numbers, booleans and None; equal parts may be one object."""

    value: object
    num_opcodes: int
    """Instructions the file consists of: no honest file holds more values than that."""


def is_pickle(head: bytes) -> bool:
    """Returns whether a file that begins so is a pickle of protocol 2 to 5; every `_dump_snapshot` writes one."""
    return len(head) >= 2 and head[0] == _PROTO and 2 <= head[1] <= 5


def read_plain_pickle(path: Path, *, memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES) -> PlainPickle:
    """Builds the value of a pickle that holds plain values only.

    Args:
        path: the file; it is read a few MiB at a time.
        memory_limit_bytes: an estimate of what the values take may not exceed this.

    Raises:
        TraceError: the file cannot be read, is cut short, holds anything but plain values, or is too large.
    """
    try:
        with path.open("rb") as file:
            return _Interpreter(file, path, memory_limit_bytes).run()
    except OSError as error:
        raise TraceError(f"cannot read the snapshot {path}: {error.strerror or error}") from error


class _Interpreter:
    """Runs the stack machine of one file; `_HANDLERS` lists what it can do."""

    def __init__(self, file: BinaryIO, path: Path, memory_limit_bytes: int) -> None:
        self._file = file
        self._path = path
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._limit_bytes = memory_limit_bytes
        self._spent_bytes = 0
        self._window = b""
        self._begin = 0
        self._position = 0
        self._stack: list[object] = []
        self._outer: list[list[object]] = []
        self._memo: list[object] = []
        self._num_opcodes = 0
        self._is_done = False

    def run(self) -> PlainPickle:
        handlers = [_HANDLERS.get(code) for code in range(256)]
        try:
            while not self._is_done:
                code = self._byte()
                handler = handlers[code]
                if handler is None:
                    raise self._refusal(code)
                self._num_opcodes += 1
                handler(self)
        except IndexError as error:
            raise self._damage("an instruction finds nothing to work on") from error
        if len(self._stack) != 1 or self._outer:
            raise self._damage("it ends in the middle of a value")
        return PlainPickle(self._stack[0], self._num_opcodes)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _byte(self) -> int:
        if self._position >= len(self._window):
            self._fill(1)
        self._position += 1
        return self._window[self._position - 1]

    def _take(self, num_bytes: int) -> bytes:
        if self._position + num_bytes > len(self._window):
            self._fill(num_bytes)
        self._position += num_bytes
        return self._window[self._position - num_bytes : self._position]

    def _fill(self, num_bytes: int) -> None:
        """Moves the window on so that it holds the next bytes, which are 16 MiB at most."""
        offset = self._begin + self._position
        if len(self._stack) + sum(map(len, self._outer)) > _MOST_WAITING:
            raise self._damage(f"more than {_MOST_WAITING} values that belong to nothing yet")
        rest = self._window[self._position :]
        self._window = rest + self._file.read(max(num_bytes - len(rest), _WINDOW_BYTES))
        self._begin, self._position = offset, 0
        if len(self._window) < num_bytes:
            raise self._cut_short(num_bytes)

    def _integer(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    # -- values --------------------------------------------------------------------------------------------------------

    def _spend(self, num_bytes: int) -> None:
        self._spent_bytes += num_bytes
        if self._spent_bytes > self._limit_bytes:
            raise TraceError(
                f"{self._path} holds more than the {self._limit_bytes >> 20} MiB of values that are read at most; "
                "record a shorter history (max_entries=100000 of torch.cuda.memory._record_memory_history)"
            )

    def _number(self, value: float) -> None:
        self._spend(_BYTES_PER_NUMBER)
        self._stack.append(value)

    def _text(self, num_bytes: int) -> None:
        if num_bytes > _MOST_TEXT_BYTES:
            raise self._damage(f"a text of {num_bytes} bytes")
        self._spend(_BYTES_PER_TEXT + num_bytes)
        # Pickle writes lone surrogates (of undecodable file names) as they are, which nothing could print.
        self._stack.append(str(self._take(num_bytes), "utf-8", "backslashreplace"))

    def _container(self, value: object) -> None:
        self._spend(_BYTES_PER_CONTAINER)
        self._stack.append(value)

    def _long(self) -> None:
        num_bytes = self._byte()
        if num_bytes > _LONGEST_INTEGER_BYTES:
            raise self._damage(f"an integer of {num_bytes} bytes")
        self._number(int.from_bytes(self._take(num_bytes), "little", signed=True))

    def _float(self) -> None:
        (value,) = struct.unpack(">d", self._take(8))
        self._number(value)

    def _constant(self, value: object) -> None:
        self._stack.append(value)

    def _tuple(self, length: int) -> None:
        if len(self._stack) < length:
            raise IndexError
        self._spend(_BYTES_PER_CONTAINER)
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _marked(self) -> list[object]:
        """Returns everything since the last mark, which is taken away."""
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _mark(self) -> None:
        if len(self._outer) >= _MOST_MARKS:
            raise self._damage(f"more than {_MOST_MARKS} values inside each other")
        self._outer.append(self._stack)
        self._stack = []

    def _marked_tuple(self) -> None:
        items = self._marked()
        self._spend(_BYTES_PER_REFERENCE * len(items))
        self._container(tuple(items))

    def _append(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise self._damage(f"an element is added to a {type(target).__name__}")
        self._spend(_BYTES_PER_REFERENCE * len(items))
        target.extend(items)

    def _set(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise self._damage(f"a key is set in a {type(target).__name__}")
        self._spend(_BYTES_PER_PAIR * len(items) // 2)
        for index in range(0, len(items), 2):
            key = items[index]
            # Hashing a tuple walks into it without end in sight.
            if type(key) is not str and type(key) is not int:
                raise self._damage(f"a key that is a {type(key).__name__}")
            target[key] = items[index + 1]

    def _append_one(self) -> None:
        self._append([self._stack.pop()])

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _put(self, index: int) -> None:
        value = self._stack[-1]
        if index > len(self._memo):
            raise self._damage(f"value {index} is remembered after {len(self._memo)}")
        if index == len(self._memo):
            self._spend(_BYTES_PER_REFERENCE)
            self._memo.append(value)
        else:
            self._memo[index] = value

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _long_gets(self) -> None:
        """Pushes a reference and those that follow it."""
        found = _LONG_GETS.match(self._window, self._position - 1)
        if found is None:  # the window ends within it
            self._get(self._integer(4))
            return
        self._position = found.end()
        indices = [index for (index,) in _LONG_GET.iter_unpack(found.group())]
        self._num_opcodes += len(indices) - 1
        memo = self._memo
        self._stack += [memo[index] for index in indices]

    # -- the file itself -----------------------------------------------------------------------------------------------

    def _proto(self) -> None:
        version = self._byte()
        if not 2 <= version <= 5:
            raise self._damage(f"pickle protocol {version}")

    def _frame(self) -> None:
        num_bytes = self._integer(8)
        if num_bytes > self._file_bytes - self._begin - self._position:
            raise self._cut_short(num_bytes)

    def _stop(self) -> None:
        self._is_done = True

    # -- what can go wrong ---------------------------------------------------------------------------------------------

    def _refusal(self, code: int) -> TraceError:
        import pickletools

        names = {opcode.code: opcode.name for opcode in pickletools.opcodes}
        what = f"the pickle instruction {names[chr(code)]}" if chr(code) in names else f"the byte 0x{code:02x}"
        return TraceError(
            f"{self._path} is no memory snapshot: {what} at byte {self._begin + self._position - 1} builds something "
            "else than plain values; nothing of the file was executed. Expected a file written by "
            "torch.cuda.memory._dump_snapshot()"
        )

    def _damage(self, what: str) -> TraceError:
        return TraceError(
            f"{self._path} is no memory snapshot: {what} at byte {self._begin + self._position}; expected a file "
            "written by torch.cuda.memory._dump_snapshot()"
        )

    def _cut_short(self, num_bytes: int) -> TraceError:
        left_bytes = self._file_bytes - self._begin - self._position
        return TraceError(
            f"{self._path} is cut short or damaged: {num_bytes} bytes are announced at byte "
            f"{self._begin + self._position}, {max(left_bytes, 0)} are there; copy or record it again"
        )


_HANDLERS: dict[int, Callable[[_Interpreter], None]] = {
    ord("}"): lambda machine: machine._container({}),
    ord("]"): lambda machine: machine._container([]),
    ord(")"): lambda machine: machine._constant(()),
    ord("N"): lambda machine: machine._constant(None),
    0x88: lambda machine: machine._constant(True),
    0x89: lambda machine: machine._constant(False),
    ord("K"): lambda machine: machine._number(machine._byte()),
    ord("M"): lambda machine: machine._number(machine._integer(2)),
    ord("J"): lambda machine: machine._number(int.from_bytes(machine._take(4), "little", signed=True)),
    0x8A: _Interpreter._long,
    ord("G"): _Interpreter._float,
    0x8C: lambda machine: machine._text(machine._byte()),
    ord("X"): lambda machine: machine._text(machine._integer(4)),
    0x8D: lambda machine: machine._text(machine._integer(8)),
    ord("("): _Interpreter._mark,
    ord("a"): _Interpreter._append_one,
    ord("e"): lambda machine: machine._append(machine._marked()),
    ord("s"): _Interpreter._set_one,
    ord("u"): lambda machine: machine._set(machine._marked()),
    ord("t"): _Interpreter._marked_tuple,
    0x85: lambda machine: machine._tuple(1),
    0x86: lambda machine: machine._tuple(2),
    0x87: lambda machine: machine._tuple(3),
    0x94: lambda machine: machine._put(len(machine._memo)),
    ord("q"): lambda machine: machine._put(machine._byte()),
    ord("r"): lambda machine: machine._put(machine._integer(4)),
    ord("h"): lambda machine: machine._get(machine._byte()),
    ord("j"): _Interpreter._long_gets,
    _PROTO: _Interpreter._proto,
    0x95: _Interpreter._frame,
    ord("."): _Interpreter._stop,
}
"""Every instruction that is carried out; all others end the reading."""
