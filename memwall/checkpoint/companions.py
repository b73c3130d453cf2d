"""Finds what training depends on beside the model and its optimizer: moving averages, teachers, generators.

It is found by the script's variables (`reachable`), so that a new process finds the same ones under the same names.
What cannot be committed is named: the position in a data loader, or in a generator function, and what a run makes after
its first update, which a resumed run does not have yet.
"""

import random
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from memwall.apply.blocks.held_values import is_generator
from memwall.checkpoint.discovery import HELPERS
from memwall.checkpoint.reachable import reachable
from memwall.checkpoint.training_state import Part, decode_objects, encode_objects, is_plain
from memwall.errors import ApplyError
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.modules import is_loader_iterator
from memwall.torch_internals.sharding import is_sharded
from memwall.trace.together import models_of

PREFIX = "beside/"
"""Begins the name of a tensor that belongs to none of the model and the optimizer."""


class State(NamedTuple):
    """Holds companions at one instant."""

    objects: bytes
    """The states of generators, other optimizers and whatever has a state dict, by name."""
    versions: tuple[int, ...]
    parts: tuple[Part, ...]


class Companions:
    """Holds what was found so far; each has the name under which it was found first."""

    def __init__(self) -> None:
        self._generators: dict[str, Any] = {}
        self._stateful: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._known: set[int] = set()
        self._refused: dict[tuple[str, int], str] = {}
        """Reasons why the state of an object cannot be committed, by its name and identity; "" where it can."""
        self._early: set[str] | None = None
        """Names of those that were there before the first update; None until that."""
        self.uncommitted: list[str] = []
        """Names what a resumed run begins anew with."""
        self.copies = False
        """Says whether tensors are copied at the top of the loop: a script changes them before its model runs."""

    def look(self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer], given: Iterable[Any]) -> None:
        """Finds what the script's variables lead to by now: they may lead to other objects than before.

        Args:
            model, optimizers: what is committed anyway; None and () where it is not known yet, then modules wait.
            given: what the script names itself.
        """
        own = _Own(model, optimizers, given)
        self._generators, self._stateful, self._tensors, self._known = {}, {}, {}, set()
        self.uncommitted = []
        for name, value in reachable():
            if id(value) in self._known or id(value) in own.numbers:
                continue
            if is_generator(value):
                self._generators[name] = value
            elif isinstance(value, nn.Module):
                if model is not None:
                    self._add_module(name, value, own)
            elif isinstance(value, torch.optim.Optimizer):
                if optimizers and not isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer):
                    self._add_stateful(name, value)
            elif isinstance(value, HELPERS):
                if isinstance(value, LRScheduler) and optimizers and value.optimizer not in optimizers:
                    self._add_stateful(name, value)
            elif is_loader_iterator(value) or (isinstance(value, types.GeneratorType) and not _is_own(value)):
                self.uncommitted.append(f"the position in '{name}' ({type(value).__name__})")
            elif isinstance(value, dict):
                if own.names and own.names.issuperset(value):
                    self._add_tensors(name, value, own)
            elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
                self._add_stateful(name, value)
        if self._early is not None:
            self._leave_out(self.names() - self._early)

    def settle(self) -> None:
        """Says that the first update begins: what comes later, as a best state, is named and not committed.

        A resumed run makes it only when it has something to put there, and could not be told from one that lacks it.
        """
        if self._early is None:
            self._early = self.names()

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether an optimizer is one of them."""
        return any(value is optimizer for value in self._stateful.values())

    def parts(self) -> list[Part]:
        """Returns their tensors: what has not changed since the last commit is not written again."""
        return [Part(f"{PREFIX}{name}", tensor, "frozen") for name, tensor in self._tensors.items()]

    def take(self) -> State:
        """Returns all of them as they are now; tensors where they lie, or copied, see `copies`."""
        parts = self.parts()
        if self.copies:
            parts = [Part(part.name, part.tensor.detach().clone(), part.kind) for part in parts]
        objects = {
            "generators": {name: generator_state(value) for name, value in self._generators.items()},
            "stateful": {name: value.state_dict() for name, value in self._stateful.items()},
            "uncommitted": list(self.uncommitted),
        }
        return State(encode_objects(objects), tuple(version_of(part.tensor) for part in parts), tuple(parts))

    def restore(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Gives generators and others their states, and takes those out of what is left to give."""
        for name in [name for name in saved["generators"] if name in self._generators]:
            set_generator_state(self._generators[name], saved["generators"].pop(name))
        for name in [name for name in saved["stateful"] if name in self._stateful]:
            self._stateful[name].load_state_dict(saved["stateful"].pop(name))

    def names(self) -> set[str]:
        """Returns the names of all of them; of tensors those of what holds them."""
        return {*self._generators, *self._stateful, *(holder_of(name) for name in self._tensors)}

    def _leave_out(self, late: set[str]) -> None:
        self._generators = {name: value for name, value in self._generators.items() if name not in late}
        self._stateful = {name: value for name, value in self._stateful.items() if name not in late}
        self._tensors = {name: value for name, value in self._tensors.items() if holder_of(name) not in late}
        self.uncommitted += [f"'{name}', which was made after the first update" for name in sorted(late)]

    def _add_module(self, name: str, module: nn.Module, own: "_Own") -> None:
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._add_tensor(f"{name}/{path}", tensor, own)
        self._known.update(map(id, module.modules()))

    def _add_tensors(self, name: str, value: dict[str, Any], own: "_Own") -> None:
        """Adds a dictionary of tensors by the model's names: a moving average without a module, or a best state."""
        if all(type(one) is Tensor and not one.requires_grad for one in value.values()):
            for key, tensor in value.items():
                self._add_tensor(f"{name}/{key}", tensor, own)
        elif any(isinstance(one, Tensor) and is_sharded(one) and id(one) not in own.numbers for one in value.values()):
            self._name_divided(name)

    def _add_tensor(self, name: str, tensor: Tensor, own: "_Own") -> None:
        if id(tensor) not in own.numbers and id(tensor) not in self._known and is_plain(tensor):
            if tensor.data_ptr() not in own.addresses:
                self._tensors[name] = tensor
            self._known.add(id(tensor))
        elif is_sharded(tensor) and id(tensor) not in own.numbers:
            self._name_divided(name.partition("/")[0])

    def _name_divided(self, name: str) -> None:
        text = f"'{name}', whose tensors are divided among ranks"
        if text not in self.uncommitted:
            self.uncommitted.append(text)

    def _add_stateful(self, name: str, value: Any) -> None:
        if (name, id(value)) not in self._refused:
            self._refused[name, id(value)] = _why_not_committed(value)
        reason = self._refused[name, id(value)]
        if reason:
            self.uncommitted.append(f"'{name}' ({type(value).__name__}): {reason}")
        else:
            self._stateful[name] = value


