"""Gradients away, on disk or in the host's memory, between the backward that made them and the step that uses them.

`parameter.grad` is then a tensor without elements. Reading from it brings it back, an operation at a time; what scales
or clips it in place is noted and done when its elements are next in memory; what cannot be done so brings it back for
good. Clipping by norm therefore runs torch's own code, on a few gradients at a time.
"""

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.apply.streaming.places import Streamed, StreamingPlace
from memwall.errors import ApplyError
from memwall.store.paged import WriteBehind
from memwall.store.room import with_room
from memwall.torch_internals.dispatch import disabled_torch_function, make_wrapper, without_dispatch_modes
from memwall.torch_internals.operators import operator_named, schema_of
from memwall.torch_internals.storages import weak_tensor_dict
from memwall.torch_internals.trees import tree_leaves, tree_map

_aten: Any = torch.ops.aten
# Written in place, element by element, from numbers alone: these may wait.
_DEFERRED = frozenset(
    (
        *(_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar, _aten.neg_.default),
        *(_aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default, _aten.zero_.default),
    )
)

# Written in place, each by itself: what gradient scaling does to all of them at once.
_UNSCALED = operator_named("_amp_foreach_non_finite_check_and_unscale_.default")

Operation = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Is an operation on a gradient: what is called, the arguments that follow it, and those by name."""


class Reductions:
    """Knows the single numbers that the loop has asked of gradients, such as their norms.

    Once asked for, each is computed as soon as a gradient is there, so that clipping need not read it again.
    """

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}

    def note(self, operation: Operation) -> None:
        """Has it computed of every gradient from now on, unless it depends on other tensors."""
        name = _name(operation)
        if name is not None:
            self._operations[name] = operation

    def of(self, gradient: Tensor) -> dict[str, Tensor]:
        """Returns all of them, by name."""
        return {name: func(gradient, *args, **kwargs) for name, (func, args, kwargs) in self._operations.items()}


StandsFor = Callable[[Tensor, Tensor], None]
"""Tells a recorder that the first tensor holds what the second one held, which stays without memory."""


@functools.cache
def _plain_gradients() -> MutableMapping[Tensor, Tensor]:
    """Returns gradients of a recorded plain step, by the tensors that stand for them in memory while these live."""
    return weak_tensor_dict()


class GradientStore:
    """Keeps one parameter's gradient, over all steps.

    Args:
        place: where they go.
        writes: takes gradients to be written.
        reductions: what to compute of each gradient while it is in memory.
        parameter: gives dtype, shape and strides.
        label: names the gradient in an error.
        put_back: makes a tensor in memory the parameter's gradient.
    """

    def __init__(
        self,
        place: StreamingPlace,
        writes: WriteBehind,
        reductions: Reductions,
        parameter: Tensor,
        label: str,
        put_back: Callable[[Tensor], None],
    ) -> None:
        self._place, self._writes, self._reductions = place, writes, reductions
        self.label, self._put_back = label, put_back
        self._like = parameter
        self._paged: Streamed | None = None
        self._numbers: dict[str, Tensor] = {}
        self._deferred: list[Operation] = []
        # How many of these are done in memory; on disk none is.
        self._num_done = 0
        self.handle: SpilledGradient | None = None
        """Stands for the gradient; None while there is none here."""
        self._plain: tuple[Tensor, StandsFor] | None = None
        """Holds, while a step is recorded, the plain step's gradient, without its memory, and who is to be told."""

    @property
    def resident_bytes(self) -> int:
        """Counts the memory it takes."""
        return self._paged.num_bytes if self._paged is not None and self._paged.is_resident else 0

    @property
    def address(self) -> int:
        """Says where its elements lie whenever they are in memory."""
        return self._paged_tensor().tensor.data_ptr()

    def add(self, new: Tensor, stands_for: StandsFor | None = None) -> None:
        """Takes what a backward has computed: the gradient, or one more term of it.

        Args:
            stands_for: who is to be told, while the step is recorded.
        """
        with without_dispatch_modes():  # a move is no part of the step
            self._add(new, stands_for)

    def _add(self, new: Tensor, stands_for: StandsFor | None) -> None:
        if self.handle is None:
            paged = self._paged_tensor()
            paged.overwrite()
            paged.tensor.copy_(new)
            self.handle = SpilledGradient(self, paged.tensor)
            if stands_for is not None and new.untyped_storage().resizable():
                stands_for(self.handle, new)
                stands_for(paged.tensor, new)
                self._plain = new, stands_for
                new.untyped_storage().resize_(0)
        else:
            self.load()
            paged = self._paged_tensor()
            paged.changed()
            # What autograd does with a second gradient (AccumulateGrad): the sum so far += the new one.
            paged.tensor.add_(new)
        self._deferred, self._num_done = [], 0
        self._numbers = self._reductions.of(paged.tensor)
        self.unload()

    def begin_load(self) -> None:
        """Begins to read it, if there is one."""
        if self.handle is not None:
            self._paged_tensor().begin_read()

    def load(self) -> Tensor:
        """Returns the gradient, in memory until `unload`."""
        paged = self._paged_tensor()
        if not paged.is_here:
            self._num_done = 0
        paged.want()
        if self._num_done < len(self._deferred):
            paged.finish_write()
            # On disk it stays as it was: what is noted is done again at the next load.
            with without_dispatch_modes():
                for func, args, kwargs in self._deferred[self._num_done :]:
                    func(paged.tensor, *args, **kwargs)
            self._num_done = len(self._deferred)
        return paged.tensor

    def unload(self) -> None:
        """Gives its memory up, after writing it if it is new."""
        if self.handle is not None:
            self._writes.put_away(self._paged_tensor())

    def defer(self, operation: Operation) -> None:
        """Notes what is to be done to the gradient when it is next in memory."""
        self._deferred.append(operation)
        self._numbers = {}

    def rewrite(self, write: Callable[[Tensor], object]) -> None:
        """Has its elements written in memory, and away again."""
        tensor = self.load()
        self._paged_tensor().changed()
        try:
            write(tensor)
        finally:
            self._deferred, self._num_done, self._numbers = [], 0, {}
            self.unload()

    def drop(self) -> None:
        """Forgets the gradient; its place on disk is kept for the next one."""
        if self.handle is not None:
            self.handle, self._plain, self._deferred, self._numbers = None, None, [], {}
            self._paged_tensor().let_go()

    def take(self) -> Tensor:
        """Puts the gradient back into memory for good."""
        assert self.handle is not None
        with without_dispatch_modes():
            handle, taken = self.handle, with_room(self.load().clone)
        if self._plain is not None:
            plain, stands_for = self._plain
            stands_for(taken, plain)
            _plain_gradients()[taken] = plain  # which the record has for as long as it lives
        self.drop()
        handle.taken = taken
        self._put_back(taken)
        return taken

    def forget(self) -> None:
        """Gives its place on disk up too."""
        self.drop()
        if self._paged is not None:
            self._paged.forget()

    def compute(self, operation: Operation) -> Any:
        """Returns what an operation that writes nothing makes of the gradient."""
        known = self._numbers.get(_name(operation) or "")
        if known is not None:
            return known.clone()
        func, args, kwargs = operation
        try:
            found = func(self.load(), *args, **kwargs)
        finally:
            self.unload()
        if isinstance(found, Tensor) and found.numel() == 1:
            self._reductions.note(operation)
        return found

    def _paged_tensor(self) -> Streamed:
        if self._paged is None:
            self._paged = self._place.like(self._like, self.label)
        return self._paged


