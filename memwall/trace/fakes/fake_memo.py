"""Results of operators on fake tensors, remembered: a step asks for the same ones in every block, and so does the next.

Torch's own fake mode remembers them, too; telling that a call is the same takes it most of the time of a recording.
Here a call is known by fewer things, and what these leave open is not remembered: constants, complex numbers, inference
tensors, arguments that are no plain values, operators that change how their arguments are laid out.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.dispatch import without_dispatch
from memwall.torch_internals.fake import FakeTensor
from memwall.torch_internals.operators import schema_of
from memwall.torch_internals.storages import identity_of

_CPU = torch.device("cpu")
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format}

_Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
"""Shape, strides, offset and dtype."""
_Recipe = Callable[[list[Tensor]], Any]
"""Makes an operator's result from the tensors among its arguments."""


class _NotRememberedError(Exception):
    """A call hangs on more than it is known by."""


class ResultMemo:
    """Makes results of operators on fake tensors that are laid out as before without asking torch again.

    Args:
        run: calls an operator with arguments and keyword arguments, where nobody has seen that yet.
    """

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._run = run
        self._recipes: dict[tuple[Any, ...], _Recipe | None] = {}
        self._is_remembered: dict[Any, bool] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what an operator returns."""
        is_remembered = self._is_remembered.get(func)
        if is_remembered is None:
            is_remembered = self._is_remembered[func] = _leaves_layouts(func)
        if not is_remembered or torch.is_inference_mode_enabled():
            return self._run(func, args, kwargs)
        num_tensors = _num_in_lists(func, args)
        if num_tensors < 2:
            return self._one(func, args, kwargs)
        parts = [
            self._one(func, tuple([arg[place]] if type(arg) is list else arg for arg in args), kwargs)
            for place in range(num_tensors)
        ]
        return None if parts[0] is None else [each for part in parts for each in part]

    def _one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        key: list[Any] = [func, torch.get_default_dtype()]
        try:
            _describe(args, key, tensors)
            if kwargs:
                key.append("by keyword")
                _describe(kwargs.items(), key, tensors)
        except _NotRememberedError:
            return self._run(func, args, kwargs)
        call = tuple(key)
        if call not in self._recipes:
            out = self._run(func, args, kwargs)
            self._recipes[call] = _recipe(out, tensors)
            return out
        recipe = self._recipes[call]
        return self._run(func, args, kwargs) if recipe is None else recipe(tensors)


def _leaves_layouts(func: Any) -> bool:
    """Tells whether an operator is one of torch's own, and leaves its arguments laid out as they are."""
    if getattr(func, "namespace", "") != "aten":
        return False
    return torch.Tag.inplace_view not in func.tags and not any(each.is_out for each in schema_of(func).arguments)


def _num_in_lists(func: Any, args: tuple[Any, ...]) -> int:
    """Returns how many tensors an operator treats one by one, as optimizers' do; 0 for any other operator."""
    if not func.__name__.startswith("_foreach_"):
        return 0
    lengths = {len(arg) for arg in args if type(arg) is list}
    return lengths.pop() if len(lengths) == 1 else 0


def _describe(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    """Adds to a key what results hang on, and tensors to theirs."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            dtype = value.dtype
            if value.constant is not None or dtype.is_complex or value.layout is not torch.strided:
                raise _NotRememberedError
            key += (value.shape, value.stride(), value.storage_offset(), dtype, value.requires_grad, value.fake_device)
            tensors.append(value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            _describe(value, key, tensors)
        elif kind in _PLAIN:
            key += (kind, value)  # 1 is equal to 1.0 and to True
        else:
            raise _NotRememberedError


def _recipe(out: Any, tensors: list[Tensor]) -> _Recipe | None:
    """Returns how a result is made anew; None for one that only torch makes."""
    if out is None:
        return lambda _: None
    if type(out) is not list and type(out) is not tuple:
        return _recipe_of_tensor(out, tensors)
    kind, parts = type(out), [_recipe(part, tensors) for part in out]
    known = {identity_of(tensor.untyped_storage()) for tensor in tensors}
    own = [identity_of(part.untyped_storage()) for part in out if isinstance(part, Tensor)]
    new = [storage for storage in own if storage not in known]
    if len(set(new)) < len(new) or any(part is None for part in parts):  # two results share what is new
        return None
    return lambda given: kind(part(given) for part in parts if part is not None)


def _recipe_of_tensor(out: Any, tensors: list[Tensor]) -> _Recipe | None:
    if type(out) is not FakeTensor or out.layout is not torch.strided:
        return None
    for place, tensor in enumerate(tensors):
        if out is tensor:
            return lambda given: given[place]
    if out.constant is not None or out.dtype.is_complex or out.requires_grad or out.fake_device != _CPU:
        return None
    mode, storage = out.fake_mode, out.untyped_storage()
    layout = (tuple(out.shape), out.stride(), int(out.storage_offset()), out.dtype)
    if any(identity_of(tensor.untyped_storage()) == identity_of(storage) for tensor in tensors):
        return (lambda given: _view(mode, layout, given[0])) if len(tensors) == 1 else None
    is_whole = out.storage_offset() == 0 and storage.nbytes() == _least_bytes(out)
    return (lambda _: _new(mode, layout)) if is_whole else None


def _least_bytes(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _new(mode: Any, layout: _Layout) -> Tensor:
    shape, stride, _, dtype = layout
    with without_dispatch():
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    made: Tensor = FakeTensor(mode, empty, _CPU)
    return made


def _view(mode: Any, layout: _Layout, base: Tensor) -> Tensor:
    shape, stride, offset, dtype = layout
    with without_dispatch():
        empty = torch.empty(0, dtype=dtype, device="meta")
        empty.set_(base.untyped_storage(), offset, shape, stride)
    made: Tensor = FakeTensor(mode, empty, _CPU)
    return made