class _Own:
    """Says what is committed anyway: by identity, address and the names of the model's tensors."""

    def __init__(
        self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer], given: Iterable[Any]
    ) -> None:
        tensors = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
        trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        modules = [] if model is None else model.modules()
        each = () if model is None else models_of(model)  # a script names the tensors of one as that does
        self.names = {name for one in each for name, _ in (*one.named_parameters(), *one.named_buffers())}
        self.numbers = {id(one) for one in (*optimizers, *given, *modules, *trained, *(one for _, one in tensors))}
        self.addresses = {one.data_ptr() for _, one in tensors if is_plain(one)} - {0}


def _why_not_committed(value: Any) -> str:
    try:
        decode_objects(encode_objects({"state": value.state_dict()}))
    except ApplyError as error:
        return str(error)
    except Exception as error:  # whatever a method of this name does in a script
        return f"state_dict() raises {error!r}"
    return ""


def holder_of(name: str) -> str:
    """Returns the variable that leads to a tensor of this name."""
    return name.removeprefix(PREFIX).partition("/")[0]


def _is_own(value: Any) -> bool:
    frame = value.gi_frame
    return frame is None or str(frame.f_globals.get("__name__", "")).startswith(("memwall", "torch"))


def generator_state(generator: Any) -> Any:
    """Returns the state of a generator that `is_generator` knows, without arrays of numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return _without_arrays(bits.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Sets a generator to what `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        bits = getattr(generator, "bit_generator", None) or generator._bit_generator
        bits.state = _with_arrays(state)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    return {"array": str(value.dtype), "values": value.tolist()} if hasattr(value, "tolist") else value


def _with_arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "values"}:
        import numpy as np

        return np.array(value["values"], dtype=value["array"])
    return {key: _with_arrays(part) for key, part in value.items()}