class SpilledGradient(Tensor):
    """Stands for a gradient whose elements are on disk."""

    _store: GradientStore
    taken: Tensor | None
    """Is the gradient, once it is in memory for good."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, store: GradientStore, like: Tensor) -> "SpilledGradient":
        made: SpilledGradient = make_wrapper(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made._store, made.taken = store, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpilledGradient(size={tuple(self.size())}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        """Returns where its elements lie whenever they are in memory."""
        return self.taken.data_ptr() if self.taken is not None else self._store.address

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        away = list(dict.fromkeys(v for v in tree_leaves((args, kwargs)) if isinstance(v, SpilledGradient)))
        away = [handle for handle in away if handle.is_away()]
        if func is _UNSCALED:
            return _unscale(away, *args)
        if len(away) == 1 and away[0] is args[0]:
            operation = (func, args[1:], kwargs)
            if func in _DEFERRED and all(_is_number(value) for value in tree_leaves((args[1:], kwargs))):
                away[0]._store.defer((func, *tree_map(_own, (args[1:], kwargs))))
                return away[0]
            if not schema_of(func).is_mutable and not func.is_view:
                return away[0]._store.compute(operation)
        return _run(func, args, kwargs, away)

    def is_away(self) -> bool:
        """Returns whether its elements must be read from disk.

        Raises:
            ApplyError: there are none any more: the gradient was dropped, by `zero_grad` say.
        """
        if self.taken is None and self._store.handle is not self:
            raise ApplyError(
                f"{self._store.label} was kept by the loop beyond the moment when it was dropped (zero_grad) or "
                "replaced, and its elements are gone; clone() a gradient that is needed later"
            )
        return self.taken is None


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], away: list[SpilledGradient]) -> Any:
    """Runs an operation on gradients in memory: for its time only, or for good if it writes to them or makes views."""
    written = {id(value) for value in tree_leaves(_written(func, args, kwargs))}
    in_memory: dict[int, Tensor] = {}
    loaded: list[GradientStore] = []
    try:
        for handle in away:
            if func.is_view or id(handle) in written:
                in_memory[id(handle)] = handle._store.take()
            else:
                loaded.append(handle._store)
                in_memory[id(handle)] = handle._store.load()

        def real(value: Any) -> Any:
            if not isinstance(value, SpilledGradient):
                return value
            return in_memory.get(id(value), value.taken)

        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)
    finally:
        for store in loaded:
            store.unload()


def _unscale(away: list[SpilledGradient], gradients: Sequence[Tensor], *numbers: Tensor) -> None:
    """Takes the scale off gradients, those that are away one after the other, and notes whether one is not finite."""
    for handle in away:
        handle._store.rewrite(lambda gradient: _UNSCALED([gradient], *numbers))
    is_away = set(map(id, away))
    others = [gradient for gradient in gradients if id(gradient) not in is_away]
    here = [gradient.taken if isinstance(gradient, SpilledGradient) else gradient for gradient in others]
    if here:
        _UNSCALED(here, *numbers)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, SpilledGradient))


def _own(value: Any) -> Any:
    """Returns the value as it is now, should a tensor of it change later."""
    return value.clone() if isinstance(value, Tensor) else value


def _name(operation: Operation) -> str | None:
    """Returns the same for the same operation with the same numbers; None if it depends on other tensors."""
    func, args, kwargs = operation
    if any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs))):
        return None
    return f"{func} {args} {sorted(kwargs.items())}"
