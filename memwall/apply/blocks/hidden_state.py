"""Puts back what a block's forward may read and change beside its arguments and parameters, for a run that repeats it.

Python's and numpy's random numbers, generators that a module owns, buffers, and plain attributes: a count of calls, a
running mean, a list that losses are appended to. torch's own checkpoint knows torch's global random state alone.
"""

import collections
import operator
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.blocks.held_values import HeldTensor, holds_the_same, is_generator, is_same, refill
from memwall.apply.blocks.numpy_random import numpy_state, set_numpy_state
from memwall.apply.blocks.outer_variables import Variable, hook_owners, hook_tables, variables_of_hooks
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.compiler import COMPILER_ATTRIBUTES
from memwall.torch_internals.dispatch import without_dispatch
from memwall.torch_internals.modules import is_running_norm, own_buffers
from memwall.units import format_bytes

# A module's attributes that are not its own: parameters, submodules, hooks, the compiler's, and what memwall attaches.
_NOT_PLAIN = (frozenset(vars(nn.Module())) - {"training"}) | {"forward", "__getstate__"} | COMPILER_ATTRIBUTES
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_SEARCHED = (list, dict)
_SCALARS = (bool, int, float, str, tuple, type(None))
# Objects with attributes that are not state of a forward, or not to be touched.
_NOT_HOLDERS = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, Tensor)
# Longer ones are copied, but not searched for tensors and generators.
_MAX_SEARCHED = 64
# A longer one outside of the modules is data, not what a forward collects.
_MAX_OUTER_ITEMS = 10_000
_MAX_DEPTH = 4


