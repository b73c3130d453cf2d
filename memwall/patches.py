"""Changes that memwall makes at run time to objects that are not its own: who made them, and how they are taken back.

A group takes its changes back in reverse order, each only where what lies there is still memwall's, whatever fails:

    patches = Patches("scales the gradients of float16")
    patches.wrap(torch.autograd, "backward", run)
    patches.hook(register_optimizer_step_pre_hook, before_step)
    ...
    patches.undo()

`active` lists what is in effect in this process. Hooks on tensors of a graph are not among it: they end with the graph.
The book holds no object, so a change ends with the module, optimizer or parameter that it was made to.
"""

import functools
import itertools
import logging
import os
import random
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from msgspec import Struct

_log = logging.getLogger(__name__)

_MISSING: Any = object()
_WRAPS = "_memwall_wraps"


class InEffect(Struct, frozen=True, kw_only=True):
    """Describes one change that is in effect."""

    number: int
    """Counts up over the life of the process."""
    what: str
    """The kind of change: "attribute", "hook", "environment variable", and others."""
    where: str
    """The object and the name that were changed, as "torch.autograd.backward"."""
    why: str
    permanent: str = ""
    """Why it cannot be taken back; "" for a change that has to be."""


_active: dict[int, tuple[InEffect, "weakref.ref[Any] | None"]] = {}
_numbers = itertools.count(1)


def active() -> tuple[InEffect, ...]:
    """Returns every change in effect in this process, the oldest first."""
    return tuple(entry for entry, _ in list(_active.values()))


def note_permanent(what: str, where: str, *, why: str, reason: str) -> None:
    """Lists a change that stays until the process ends. A second note of the same place changes nothing.

    Args:
        reason: why it cannot be taken back.
    """
    if not any(entry.permanent and (entry.what, entry.where) == (what, where) for entry in active()):
        number = next(_numbers)
        _active[number] = InEffect(number=number, what=what, where=where, why=why, permanent=reason), None


def unwrapped(function: Any) -> Any:
    """Returns the function itself, without what `Patches.wrap` has put around it."""
    while True:
        # Whoever wraps such a function by functools.wraps has its attributes, too.
        outer, original = getattr(function, _WRAPS, (None, None))
        if outer is not function or outer is None:
            return function
        function = original


def undo_all(undos: Sequence[Callable[[], object]]) -> None:
    """Calls all of them, the last one first, whatever of it fails; raises the first failure at the end."""
    first: BaseException | None = None
    for undo in reversed(undos):
        try:
            undo()
        except BaseException as error:  # an interruption as well: half a restored process is worse than a late one
            if first is not None:
                _log.warning("a further change could not be taken back: %s: %s", type(error).__name__, error)
            first = first or error
    if first is not None:
        raise first


class Patch:
    """Holds one change in effect, until `undo`.

    Args:
        undo: takes it back.
        owner: what was changed, where the change ends with it; None for what lives as long as the process.
        permanent: see `InEffect`.
    """

    is_over = False
    """Whether taking it back has begun: what is left of it under somebody else's change does nothing any more."""

    def __init__(
        self, what: str, where: str, *, why: str, undo: Callable[[], object], owner: Any = None, permanent: str = ""
    ) -> None:
        self._undo, self._is_listed = undo, True
        self._number = number = next(_numbers)
        life = None if owner is None else weakref.ref(owner, lambda _: _active.pop(number, None))
        _active[number] = InEffect(number=number, what=what, where=where, why=why, permanent=permanent), life

    def undo(self) -> None:
        """Takes the change back. Safe to call twice; one that could not be taken back stays in the list."""
        self.is_over = True
        if self._is_listed:
            self._take_back()
            self._is_listed = False
            _active.pop(self._number, None)

    def _take_back(self) -> None:
        self._undo()


