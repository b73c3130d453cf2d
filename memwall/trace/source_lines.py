"""The line of the user's code that an operation comes from: what bytes at the peak are named by.

The user's line is that of the innermost Python frame outside torch, memwall and Python's own library. In backward there
is none but that of the backward call; there the line of the forward operation is taken whose autograd node runs.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from memwall.torch_internals.autograd import next_sequence_number, sequence_number_of
from memwall.torch_internals.compiler import is_region
from memwall.torch_internals.operators import packet_of

_PACKAGE = Path(__file__).parent.parent
_TORCH = Path(torch.__file__).parent
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_DRIVERS = (f"{_PACKAGE / 'cli'}{os.sep}", *(str(_PACKAGE / "trace" / n) for n in ("trace_builder.py", "fake.py")))
_ENGINE = str(_TORCH / "autograd" / "graph.py")
# The demo's model stands for a user's.
_DEMO = f"{_PACKAGE / 'demo'}{os.sep}"
_OTHERS = (f"{_PACKAGE}{os.sep}", f"{_TORCH}{os.sep}", "<")
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_NODE_NAME = re.compile(r"Backward\d*$")
# Whose code a file holds, as plain numbers: they are compared for every frame of every operation.
_OF_OTHERS = 0
_OF_USER = 1
# Autograd's engine is called from it: what lies outside is the backward call.
_OF_ENGINE = 2
# memwall runs the step by itself: what lies outside is the command line, not the user's step.
_OF_DRIVER = 3


class SourceLines:
    """Holds the lines met so far, each once; shared by the steps of one recording."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """Such as `models/gpt.py:42 forward`; below the current directory, or an installed library's own folder."""
        self._index_of_text: dict[str, int] = {}
        self._index_of_place: dict[tuple[int, int], int] = {}
        # Held so that the identity of a code object, by which it is known above, stays its own.
        self._codes: list[CodeType] = []
        self._owners: dict[str, int] = {}

    def find(self, node_line: int = -1) -> int:
        """Returns the index of the user's line that runs now; -1 for none.

        Args:
            node_line: the line to take where autograd's engine runs and no Python of the user's inside it.
        """
        frame: FrameType | None = sys._getframe(1)
        owners = self._owners
        while frame is not None:
            code = frame.f_code
            path = code.co_filename
            owner = owners.get(path)
            if owner is None:
                owner = owners[path] = _owner_of(path)
            if owner:
                if owner == _OF_USER:
                    index = self._index_of_place.get((id(code), frame.f_lasti))
                    return self._add(frame) if index is None else index
                if owner == _OF_DRIVER or node_line >= 0:
                    break
            frame = frame.f_back
        return node_line

    def _add(self, frame: FrameType) -> int:
        code = frame.f_code
        text = f"{_shown(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        index = self._index_of_text.setdefault(text, len(self.texts))
        if index == len(self.texts):
            self.texts.append(text)
        self._codes.append(code)
        self._index_of_place[id(code), frame.f_lasti] = index
        return index


class StepLines:
    """Holds lines of one step's operations, with the autograd nodes that its forward made."""

    def __init__(self, source: SourceLines) -> None:
        self._source = source
        self._newest_node = _newest_node()
        self._made_in_forward: dict[int, tuple[int, Any]] = {}
        self._line_of_node: dict[int, int] = {}

    def of_op(self, func: Any, node: Any) -> int:
        """Returns the index of the line of an operation that is about to run; -1 if it is not known.

        Args:
            func: the operation.
            node: the autograd node that runs it; None in forward.
        """
        if node is not None:
            return self._source.find(self._of_node(node))
        line = self._source.find()
        newest = _newest_node()
        if newest > self._newest_node:
            self._newest_node = newest
            self._made_in_forward[newest] = (line, None if is_region(func) else func)
        return line

    def _of_node(self, node: Any) -> int:
        """Returns the line of the operation that made a node.

        The first operation seen after a node was made need not be its own: views written in place and functions of the
        user's make nodes, too. So the name must agree.
        """
        sequence = sequence_number_of(node)
        line = self._line_of_node.get(sequence)
        if line is None:
            line, func = self._made_in_forward.pop(sequence, (-1, None))
            if line >= 0 and func is not None and _node_name(func) != _NODE_NAME.sub("", node.name()).lower():
                line = -1
            self._line_of_node[sequence] = line
        return line


def user_frame() -> FrameType | None:
    """Returns the innermost frame of the user's code, where something can be changed; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _owner_of(frame.f_code.co_filename) != _OF_USER:
        frame = frame.f_back
    return frame


def user_files() -> tuple[str, ...]:
    """Returns the files of the user's own code that runs, and of what they have imported of the user's."""
    found: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            found[frame.f_code.co_filename] = None
            found.update((path, None) for path in map(_file_of, list(frame.f_globals.values())) if _is_own(path))
        frame = frame.f_back
    return tuple(found)


def _newest_node() -> int:
    return next_sequence_number() - 1


def _node_name(func: Any) -> str:
    """Returns what the node of an operation is called, without case: `aten.nll_loss_forward` has NllLossBackward0.

    Source: pytorch tools/autograd/load_derivatives.py, `_create_op_prefix` (2.13).
    """
    return str(packet_of(func).__name__).replace("_", "").lower().removesuffix("forward")


def _file_of(imported: object) -> str:
    """Returns the file of a module, or of what was imported from one; "" where there is none.

    No attribute is asked for that an object may compute: a lazy module would be loaded by that.
    """
    kind = type(imported)
    if kind is FunctionType or kind is type:
        name = type.__getattribute__(imported, "__module__") if kind is type else imported.__module__
        imported = sys.modules.get(name) if isinstance(name, str) else None
    if not issubclass(type(imported), ModuleType):
        return ""
    path = object.__getattribute__(imported, "__dict__").get("__file__")
    return path if isinstance(path, str) else ""


def _is_own(path: str) -> bool:
    return bool(path) and _owner_of(path) == _OF_USER and not _INSTALLED.match(path)


def _owner_of(path: str) -> int:
    if path == _ENGINE:
        return _OF_ENGINE
    if path.startswith(_DRIVERS):
        return _OF_DRIVER
    if path.startswith(_DEMO):
        return _OF_USER
    if path.startswith(_OTHERS) or (path.startswith(_LIBRARIES) and not _INSTALLED.match(path)):
        return _OF_OTHERS
    return _OF_USER


def _shown(path: str) -> str:
    """Returns a path below a library's or the current folder, so that equal runs elsewhere have equal lines."""
    installed = _INSTALLED.match(path)
    if installed is not None:
        shown = path[installed.end() :]
    else:
        full = os.path.abspath(path)
        here = f"{os.getcwd()}{os.sep}"
        shown = full.removeprefix(here)
    return shown.replace(os.sep, "/")
