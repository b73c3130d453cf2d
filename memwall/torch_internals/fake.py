"""Fake tensors: shapes, dtypes and storages without a byte in them. Without them steps are recorded live only."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memwall.torch_internals.names import find, function, kind

_MODULE = "torch._subclasses.fake_tensor"
_FOR = "recording a step on fake tensors"

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
else:
    FakeTensor = kind(f"{_MODULE}.FakeTensor", _FOR)
    """A tensor without bytes; a class without instances where this torch has none."""

    FakeTensorMode = kind(f"{_MODULE}.FakeTensorMode", _FOR)
    """The context in which all that is made is fake."""

    FakeCopyMode = kind(f"{_MODULE}.FakeCopyMode", _FOR)
    """The context in which copies of real tensors are fake."""

    DataDependentOutputException = kind(f"{_MODULE}.DataDependentOutputException", _FOR, RuntimeError)
    """An operation on fake tensors asked for a value."""

    DynamicOutputShapeException = kind(f"{_MODULE}.DynamicOutputShapeException", _FOR, RuntimeError)
    """An operation on fake tensors has a result whose size hangs on values."""

    UnsupportedOperatorException = kind(f"{_MODULE}.UnsupportedOperatorException", _FOR, RuntimeError)
    """An operation has no fake version."""

unset_fake_temporarily: Callable[[], AbstractContextManager[Any]] = function(
    f"{_MODULE}.unset_fake_temporarily", "telling activations by their values"
)
"""Returns a context in which tensors are real inside a fake mode.

Raises NotAvailableError without it: gated MLPs get no fused kernel.
"""

_drawn = find("torch.nn.init._no_grad_trunc_normal_", "making models on fake tensors without drawing numbers")


@contextmanager
def without_truncated_sampling() -> Iterator[None]:
    """Is without torch's truncated normal distribution within, whose draws never come to an end on fake tensors.

    torch draws until no value is outside, and fake values never are inside: torch/nn/init.py, `_no_grad_trunc_normal_`
    (2.13), which leaves tensors on `meta` alone for the same reason. Where this torch has no such function, the public
    `trunc_normal_` takes its place, which misses what libraries have imported by name.
    """
    init: Any = torch.nn.init
    name = "trunc_normal_" if _drawn is None else "_no_grad_trunc_normal_"
    before = getattr(init, name)
    setattr(init, name, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        setattr(init, name, before)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Is without torch's own log of what fake tensors refuse within: the error says it."""
    logger = logging.getLogger(_MODULE)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