class Patches:
    """Changes that serve one purpose; `undo` takes all of them back, the last one first.

    Args:
        why: the purpose, as "scales the gradients of float16".
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._made: list[Patch] = []

    def replace(self, owner: Any, name: str, value: Any, *, permanent: str = "") -> Patch:
        """Puts a value in place of an attribute of a module, a class or an object; "__class__" is one as well.

        `undo` restores what was there if the value still is. A function has to be made by `wrap`.
        """
        what = "class" if name == "__class__" else "attribute"
        place = f"{_name_of(owner)}.{name}"
        return self.push(_Value(what, place, _Attribute(owner, name), value, why=self._why, permanent=permanent))

    def wrap(self, owner: Any, name: str, run: Callable[..., Any]) -> Patch:
        """Has calls of a function, a method of a class or a static method run `run(original, *args, **kwargs)`.

        Where somebody has wrapped that in turn, it stays in the chain after `undo` and calls the original only.
        """
        before = vars(owner).get(name)
        original = before.__func__ if isinstance(before, staticmethod) else getattr(owner, name)
        patch: Patch | None = None

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if patch is not None and patch.is_over:
                return original(*args, **kwargs)
            return run(original, *args, **kwargs)

        setattr(wrapped, _WRAPS, (wrapped, original))
        patch = self.replace(owner, name, staticmethod(wrapped) if isinstance(before, staticmethod) else wrapped)
        return patch

    def hook(self, register: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Patch:
        """Registers a hook, as by `model.register_forward_hook` or torch's `register_optimizer_step_pre_hook`.

        Args:
            register: takes the hook and the options, and returns a handle with `remove`.
        """
        handle = register(function, **options)
        owner = getattr(register, "__self__", None)
        where = f"{_name_of(register if owner is None else owner)}{'' if owner is None else f'.{register.__name__}'}"
        return self.push(Patch("hook", where, why=self._why, undo=handle.remove, owner=owner))

    def environment(self, name: str, value: str) -> Patch:
        """Sets an environment variable, for this process and those that it starts."""
        return self.push(_Value("environment variable", name, _Variable(name), value, why=self._why))

    def add(
        self, what: str, where: str, undo: Callable[[], object], *, owner: Any = None, permanent: str = ""
    ) -> Patch:
        """Lists a change of another kind, which has been made.

        Args:
            undo: takes it back.
            owner: see `Patch`, as `permanent`.
        """
        return self.push(Patch(what, where, why=self._why, undo=undo, owner=owner, permanent=permanent))

    def enter(self, what: str, where: str, context: AbstractContextManager[object]) -> Patch:
        """Enters a context that makes a change; `undo` leaves it, as if nothing had been raised in it."""
        context.__enter__()
        return self.add(what, where, lambda: context.__exit__(None, None, None))

    def push(self, patch: Patch) -> Patch:
        """Makes a change that was made elsewhere one of this group."""
        self._made.append(patch)
        return patch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Takes everything back, the last one first, whatever of it fails; raises the first failure at the end.

        Safe to call twice. What failed stays in `active`, and is not tried again.
        """
        made, self._made = self._made, []
        undo_all([patch.undo for patch in made])


class _Value(Patch):
    """Holds a value that stands where another one stood, or none."""

    def __init__(
        self, what: str, where: str, slot: "_Attribute | _Variable", value: Any, *, why: str, permanent: str = ""
    ) -> None:
        self.slot, self.value, self.before = slot, value, slot.get()
        self._where = where
        slot.set(value)
        super().__init__(what, where, why=why, undo=lambda: None, owner=slot.mortal(), permanent=permanent)
        _values.add(self)

    def _take_back(self) -> None:
        later = next((p for p in _values if not p.is_over and p.slot == self.slot and p.stands_on(self)), None)
        if later is not None:
            later.before = self.before  # ours as well: it puts back what stood here
        elif self.slot.has(self.value):
            self.slot.set(self.before)
        elif self.slot.is_there:
            _log.warning("%s was changed by somebody else after memwall, and is left as it is now", self._where)
        self.value = self.before = None

    def stands_on(self, other: "_Value") -> bool:
        """Says whether the other one's value was found where this one's was put."""
        return self.slot.are_same(self.before, other.value)


_values: "weakref.WeakSet[_Value]" = weakref.WeakSet()
"""Those that somebody can still undo."""


class _Attribute:
    """Names an attribute of a module, a class or an object, which this does not keep alive."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attribute) and self._owner() is other._owner() and self._name == other._name

    def mortal(self) -> Any:
        owner = self._owner()
        return None if isinstance(owner, types.ModuleType) else owner

    @property
    def is_there(self) -> bool:
        return self._owner() is not None

    def get(self) -> Any:
        owner = self._owner()
        return type(owner) if self._name == "__class__" else vars(owner).get(self._name, _MISSING)

    def are_same(self, one: Any, other: Any) -> bool:
        return one is other

    def has(self, value: Any) -> bool:
        return self.is_there and self.get() is value

    def set(self, value: Any) -> None:
        owner = self._owner()
        if value is _MISSING:
            delattr(owner, self._name)
        elif not isinstance(owner, type) and _hands_on(type(owner)):
            object.__setattr__(owner, self._name, value)
        else:
            setattr(owner, self._name, value)


def _hands_on(owner: type) -> bool:
    """Tells whether objects may hand on what is set to another one, as Lightning's Fabric does to what it wraps.

    Such a class looks up elsewhere what it lacks, and has its own way to set attributes; torch's modules have both.
    """
    ways = (vars(each).get(name) for each in owner.__mro__ for name in ("__getattr__", "__setattr__"))
    own = {way.__name__ for way in ways if isinstance(way, types.FunctionType) and way.__module__[:6] != "torch."}
    return len(own) == 2


class _Variable:
    """Names an environment variable."""

    is_there = True

    def __init__(self, name: str) -> None:
        self._name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Variable) and self._name == other._name

    def mortal(self) -> None:
        return None

    def get(self) -> Any:
        return os.environ.get(self._name, _MISSING)

    def are_same(self, one: Any, other: Any) -> bool:
        return bool(one == other)

    def has(self, value: Any) -> bool:
        return self.are_same(self.get(), value)

    def set(self, value: Any) -> None:
        if value is _MISSING:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = value


def _name_of(owner: Any) -> str:
    """Returns the name of a module, a class or a function; of an object that of its class."""
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    named = owner if hasattr(owner, "__qualname__") else type(owner)
    return f"{named.__module__}.{named.__qualname__}"


@contextmanager
def with_random_numbers_kept() -> Iterator[None]:
    """Has a script's next random numbers, of Python's `random`, be those that come without memwall.

    Libraries draw some where they are loaded, as rich does for its styles.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