class HiddenState:
    """Holds the state at the moment this is made; the forward runs once between that and `settle`.

    Args:
        modules: the block and its submodules.
        shared: variables outside of the modules that their code names.
        is_written: whether a forward follows that may write into tensors; False where this is only to be put back.
        is_repeated: whether `hold_again` follows. Then buffers are not among it; otherwise those are that no layer
            keeps running statistics in.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        *,
        shared: Sequence[Variable] = (),
        is_written: bool = True,
        is_repeated: bool = False,
    ) -> None:
        self._modules, self._shared, self._is_written = modules, shared, is_written
        self._python: Any = random.getstate()
        self._numpy: Any = numpy_state()
        self._owned: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._variables: list[tuple[Variable, Any]] = []
        self._outer_contents: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Callable[[Any], Any], Any, Callable[[], Any]]] = []
        self._tensors: list[HeldTensor] = []
        self.unrestorable = ""
        """After `settle`: what forward wrote into that is too large to be remembered."""
        self.one_way = ""
        """Names what may have gone on with the forward and cannot go back: an iterator."""
        self.is_too_deep = False
        """Whether containers within containers were left out, as there are too many."""
        self._seen: set[int] = set()
        with without_dispatch():
            for path, module in modules:
                own = vars(module)
                self._own(own, {name: own[name] for name in own.keys() - _NOT_PLAIN}, path)
                buffers = own_buffers(module)
                if buffers and not is_repeated and not is_running_norm(module):
                    self._own(buffers, dict(buffers), path)
            inside = [module for path, module in modules if path]  # hooks of the block itself run outside of it
            for owner in hook_owners(inside):
                self._look_at({}, "", owner, "", "")
            self._inside, self._num_own_generators = inside, len(self._generators)
            self._flat = _Flat(inside, self._owned) if is_repeated else None
            self._outer = [*shared, *variables_of_hooks(inside)]
            for variable in self._outer:
                self._use(variable)

    def hold_again(self) -> bool:
        """Holds the state as it is now, at little cost; False where other objects are there, which a new one finds.

        To be called before each forward of a model, in place of a new one; nothing is settled then.
        """
        if self._flat is None or not self._flat.are_sizes_known():
            return False
        if not self._flat.is_same():
            for owner, values in self._owned:
                for name, value in values.items():
                    if owner.get(name) is not value:
                        if type(owner.get(name)) not in _SCALARS or type(value) not in _SCALARS:
                            return False
                        values[name] = owner[name]
            self._flat = _Flat(self._inside, self._owned)
        for place, (live, copied) in enumerate(self._contents):
            if not holds_the_same(live, copied):
                if not all(type(item) in _SCALARS for item in (live.values() if isinstance(live, dict) else live)):
                    return False
                self._contents[place] = (live, live.copy())
        with without_dispatch():
            for held in self._tensors:
                held.hold_again()
            own = self._generators[: self._num_own_generators]
            self._generators = [(set_state, get_state(), get_state) for set_state, _, get_state in own]
        self._python, self._numpy = random.getstate(), numpy_state()
        self._variables, self._outer_contents = [], []
        for variable in self._outer:
            self._use(variable)
        return True

    def put_back(self) -> None:
        """Puts the state back for good, as if the forward had never begun; tensors stay the same ones."""
        self._put_objects()
        with without_dispatch(), torch.no_grad():
            for held in self._tensors:
                held.put_back()

    @property
    def written(self) -> str:
        """Names what was written into since, and is too large to be remembered; "" where there is nothing."""
        large = (held for held in self._tensors if held.before is None and version_of(held.tensor) != held.version)
        return ", ".join(f"{held.name} ({format_bytes(held.tensor.nbytes)})" for held in large)

    def settle(self) -> None:
        """Forgets what the forward left as it was: a second run has nothing to change there either."""
        if random.getstate() == self._python:
            self._python = None
        if self._numpy is not None and is_same(self._numpy, numpy_state()):
            self._numpy = None
        self._variables = [found for found in self._variables if found[0].read() is not found[1]]
        self._outer_contents = [found for found in self._outer_contents if not holds_the_same(*found)]
        self._generators = [found for found in self._generators if not is_same(found[1], found[2]())]
        self._tensors = [held for held in self._tensors if version_of(held.tensor) != held.version]
        self.unrestorable = self.written

    @contextmanager
    def recalled(self) -> Iterator[None]:
        """Puts the state back as it was; afterwards it is as it is now again."""
        now = HiddenState(self._modules, shared=self._shared, is_written=False)
        now._python = now._python if self._python is not None else None
        now._numpy = now._numpy if self._numpy is not None else None
        # A container or generator that has left the modules since is written to all the same.
        now._variables = [(variable, variable.read()) for variable, _ in self._variables]
        now._outer_contents = [(live, live.copy()) for live, _ in self._outer_contents]
        now._contents += [(live, live.copy()) for live, _ in self._contents]
        now._generators += [(set_state, get_state(), get_state) for set_state, _, get_state in self._generators]
        self._put()
        try:
            yield
        finally:
            now._put()

    def _use(self, variable: Variable) -> None:
        """Remembers a variable outside of the modules; other objects than these are not taken to be their state."""
        value = variable.read()
        kind = type(value)
        if kind in _SCALARS or kind is Tensor:
            self._variables.append((variable, value))
        elif kind in _CONTAINERS:
            if len(value) <= _MAX_OUTER_ITEMS:
                self._contain(value, self._outer_contents)
            if kind in _SEARCHED and len(value) <= _MAX_SEARCHED:
                for item in value.values() if kind is dict else value:
                    if is_generator(item):
                        self._look_at({}, "", item, "", "")
        elif is_generator(value):
            self._look_at({}, "", value, "", "")

    def _own(self, owner: dict[str, Any], values: dict[str, Any], path: str) -> None:
        self._owned.append((owner, values))
        for name, value in values.items():
            kind = type(value)
            if kind in _SCALARS:
                continue
            if kind in _CONTAINERS:
                self._contain(value, self._contents)
                if kind in _SEARCHED and len(value) <= _MAX_SEARCHED:
                    for key, item in value.items() if kind is dict else enumerate(value):
                        self._look_at(value, key, item, name, path)
            else:
                self._look_at(owner, name, value, name, path)

    def _contain(self, value: Any, contents: list[tuple[Any, Any]], depth: int = 0) -> None:
        """Remembers what a container holds, and what containers within it hold."""
        contents.append((value, value.copy()))
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) in _CONTAINERS:
                if depth == _MAX_DEPTH or len(contents) > _MAX_OUTER_ITEMS:
                    self.is_too_deep = True
                    return
                self._contain(item, contents, depth + 1)

    def _look_at(self, owner: Any, key: Any, value: Any, name: str, path: str) -> None:
        """Remembers what lies within a value, where forward may change that."""
        kind = type(value)
        if kind is Tensor:
            if self._is_written and not value.is_inference():
                self._tensors.append(HeldTensor(owner, key, value, f"{path}.{name}" if path else name))
        elif kind is torch.Generator:
            self._generators.append((value.set_state, value.get_state(), value.get_state))
        elif kind is random.Random:
            self._generators.append((value.setstate, value.getstate(), value.getstate))
        elif kind.__name__ in ("Generator", "RandomState") and kind.__module__.startswith("numpy.random"):
            bits = value.bit_generator if kind.__name__ == "Generator" else value._bit_generator

            def set_state(state: Any) -> None:
                bits.state = state

            self._generators.append((set_state, bits.state, lambda: bits.state))
        elif hasattr(kind, "__next__"):
            self.one_way = f"{path}.{name}" if path else name
        elif hasattr(value, "__dict__") and not isinstance(value, _NOT_HOLDERS) and id(value) not in self._seen:
            self._seen.add(id(value))  # several modules may have one, as they have a configuration
            own = vars(value)
            self._own(own, dict(own), path)

    def _put(self) -> None:
        self._put_objects()
        with without_dispatch():
            for held in self._tensors:
                # Another tensor in its place: autograd may still need what the first one holds.
                before = held.tensor.detach() if held.before is None else held.before
                held.owner[held.key] = before.clone()

    def _put_objects(self) -> None:
        for owner, values in self._owned:
            for name in owner.keys() - values.keys() - (_NOT_PLAIN if "_modules" in owner else frozenset()):
                del owner[name]
            owner.update(values)
        for variable, value in self._variables:
            variable.bind(value)
        for live, copied in (*self._contents, *self._outer_contents):
            refill(live, copied)
        for set_state, state, _ in self._generators:
            set_state(state)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            set_numpy_state(self._numpy)


class _Flat:
    """Compares in little time what many objects hold with what they held."""

    def __init__(self, modules: Sequence[nn.Module], owned: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self._tables: list[dict[Any, Any]] = [*hook_tables(modules), *(owner for owner, _ in owned)]
        self._sizes = list(map(len, self._tables))
        self._owners = [owner for owner, values in owned for _ in values]
        self._names = [name for _, values in owned for name in values]
        self._values = [value for _, values in owned for value in values.values()]

    def are_sizes_known(self) -> bool:
        """Returns whether nothing was added or taken away, hooks neither."""
        return list(map(len, self._tables)) == self._sizes

    def is_same(self) -> bool:
        """Returns whether everything is the very same object."""
        return all(map(operator.is_, map(dict.get, self._owners, self._names), self._values))
