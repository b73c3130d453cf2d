"""Keeps what a forward of a whole model changes, as it was: random numbers, buffers, plain attributes, variables."""

from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from memwall.apply.blocks.hidden_state import HiddenState
from memwall.apply.blocks.outer_variables import Variable, variables_of_code
from memwall.apply.memory.exhaustion import is_exhaustion
from memwall.apply.streaming.guard import GuardedParameter
from memwall.machine.process_group import num_processes
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.dispatch import without_dispatch, without_subclass_functions
from memwall.torch_internals.modules import is_running_norm, own_buffers, own_modules
from memwall.units import format_bytes

_ALWAYS_COPIED_BYTES = 1 << 16
"""Of a larger buffer that the first forward leaves as it was there is no copy from then on: tables and masks. Batch
statistics change without a trace, as the schema of aten::native_batch_norm does not say that it writes to them."""
_NUM_SAMPLED = 4096
"""Elements by which one sees whether a tensor was written past autograd: what does so writes all of them, mostly."""


class _Place(NamedTuple):
    """Says where a buffer is; a parameter is in none."""

    name: str
    owner: dict[str, Any]
    key: str
    tensor: Tensor


_tensor_of = attrgetter("tensor")


class ModelState:
    """Keeps what a forward may change of one model, from each `take` on.

    Large buffers are copied only where the first forward has changed them. Of one of several processes attributes are
    not put back: what shards a model has its own there.

    Args:
        most_bytes: where nothing but a forward runs until `settle` or `why_not`: what a buffer may have to be copied.
            Parameters and larger buffers must stay as they are, and `why_not` says so where they do not. None for a
            step: all buffers are copied, and somebody else looks at parameters.
    """

    def __init__(self, model: nn.Module, most_bytes: int | None = None) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._modules: list[tuple[str, nn.Module]] = []
        self._tables: list[dict[str, nn.Module | None]] = []
        self._found: list[nn.Module | None] = []
        self._buffers: list[_Place] = []
        self._copies: dict[str, _Copy] = {}
        self._standing: list[_Place] = []
        """Parameters, and buffers without copies."""
        self._versions: list[int] = []
        self._samples: list[Tensor] = []
        """Holds elements of all that stands before a first forward."""
        self._is_taken = self._is_settled = False
        self._lost_first: _Place | None = None
        """Says what the first forward has changed without a copy."""
        self._cached: str | None = None
        """Names what may stay in the cache of torch's parametrizations, with a graph that has saved these buffers."""
        self._shared: list[Variable] = []
        self._hidden: HiddenState | None = None
        self._random: Tensor | None = None
        self._device_random: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Takes down what the forward that is about to begin finds."""
        if self._is_taken:
            self.settle()
        self._is_taken = True
        with without_dispatch(), without_subclass_functions():
            if not self._modules or _values(self._tables) != self._found:
                self._find_modules()
            if any(each.owner.get(each.key) is not each.tensor for each in self._buffers):
                self._find_tensors()
            for copy in self._copies.values():
                copy.take()
            self._versions = list(map(version_of, map(_tensor_of, self._standing)))
            self._random = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                self._device_random = torch.cuda.get_rng_state_all()
        if num_processes() == 1 and (self._hidden is None or not self._hidden.hold_again()):
            self._hidden = HiddenState(self._modules, shared=self._shared, is_repeated=True)

    @torch.no_grad()
    def settle(self) -> None:
        """Notes, after a first forward or step, which tensors it has left as they were."""
        if self._is_settled:
            return
        with without_dispatch(), without_subclass_functions():
            self._lost_first = self._lost()
            copies = self._copies.items()
            kept = {id(tensor) for _, one in self._modules if is_running_norm(one) for tensor in one.buffers()}
            let_go = {
                name
                for name, copy in copies
                if copy.tensor.nbytes > _ALWAYS_COPIED_BYTES and id(copy.tensor) not in kept and not copy.has_changed()
            }
            self._standing += [each for each in self._buffers if each.name in let_go]
            self._copies = {name: copy for name, copy in copies if name not in let_go}
        self._samples, self._is_settled = [], True

    @torch.no_grad()
    def why_not(self) -> str | None:
        """Returns why the state cannot be put back; None if it can."""
        try:
            with without_dispatch(), without_subclass_functions():
                lost = self._lost_first or self._lost()
        except Exception as error:
            if not is_exhaustion(error):
                raise
            return "there is no memory left to see what its forward has changed"
        if self._cached is not None:
            return f"{self._cached} computes a parameter from buffers, and torch may have kept what it has computed"
        if lost is not None:
            return f"its forward changes {lost.name} ({format_bytes(lost.tensor.nbytes)}), of which there is no copy"
        if self._hidden is not None and self._hidden.written:
            return f"its forward writes into {self._hidden.written}"
        if self._hidden is not None and self._hidden.is_too_deep:
            return "it holds containers within containers, too many to be remembered"
        if self._hidden is not None and self._hidden.one_way:
            return f"its forward may have moved {self._hidden.one_way} on, which cannot go back"
        return None

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts everything back, for another forward. Copies stay."""
        with without_dispatch(), without_subclass_functions():
            for each in self._buffers:
                each.owner[each.key] = each.tensor
            for copy in self._copies.values():
                copy.put_back()
        if self._hidden is not None:
            self._hidden.put_back()
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._device_random:
            torch.cuda.set_rng_state_all(self._device_random)

    def _lost(self) -> _Place | None:
        now = list(map(version_of, map(_tensor_of, self._standing)))
        for number, each in enumerate(self._standing):
            if number < len(self._versions) and now[number] != self._versions[number]:
                return each
            if number < len(self._samples) and not torch.equal(self._samples[number], _sample(each.tensor)):
                return each
        return None

    def _find_modules(self) -> None:
        self._modules = list(self._model.named_modules())
        self._tables = [own for _, module in self._modules if (own := own_modules(module))]
        self._found = _values(self._tables)
        self._shared = variables_of_code([module for _, module in self._modules])
        self._hidden = None
        if self._most_bytes is not None:  # the cache lasts longer than a forward, not than a step
            found = (path for path, one in self._modules if isinstance(one, ParametrizationList) and _has_buffers(one))
            self._cached = next(found, None)
        self._find_tensors()

    def _find_tensors(self) -> None:
        self._buffers = [
            _Place(f"{path}.{key}" if path else key, own_buffers(module), key, tensor)
            for path, module in self._modules
            for key, tensor in own_buffers(module).items()
            if tensor is not None and not tensor.is_inference()
        ]
        most_bytes, known = self._most_bytes, self._copies
        copied = [each for each in self._buffers if most_bytes is None or each.tensor.nbytes <= most_bytes]
        self._copies = {
            each.name: known[each.name]
            if each.name in known and known[each.name].tensor is each.tensor
            else _Copy(each.tensor)
            for each in copied
        }
        self._standing = [each for each in self._buffers if each.name not in self._copies]
        if most_bytes is not None:
            self._standing += [
                _Place(name, {}, name, parameter)
                for name, parameter in self._model.named_parameters()
                if not isinstance(parameter, GuardedParameter) and not parameter.is_inference()
            ]
        if not self._is_settled:
            self._samples = [_sample(each.tensor) for each in self._standing]


class _Copy:
    """Holds what a buffer held before a forward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._copied = tensor, torch.empty_like(tensor)

    def take(self) -> None:
        self._copied.copy_(self.tensor)

    def has_changed(self) -> bool:
        return not torch.equal(self._copied, self.tensor)

    def put_back(self) -> None:
        self.tensor.copy_(self._copied)


def _has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None


def _sample(tensor: Tensor) -> Tensor:
    """Returns a copy of elements from all over a tensor; of what torch does not store itself nothing."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return torch.empty(0)
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _NUM_SAMPLED)].clone()


def _values(tables: list[dict[str, nn.Module | None]]) -> list[nn.Module | None]:
    return list(chain.from_iterable(map(dict.values, tables)))
