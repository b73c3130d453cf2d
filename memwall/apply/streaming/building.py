"""Parameters that leave while modules are still being built: the oldest first, as soon as there are too many.

Those of a CPU go to disk as modules get them, those of a CUDA device to the host's memory, as modules get them there or
are moved there.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from memwall.apply.streaming.guard import GuardedParameter
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.streamed_parameter import StreamedParameter
from memwall.machine.meter import process_bytes, return_free_memory
from memwall.machine.process_group import num_processes
from memwall.patches import Patches
from memwall.planning.techniques.parameters import passing_bytes
from memwall.torch_internals.modules import own_parameters, when_moved

# What Python and torch make beside parameters while a model is built.
_SLACK_BYTES = 16 << 20
# After so many parameters have left it is asked which of them still exist, then after twice as many.
_FIRST_SWEEP = 64


def _host_bytes() -> int:
    return process_bytes()


def leaves_no_room(
    budget_bytes: int, window_bytes: int, held_bytes: Callable[[], int] = _host_bytes
) -> Callable[[nn.Parameter], bool]:
    """Returns what tells that a model has outgrown a budget: the process leaves no room to have it leave.

    Not before parameters take more than passes through memory on the way there: nothing would be won.

    Args:
        held_bytes: says what the process holds where parameters are built.
    """
    made_bytes = largest_bytes = 0

    def must_leave(parameter: nn.Parameter) -> bool:
        nonlocal made_bytes, largest_bytes
        made_bytes, largest_bytes = made_bytes + parameter.nbytes, max(largest_bytes, parameter.nbytes)
        coming_bytes = passing_bytes(window_bytes, largest_bytes)
        if made_bytes < coming_bytes or num_processes() > 1:
            return False
        return held_bytes() + coming_bytes + _SLACK_BYTES > budget_bytes

    return must_leave


class Building:
    """Watches modules get their parameters, until `end`; random numbers are drawn as without.

    Later uses of a parameter that has left, as by `reset_parameters`, `nn.init`, tying or loading, fetch it. One that
    is given other memory, as by `.to(torch.bfloat16)`, comes back, and leaves again like a new one.

    Args:
        must_leave: of a new parameter, whether those before it have to leave; not asked again once they had to.
        open_tier: makes what takes them, when it is needed.
        device_type: the kind of device whose memory they leave; of several it is the first parameter's.
        held_bytes: says what the process holds there.

    Raises:
        StoreError: where a module gets a parameter: no room on disk, or a transfer failed.
    """

    def __init__(
        self,
        must_leave: Callable[[nn.Parameter], bool],
        open_tier: Callable[[], ParameterTier],
        *,
        device_type: str = "cpu",
        held_bytes: Callable[[], int] = _host_bytes,
    ) -> None:
        self._must_leave, self._open_tier = must_leave, open_tier
        self._device_type, self._held_now = device_type, held_bytes
        self.device: torch.device | None = None
        """The one that parameters leave; None before the first is made there. Those on others stay."""
        self.tier: ParameterTier | None = None
        """Has what was put on disk so far; None if nothing was."""
        self._is_over = False
        self._held_bytes = self._made_bytes = 0
        """Hold what the process and the parameters made so far took when the first of them left."""
        # What nobody else refers to any more, as a head that was tied afterwards, is gone.
        self._shared: list[tuple[weakref.ref[nn.Parameter], str]] = []
        self._waiting: dict[int, tuple[weakref.ref[nn.Parameter], str, int]] = {}
        self._waiting_bytes = 0
        # What another thread builds stays: that thread may write to it at any moment, in code that knows no lock.
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # parameters may die in any thread
        self._num_left, self._next_sweep = 0, _FIRST_SWEEP
        self._patches = Patches("puts parameters on disk while modules are built")
        self._patches.hook(register_module_parameter_registration_hook, self._registered)
        # Modules that are copied, as the layers of nn.Transformer are, get their parameters without a word.
        self._patches.wrap(nn.Parameter, "__deepcopy__", self._copied)
        self._patches.wrap(nn.Parameter, "__new__", _made_of)
        if device_type != "cpu":
            when_moved(self._patches, self._moved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.finish()
        self.end()

    def finish(self) -> None:
        """Has what still waits leave, too, and returns once all is on disk.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        if self.tier is not None:
            self._let_go(self.tier, 0, but=0)
            self.tier.writes.drain()

    def end(self) -> None:
        """Modules keep their parameters from now on. Safe to call twice."""
        if self._is_over:
            return
        self._is_over = True
        self._patches.undo()
        self._waiting.clear()
        self._shared.clear()
        if self.tier is not None:
            self.tier.on_replaced = None

    @property
    def stays_from_bytes(self) -> int:
        """Says from which budget on the same models are built in memory, at least; 0 where they were."""
        if self.tier is None:
            return 0
        sizes = [member.values.num_bytes for member in self.tier]
        made_bytes = sum(sizes) + self._waiting_bytes - self._made_bytes
        coming_bytes = passing_bytes(self.tier.window_bytes, max(sizes, default=0))
        return self._held_bytes + max(0, made_bytes) + coming_bytes + _SLACK_BYTES

    def _copied(self, original: Callable[..., Any], parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        result = original(parameter, memo)
        self._made(result, "the copy of a parameter")
        return result

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        self._made(parameter, f"{type(module).__name__}.{name}")

    def _moved(self, module: nn.Module) -> None:
        for name, parameter in own_parameters(module).items():
            self._registered(module, name, parameter)

    def _made(self, parameter: Any, name: str) -> None:
        if type(parameter) is not nn.Parameter or parameter.device.type != self._device_type:
            return
        if threading.get_ident() != self._thread:
            return
        with self._lock:
            self.device = self.device or parameter.device
            if parameter.device != self.device:
                return
            self._wait(parameter, name)
            if self.tier is None and self._must_leave(parameter):
                self._held_bytes, self._made_bytes = self._held_now(), self._waiting_bytes
                self.tier = self._open_tier()
                self.tier.on_replaced = self._replaced
                self._let_go(self.tier, self.tier.window_bytes, but=1)
                self._give_back()
            if self.tier is not None:
                # The latest has no numbers yet.
                self._let_go(self.tier, self.tier.window_bytes, but=1)

    def _give_back(self) -> None:
        return_free_memory(generation=0) if self._device_type == "cpu" else torch.cuda.empty_cache()

    def _replaced(self, member: StreamedParameter) -> None:
        with self._lock:
            self._wait(member.parameter, member.name)
            if self.tier is not None:
                self._let_go(self.tier, self.tier.window_bytes, but=0)

    def _wait(self, parameter: nn.Parameter, name: str) -> None:
        key = id(parameter)
        if key not in self._waiting:
            reference = weakref.ref(parameter, lambda _: self._forget(key))
            self._waiting[key] = reference, name, parameter.nbytes
            self._waiting_bytes += parameter.nbytes

    def _forget(self, key: int) -> tuple["weakref.ref[nn.Parameter]", str] | None:
        """Returns what there is to one that need not wait any more; None if it did not."""
        with self._lock:
            found = self._waiting.pop(key, None)
            if found is None:
                return None
            self._waiting_bytes -= found[2]
            return found[:2]

    def _let_go(self, tier: ParameterTier, window_bytes: int, *, but: int) -> None:
        """Has the oldest leave, until no more than so many bytes, or parameters, are left."""
        shared, self._shared = self._shared, []
        for reference, name in shared:
            self._put_away(tier, reference, name)
        while self._waiting_bytes > window_bytes and len(self._waiting) > but:
            oldest = self._forget(next(iter(self._waiting)))
            if oldest is not None:
                self._put_away(tier, *oldest)

    def _put_away(self, tier: ParameterTier, reference: "weakref.ref[nn.Parameter]", name: str) -> None:
        parameter = reference()
        if parameter is None:
            return
        with torch.no_grad():
            member = tier.adopt(parameter, name)
        if member is not None:
            tier.put_away([member])
            self._num_left += 1
            if self._num_left >= self._next_sweep:
                tier.forget_unused()  # of models that the script has dropped
                self._next_sweep = 2 * self._num_left
        elif type(parameter) is nn.Parameter and parameter.nbytes >= tier.min_bytes:
            # Somebody holds a tensor over its memory, if only the code that has just given it that.
            self._shared.append((reference, name))


def _made_of(
    original: Callable[..., Any], cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True
) -> Any:
    """Makes a parameter of one that has left, as parametrizations do: torch asks for an ordinary tensor."""
    return original(cls, data.detach() if type(data) is GuardedParameter else data, requires_grad)
