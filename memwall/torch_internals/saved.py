"""Does for saved tensors what autograd leaves out where hooks are installed: looks whether they were written since."""

import functools
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from memwall.errors import ApplyError
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.dispatch import has_modes, without_dispatch_modes, without_function_modes

_NOTHING_TO_HIDE_FROM = nullcontext()


class SavedTensorModifiedError(ApplyError, RuntimeError):
    """Says that a saved tensor was written in place before backward used it (autograd: RuntimeError)."""


class Versioned(Protocol):
    """Stands for a saved tensor, and knows at which version that was saved."""

    version: int

    @property
    def label(self) -> str:
        """Returns what it is, for an error."""

    def current_version(self) -> int:
        """Returns how often it has been written by now."""

    def was_modified(self) -> bool:
        """Returns whether it was written since it was saved."""


def check_unmodified(saved: Versioned) -> None:
    """Refuses a saved tensor that was written since.

    Raises:
        SavedTensorModifiedError: it was.
    """
    if saved.was_modified():
        raise SavedTensorModifiedError(
            f"a tensor needed for backward was modified in place after the forward saved it: {saved.label}; "
            f"it is at version {saved.current_version()}, expected {saved.version}. Replace the in-place operation "
            "by one that returns a new tensor, or write into a clone()"
        )


def quiet() -> AbstractContextManager[None]:
    """Hides the tensor operations inside from recorders and other torch modes; costs nothing where none is active."""
    if has_modes():
        return _hidden()
    return _NOTHING_TO_HIDE_FROM


@contextmanager
def _hidden() -> Iterator[None]:
    with without_function_modes(), without_dispatch_modes():
        yield


def describe(tensor: Tensor) -> str:
    """Returns the dtype and shape, as in an error: `float32[8, 128]`."""
    return described(tensor.dtype, tensor.shape, None)


@functools.lru_cache(maxsize=1024)
def described(dtype: torch.dtype, shape: torch.Size, group: Hashable) -> str:
    """Returns a saved tensor in an error: `float32[8, 128] saved in blocks.1`."""
    place = "" if group is None else f" saved in {group}"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{place}"


class Kept:
    """Holds a saved tensor that stays where it is.

    With hooks installed autograd no longer compares versions (torch/csrc/autograd/saved_variable.cpp, 2.13), so this
    does, for tensors that do not move as well. A result that its own operation saves would hold its graph, and the
    graph it; so what is held is detached, and a forward without a backward leaves nothing behind.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            with quiet():
                tensor = tensor.detach()
        self.tensor = tensor
        self.version = -1 if tensor.is_inference() else version_of(tensor)

    @property
    def label(self) -> str:
        """Returns what it is, for an error."""
        return describe(self.tensor)

    def current_version(self) -> int:
        """Returns how often it has been written by now."""
        return self.version if self.version < 0 else version_of(self.tensor)

    def was_modified(self) -> bool:
        """Returns whether it was written since it was saved."""
        return self.current_version() != self.version
