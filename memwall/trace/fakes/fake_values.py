"""Values on fake tensors: real ones where they are cheap, assumptions where a number is asked for that nobody knows.

A training step asks for values in a few places: is this mask all ones, which rows are padding, how far along is the
optimizer. Most of them follow from the batch, from `arange` and from counters alone. So small integer tensors, masks
and scalars are computed beside the fake ones, and Python takes the branch that it takes in a real step. What hangs on
weights or pixels stays unknown: a float that becomes a Python number counts as 1.0, a selection by a mask takes the
share that the caller assumes, and everything else is an error that names the line.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memwall.errors import NeedsValuesError, TraceError
from memwall.torch_internals.dispatch import TorchDispatchMode, without_dispatch
from memwall.torch_internals.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from memwall.torch_internals.operators import operator_named, schema_of, written_places
from memwall.torch_internals.storages import identity_of
from memwall.torch_internals.trees import tensors_in, tree_map
from memwall.trace.fakes.fake_memo import ResultMemo
from memwall.trace.fakes.fake_results import as_real, run_fake
from memwall.trace.source_lines import user_frame

# Token masks and positions of one micro-batch are well below; attention masks beyond 1k x 1k only cost time.
_MOST_ELEMENTS = 1 << 20
# Counters, schedules and drop rates. Larger floating-point tensors are weights, whose values decide nothing, but for
# constants: some models make themselves a mask of ones as long as the batch.
_MOST_FLOATS = 1 << 10
# What an unknown floating-point number is taken for. It must not end a step: 0.0 divides, NaN fails every comparison.
_ASSUMED_FLOAT = 1.0

_aten = torch.ops.aten
_LOCAL_SCALAR = operator_named("_local_scalar_dense.default")
_CTC_LOSS = operator_named("_ctc_loss.Tensor")
_SELECTIONS = (_aten.nonzero.default, _aten.masked_select.default)
_CONSTANT = (_aten.ones.default, _aten.zeros.default, _aten.full.default)
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default)


class KnownValues(TorchDispatchMode):
    """Lies between the recorder and the fake tensors, and keeps real bytes for the small storages it can follow.

    Args:
        place: the module that runs now, for messages.
        mask_share: share of a mask's elements taken to be true where the step selects by one whose values are
            unknown; None makes that an error.
    """

    def __init__(self, place: Callable[[], str], mask_share: float | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place, self._mask_share = place, mask_share
        self._memo = ResultMemo(lambda func, args, kwargs: as_real(func, args, run_fake(func, args, kwargs)))
        self._real: dict[int, torch.UntypedStorage] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Registers the values of a fake tensor that has the layout of a real one."""
        if fake.layout is not torch.strided or real.layout is not torch.strided:
            return
        storage, real_storage = fake.untyped_storage(), real.untyped_storage()
        if storage.nbytes() != real_storage.nbytes() or fake.stride() != real.stride():
            return
        key = identity_of(storage)

        def died(_: Any) -> None:
            self._real.pop(key, None)
            self._references.pop(key, None)

        self._real[key] = real_storage
        self._references[key] = weakref.ref(storage, died)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Takes the values of these tensors as unknown from now on."""
        for tensor in tensors:
            self._real.pop(_key(tensor), None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._check_device(kwargs.get("device"))
        tensors = tensors_in((args, kwargs))
        is_known = all(self._has_value(tensor) for tensor in tensors)
        if func is _LOCAL_SCALAR:
            return self._number(args[0], is_known)
        if func is _aten.index.Tensor and not is_known:
            args = (args[0], self._positions(func, args[1]))
        try:
            out = self._run(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._by_value(func, args, kwargs) if is_known else self._assumed(func, args)
        except UnsupportedOperatorException as error:
            if schema_of(func).returns or not schema_of(func).is_mutable:
                raise self._failure(
                    f"{func} has no fake version",
                    "register one (torch.library.register_fake), or record this workload live",
                    NeedsValuesError,
                ) from error
            out = None  # it makes nothing, as fused optimizers' kernels: torch 2.13 has those of SGD and Adagrad so
        written = _written(func, args, kwargs)
        if is_known:
            self._follow(func, args, kwargs, out, written)
        else:
            self.forget(written)
        return out

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the values of a tensor that is followed; None where they are not known."""
        if not self._is_followed(tensor) or not self._has_value(tensor):
            return None
        with without_dispatch():
            found: Tensor = self._value(tensor)
        return found

    def _is_followed(self, tensor: Any) -> bool:
        """Tells whether a tensor has no values of its own."""
        return isinstance(tensor, FakeTensor)

    def _check_device(self, device: torch.device | None) -> None:
        if device is not None and device.type not in ("cpu", "meta"):
            raise self._failure(
                f"a tensor is asked for on device '{device}'",
                "leave model and batch on the CPU: what differs on the target device is put in afterwards",
            )

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on tensors without values; raises where its result's shape or number hangs on them."""
        return self._memo.result(func, args, kwargs)

    # -- values that are known -------------------------------------------------------------------------------------

    def _has_value(self, tensor: Tensor) -> bool:
        return not self._is_followed(tensor) or _key(tensor) in self._real

    def _value(self, tensor: Any) -> Any:
        """Returns the real tensor of one without values, as a view of the bytes kept for its storage."""
        if not self._is_followed(tensor):
            return tensor
        real = torch.empty(0, dtype=tensor.dtype)
        storage = self._real[_key(tensor)]
        return real.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[Tensor]) -> None:
        """Runs an operation on values as well, where its results are small enough."""
        results = tensors_in((out,))
        if not written and all(self._has_value(result) for result in results):
            return
        most_floats = _MOST_ELEMENTS if func in _CONSTANT else _MOST_FLOATS
        if not all(_is_small(tensor, most_floats) for tensor in (*results, *written)):
            self.forget(written)
            return
        with without_dispatch():
            real_out = func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
            if func in _EMPTY:
                real_out.zero_()
            reals = tensors_in((real_out,))
            for result, real in zip(results, reals, strict=True):
                if not self._has_value(result):
                    self.know(result, real)

    def _by_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation whose result's shape or number hangs on values, all of them known."""
        with without_dispatch():
            real_out = func(*tree_map(self._value, args), **tree_map(self._value, kwargs))

        def faked(real: Any) -> Any:
            if not isinstance(real, Tensor):
                return real
            fake = self._empty(real)
            self.know(fake, real)
            return fake

        return tree_map(faked, real_out)

    def _empty(self, real: Tensor) -> Tensor:
        """Returns a tensor without values that is laid out as a real one."""
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)

    # -- values that are not ---------------------------------------------------------------------------------------

    def _number(self, tensor: Tensor, is_known: bool) -> Any:
        if is_known:
            with without_dispatch():
                return self._value(tensor).item()
        if tensor.is_floating_point():
            return _ASSUMED_FLOAT
        kind = "a bool" if tensor.dtype is torch.bool else "an integer"
        raise self._failure(
            f"{kind} computed from weights or data becomes a Python value (.item(), int(), bool(), if, while)",
            "make the branch or size independent of tensor values, or record this workload live",
            NeedsValuesError,
        )

    def _positions(self, func: Any, indices: Any) -> list[Any]:
        """Returns the indices with masks replaced by the positions of their true elements."""
        found: list[Any] = []
        for index in indices:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            found += self._selected(func, index).unbind(1) if is_mask else [index]
        return found

    def _assumed(self, func: Any, args: Any) -> Any:
        if func is _CTC_LOSS and self._has_value(args[3]):
            num_frames, batch, _ = args[0].shape
            with without_dispatch():
                longest = int(self._value(args[3]).max())
            return args[0].new_empty((batch,)), args[0].new_empty((batch, num_frames, 2 * longest + 1))
        if func not in _SELECTIONS:
            raise self._failure(
                f"the result of {func} has a size that hangs on values computed from weights or data",
                "replace the operation by one with a fixed size, or record this workload live",
                NeedsValuesError,
            )
        if func is _aten.masked_select.default:
            return args[0].new_empty((self._selected(func, args[1]).shape[0],))
        return self._selected(func, args[0])

    def _selected(self, func: Any, mask: Tensor) -> Tensor:
        """Returns positions [selected, dimensions] of a mask's true elements; by the assumed share if unknown."""
        if self._has_value(mask):
            positions: Tensor = self._by_value(_aten.nonzero.default, (mask,), {})
            return positions
        if self._mask_share is None:
            raise self._failure(
                f"{func} selects by a mask of {mask.numel()} elements whose values hang on weights or data",
                "say which share of it is true (mask_share, e.g. 0.25), or record this workload live",
            )
        rows = round(mask.numel() * self._mask_share)
        return torch.empty((rows, mask.dim()), dtype=torch.int64, device=mask.device)

    def _failure(self, found: str, advice: str, kind: type[TraceError] = TraceError) -> TraceError:
        frame = user_frame()
        where = f" at {frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else ""
        return kind(f"{self._place()}: {found}{where}; {advice}")


def _key(tensor: Tensor) -> int:
    """Returns what tells a storage from others while it lives; 0 for tensors without one of their own."""
    return identity_of(tensor.untyped_storage()) if tensor.layout is torch.strided else 0


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation changes in place."""
    found = []
    for place, name in written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += tensors_in((value,))
    return found


def _is_small(tensor: Tensor, most_floats: int) -> bool:
    return tensor.numel() <= (most_floats if tensor.is_floating_point() else _MOST_ELEMENTS)
