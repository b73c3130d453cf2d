"""Says what an operation has to do, where nothing is computed: the figures a hardware model turns into seconds.

Operators of torch are known by name (`predict.cuda.workspaces`). Whoever defines others says here what they do inside,
for a device that is not at hand: on fake tensors nothing can be measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from memwall.torch_internals.storages import identity_of


class KernelWork(NamedTuple):
    """Describes one kernel of several that an operator runs, one after the other."""

    moved_bytes: int
    flops: int


class OwnWork(NamedTuple):
    """Describes what one call does inside."""

    workspace_bytes: int = 0
    """Bytes at its own peak, beyond arguments and results."""
    parts: tuple[KernelWork, ...] = ()
    """All of its kernels; () for one that reads its arguments and writes its results."""
    dtype: str = ""
    """Precision that products are computed in, e.g. "bfloat16"; "" for that of the first floating-point argument."""


OWN_WORK: dict[Any, Callable[..., OwnWork]] = {}
"""Functions by operator, called with its arguments."""

_NONE = OwnWork()


def own_work_of(func: Any, args: tuple[Any, ...]) -> OwnWork:
    """Returns what one call does inside; nothing where nobody has said."""
    formula = OWN_WORK.get(func)
    return _NONE if formula is None else formula(*args)


class OpWork(Struct, frozen=True, kw_only=True):
    """Describes one tensor operation as a roofline sees it."""

    name: str
    """ATen overload, e.g. "aten.addmm.default"."""
    dtype: str
    """Names that of its first floating-point argument or result, e.g. "bfloat16", else of its first tensor."""
    flops: int
    read_bytes: int
    """Bytes of its tensor arguments; 0 for an operation that only makes a view."""
    written_bytes: int
    """Bytes of new results and of arguments changed in place."""
    parts: tuple[KernelWork, ...] = ()
    """Kernels that run one after the other inside; () for one alone, whose work the fields above are."""


def work_of(
    name: str,
    flops: int,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    written: Sequence[Tensor],
    *,
    own: OwnWork | None = None,
) -> OpWork:
    """Returns the work of an operation called with `inputs`, that returned `outputs` and changed `written` in place.

    What it does inside is `own`, if it is known. Sparse tensors count nothing: they have no storage of their own.
    """
    dense = [tensor for tensor in inputs if tensor.layout is torch.strided]
    storages = {identity_of(tensor.untyped_storage()) for tensor in dense}
    results = [tensor for tensor in outputs if tensor.layout is torch.strided]
    new = [tensor for tensor in results if identity_of(tensor.untyped_storage()) not in storages]
    changed = [tensor for tensor in written if tensor.layout is torch.strided]
    dtypes = [tensor.dtype for tensor in (*inputs, *outputs)]
    is_view = not new and not changed
    return OpWork(
        name=name,
        dtype=own.dtype
        if own is not None and own.dtype
        else str(next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0])).removeprefix("torch.")
        if dtypes
        else "",
        flops=flops,
        read_bytes=0 if is_view else sum(tensor.nbytes for tensor in dense),
        written_bytes=sum(tensor.nbytes for tensor in (*new, *changed)),
        parts=() if own is None else own.parts,
    )
