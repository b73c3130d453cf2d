"""Runs a script that has room to spare as it is: nothing is recorded or planned, nor loaded that would do so.

A run has room to spare while its process holds at most a quarter of what it may have: a plan that does nothing asks
for less, room for half of what a step adds. Until every optimizer has stepped once, what steps save for backward is
looked at (`late_parking`): where the quarter is passed in such a step, what is saved from there on goes to disk. The
rest is for gradients and the optimizer's state, whose size is known by then, and for temporaries and what malloc keeps
of them, which are not: with half for them a small ResNet's first step took 695 of 600 MiB. After that a thread looks,
and nothing else. A run that has passed its quarter is handed over to the session that records and plans, before its
next step.
"""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from memwall.errors import MemwallError, OutOfMemoryError, UsageError
from memwall.integrations.scripts.bare_steps import BareSteps
from memwall.integrations.scripts.execution import BeforeScript, without_step
from memwall.integrations.scripts.late_parking import LateParking
from memwall.integrations.scripts.processes import watch_processes
from memwall.logs import tell
from memwall.machine.limits import memory_limit_bytes
from memwall.machine.meter import HostMeter, process_bytes, process_peak_bytes
from memwall.machine.process_group import num_processes
from memwall.patches import Patches, with_random_numbers_kept
from memwall.torch_internals.autograd import current_node, execution_is_transformed, version_of
from memwall.torch_internals.pipelines import when_schedules_are_known
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_WHY = "sees whether a script needs more than a quarter of its budget"
_STATE_SHARES = 6
"""Times the parameters' bytes that a step may add beside what it saves: gradients, the state of most optimizers, and
what the step makes of either for itself."""
_LOOK_EVERY_BYTES = 16 << 20
"""Bytes of new parameters after which the process is looked at while models are built."""
_INTERVAL_SECONDS = 0.2
_SPAWNING = ("torch.multiprocessing.spawn", "torch.multiprocessing")
"""Modules with the function that starts processes: what the public one calls, and notebook launchers too."""
_MOST_STEPS = 10
"""Steps after which every optimizer is to have stepped; those of a run in which one has not are planned."""


def has_ample_room(budget_bytes: int) -> bool:
    """Tells whether a process that is yet to run a script holds no more than a quarter of what it may have."""
    return process_bytes() <= _quarter_of(budget_bytes)


def _quarter_of(budget_bytes: int) -> int:
    """Returns a quarter of what is there of a budget."""
    return min(budget_bytes, memory_limit_bytes()) // 4


class AmpleRoom:
    """Watches a script's process from `start` until `close`, or until it hands the run over.

    Args:
        name: the script's, for messages.
        disk: where saved tensors go that have no room; None for the default folder.
        disk_capacity_bytes: the most to take of it; None for what is free there.
        take_over: begins to record and plan; called with the model that is called right now, or with None between two
            calls. From then on this does nothing.
    """

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        *,
        take_over: Callable[[nn.Module | None], None],
        disk: str | None = None,
        disk_capacity_bytes: int | None = None,
    ) -> None:
        self._name, self._budget_bytes, self._take_over = name, budget_bytes, take_over
        self._quarter_bytes = _quarter_of(budget_bytes)
        self.begin_peak_bytes = process_peak_bytes()
        """The most that the process held before the script began."""
        self.num_steps = 0
        self.failure: MemwallError | None = None
        """Holds what was raised when the run was handed over, should the script have caught it."""
        self.is_over = False
        """Whether the run was handed over, or has ended."""
        self.has_told = False
        """Whether it was said that nothing is done."""
        self._pid, self._before = os.getpid(), BeforeScript.now()
        self._patches, self._forwards = Patches(_WHY), Patches(_WHY)
        self._bare = BareSteps(self._backward_begins)
        self._waiting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have not stepped yet."""
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped_by_hand: nn.Module | None = None
        """The model that is called where there is no optimizer: its parameters show whether the loop changes them."""
        self._versions = 0
        self._in_step = self._is_passed = False
        self._made_bytes = 0
        self._parking = LateParking(self._quarter_bytes, disk, disk_capacity_bytes)
        self._ended, self._handing_over = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._look, name="memwall-room", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._patches.hook(register_optimizer_step_post_hook, self._after_optimizer)
        self._patches.wrap(torch.optim.Optimizer, "__init__", self._made_optimizer)
        self._patches.wrap(nn.Module, "register_parameter", self._registered)
        # Modules that are copied, as the layers of nn.Transformer are, get their parameters without a word.
        self._patches.wrap(nn.Parameter, "__deepcopy__", self._copied)
        # What is compiled, or trains in other processes, is for those who know how to hook it.
        spawning = [(sys.modules[name], "start_processes") for name in _SPAWNING]
        for owner, name in ((torch, "compile"), (nn.Module, "compile"), *spawning):
            self._patches.wrap(owner, name, partial(self._handed_over_first, owner, name))
        # The forwards of a pipeline's stages are too late for what its ranks agree on.
        when_schedules_are_known(
            self._patches, lambda kind: self._patches.wrap(kind, "step", partial(self._handed_over_first, kind, "step"))
        )
        watch_processes(self._name, self._patches)
        self._listen()
        self._bare.listen()
        self._thread.start()

    def close(self) -> None:
        """Ends the watch; takes every hook away."""
        self.is_over = True
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
        self._parking.end()
        self._bare.end()
        self._forwards.undo()
        self._patches.undo()

    @property
    def has_trained(self) -> bool:
        """Tells whether the script has stepped, or computed gradients without a model."""
        return self.num_steps > 0 or self._bare.num_seen > 0

    def check(self, status: int) -> None:
        """Says at the end of a script that ended well how much it held.

        Raises:
            UsageError: it finished without a training step.
        """
        if self.failure is not None:
            raise self.failure
        model = self._stepped_by_hand
        if model is not None and self._in_step and _versions(model) != self._versions:
            self.num_steps += 1
        if status == 0 and not self.has_trained:
            raise UsageError(without_step(self._name, status, self._before))
        if status == 0 and not self.has_told and process_peak_bytes() <= self._quarter_bytes:
            self._tell()

    def explained(self, error: BaseException) -> OutOfMemoryError | None:
        """Returns what a failure to get memory means for a run that was to have room; None of any other failure."""
        from memwall.apply.memory.exhaustion import exhaustion_of  # 5 MiB and 0.2 s, that few runs need

        found = exhaustion_of(error, "between steps", HostMeter())
        if found is None:
            return None
        asked = format_bytes(found.asked_bytes) if found.asked_bytes else "memory"
        held = format_bytes(found.held_bytes, rounding="down")
        budget = format_bytes(self._budget_bytes, rounding="down")
        return OutOfMemoryError(
            f"out of memory after step {self.num_steps}: {asked} could not be had while the process held {held}, of a "
            f"budget of {budget}; with more than three quarters of it free nothing was planned. Use a smaller batch, "
            "or give as budget what the process can really have: its steps are planned then",
            phase=found.phase,
            asked_bytes=found.asked_bytes,
            held_bytes=found.held_bytes,
        )

    # -- where steps begin and end -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._forwards.undo()
        self._forwards.hook(register_module_forward_pre_hook, self._before_forward)

    def _before_forward(self, module: nn.Module, _: Any = None) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._pid:
            return
        if not torch.is_grad_enabled() or current_node() is not None:
            return
        if self._in_step:
            if module is not self._stepped_by_hand or _versions(module) == self._versions:
                return  # a part of the model, or a further batch of the same step
            self.num_steps += 1
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        self._begin_step(module)

    def _backward_begins(self) -> None:
        self._is_passed |= process_peak_bytes() > self._quarter_bytes
        if self._is_passed:
            self._hand_over(None)

    def _begin_step(self, module: nn.Module) -> None:
        is_late = len(self._waiting) > 0 and self.num_steps >= _MOST_STEPS
        self._is_passed |= process_peak_bytes() > self._quarter_bytes
        is_others = num_processes() > 1 or execution_is_transformed()
        if self._is_passed or is_late or is_others or not self._has_room(module):
            self._hand_over(module)
            return
        self._in_step = True
        self._bare.end()
        self._stepped_by_hand = None if self._optimizers else module
        if self._stepped_by_hand is not None:
            self._versions = _versions(module)
        if self.num_steps and not self._waiting:
            self._parking.end()
            if not self.has_told:
                self._tell()
            if self._stepped_by_hand is None:
                self._forwards.undo()  # the optimizers say when a step is over
        else:
            self._parking.begin(module)

    def _has_room(self, module: nn.Module) -> bool:
        """Tells whether a quarter of the budget has room for gradients and state, beside what is saved."""
        if self.num_steps and not self._waiting:
            return True
        groups = [group for optimizer in list(self._optimizers) for group in optimizer.param_groups]
        parameters = [*module.parameters(), *(parameter for group in groups for parameter in group["params"])]
        trained = {id(one): one.nbytes for one in parameters if one.requires_grad}
        coming_bytes: int = _STATE_SHARES * sum(trained.values())
        return process_bytes() + coming_bytes <= self._quarter_bytes

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid or self.is_over:
            return
        self.num_steps += 1
        self._in_step = False
        self._waiting.discard(optimizer)
        self._parking.end()
        if self._is_passed:
            self._listen()

    # -- what else shows that there may be no room ---------------------------------------------------------------------

    def _made_optimizer(
        self, original: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._waiting.add(optimizer)
        self._optimizers.add(optimizer)
        self._listen()

    def _registered(
        self, original: Callable[..., Any], module: nn.Module, name: str, parameter: Any, *rest: Any
    ) -> None:
        original(module, name, parameter, *rest)
        self._made(parameter)

    def _copied(self, original: Callable[..., Any], parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        copy = original(parameter, memo)
        self._made(copy)
        return copy

    def _made(self, parameter: Any) -> None:
        self._made_bytes += parameter.nbytes if isinstance(parameter, Tensor) else 0
        if self._made_bytes < _LOOK_EVERY_BYTES or os.getpid() != self._pid:
            return
        self._made_bytes = 0
        if process_bytes() > self._quarter_bytes:
            self._hand_over(None)  # which may put parameters on disk while they are made

    def _handed_over_first(self, owner: Any, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != self._pid:
            return original(*args, **kwargs)
        self._hand_over(None)
        return getattr(owner, name)(*args, **kwargs)  # which may be the session's now

    def _look(self) -> None:
        has_said = False
        while not self._ended.wait(_INTERVAL_SECONDS):
            peak_bytes = process_peak_bytes()
            self._is_passed |= peak_bytes > self._quarter_bytes
            if peak_bytes > self._budget_bytes and not has_said:
                has_said = True
                _log.warning(
                    "the budget of %s is passed: the process has held %s, %s more",
                    format_bytes(self._budget_bytes, rounding="down"),
                    format_bytes(peak_bytes, rounding="up"),
                    format_bytes(peak_bytes - self._budget_bytes, rounding="up"),
                )

    def _hand_over(self, module: nn.Module | None) -> None:
        with self._handing_over:
            if self.is_over:
                return  # another thread of the script has come first
            self.close()
        quarter = format_bytes(self._quarter_bytes, rounding="down")
        if self.has_told:
            tell(f"the process has held more than {quarter}: its next step is recorded, and planned from")
        try:
            with with_random_numbers_kept():
                self._take_over(module)
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def _tell(self) -> None:
        self.has_told = True
        held = format_bytes(process_peak_bytes(), rounding="up")
        budget, quarter = (format_bytes(size, rounding="down") for size in (self._budget_bytes, self._quarter_bytes))
        tell(f"fits: {held} held of a budget of {budget}; nothing is done, or loaded, below {quarter}")


def _versions(model: nn.Module) -> int:
    """Returns what grows when the parameters of a model are changed."""
    return sum(map(version_of, model.parameters()))
