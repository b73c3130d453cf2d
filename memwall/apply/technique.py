"""Says what a technique is to the side that applies plans: a handler, found by the tag of its record in a plan file.

Each file in `memwall.apply.techniques` registers the handler of one technique; nothing else names it. A handler acts on
a `Target`, the run as it is now, and leaves there what takes its action back.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from msgspec import Struct
from torch import nn

from memwall.apply.blocks.executor import BlockExecutor, resolve_blocks
from memwall.apply.effect import Effect
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.errors import ApplyError
from memwall.machine.process_group import num_processes
from memwall.machine.tiers import Machine
from memwall.planning.settings import Settings
from memwall.planning.technique import Technique, techniques
from memwall.store.room import cuda_room_bytes
from memwall.trace.modules import root_names
from memwall.trace.records import Trace

A = TypeVar("A", bound=Struct)
H = TypeVar("H", bound="type[Handler[Any]]")
TierName = Literal["disk", "host"]


class Zero(NamedTuple):
    """Holds what matters to a technique of the DeepSpeed engine that a model is in."""

    stage: int
    """Says the stage of ZeRO."""
    lends_weights: bool
    """Whether weights are computed with in NVMe buffers that go to the next parameter afterwards."""


class InRecording(NamedTuple):
    """Describes how a step that is recorded runs with a technique before there is a plan."""

    undo: Callable[[], None]
    """Gives the model back; safe to call twice."""
    settled: Callable[[Settings, Trace], Settings]
    """Says in the settings of plans what the recorded step shows of it."""


@dataclass(eq=False, repr=False)
class Target:
    """Holds the run that a plan is applied to, as handlers see it."""

    model: nn.Module
    """The root the plan was made for."""
    actions: Sequence[Struct]
    _: KW_ONLY
    block_order: tuple[str, ...]
    """The path of each call of a block in forward order, so that a block can be read back while the next one runs its
    backward; () where only the plan is known, then blocks with an action count."""
    disk: str | None
    """Directory for what leaves memory; None for the default one."""
    disk_capacity_bytes: int | None
    allocator: AllocatorHandler
    micro: MicroBatches
    keeper: StateKeeper
    """Holds the optimizer's state, which may be on disk already."""
    parameters: ParameterKeeper
    """Holds the model's parameters, which may be on disk already."""
    is_cooperative: bool
    """Whether the loop takes its micro-batches from the session."""
    is_running: bool = False
    """Whether the model's forward is being called right now, by a hook before it."""
    is_stepping: bool = False
    """Whether an optimizer's step runs right now, and has called its closure."""
    set_by_loop: tuple[str, ...] = ()
    """Tags of actions that the training loop carries out itself; they are left to it."""
    is_watched: bool = True
    """Whether to check in the first steps that actions have an effect."""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """Holds what steps the model, as far as it is known yet."""
    host_limit_bytes: int | None = None
    """Says the most host memory to take for a model on CUDA; None on a CPU."""
    handlers: tuple["Handler[Any]", ...] = field(default=(), init=False)
    """One for each action, in the plan's order."""
    engine: ActivationOffload | None = field(default=None, init=False)
    """Where saved tensors go, if any leave."""
    _undo: list[tuple[Callable[[], None], bool]] = field(default_factory=list, init=False)

    @cached_property
    def blocks(self) -> BlockExecutor:
        """Wraps the model's blocks; see `memwall.apply.block_technique`."""
        return BlockExecutor(resolve_blocks([self.model], root_names([self.model])), self.block_order)

    def on_undo(self, undo: Callable[[], None], *, is_state: bool = False) -> None:
        """Has the plan's undo call this, the last one first.

        Args:
            is_state: not where the next plan goes on with state and parameters as this one has them.
        """
        self._undo.append((undo, is_state))

    def room(self) -> Callable[[], int | None]:
        """Returns what tells the bytes that tensors may still take in a step; None where nothing limits them.

        None as well where several ranks train: what is decided by it must be the same on all of them, or one of them
        issues a collective, such as that of SyncBatchNorm in a block, that others wait for in vain. Blocks keep it, so
        that it keeps nothing of this run alive.
        """
        allocator = self.allocator
        device = next((p.device for p in self.model.parameters() if p.device.type == "cuda"), None)

        def room_bytes() -> int | None:
            if num_processes() > 1:
                return None
            return allocator.room_bytes() if device is None else cuda_room_bytes(device)

        return room_bytes

    def left_bytes(self, tier: TierName) -> int | None:
        """Returns what saved tensors may use of a tier: without the part that the plan means for other things."""
        capacity_bytes = self.disk_capacity_bytes if tier == "disk" else self.host_limit_bytes
        if capacity_bytes is None:
            return None
        held_bytes = sum(handler.held_bytes(tier) for handler in self.handlers)
        return max(0, capacity_bytes - held_bytes - self.keeper.resting_bytes(tier))

    def is_set_by_loop(self, handler: "Handler[Any]") -> bool:
        """Returns whether the training loop carries this action out itself."""
        return tag_of(handler.action) in self.set_by_loop


class Handler(Generic[A]):
    """Carries out one action. Techniques override what concerns them; by default nothing happens."""

    applies_last: ClassVar[bool] = False
    """Whether it is applied after the others, and taken back before them: it is given what all else leaves."""
    can_be_built_away: ClassVar[bool] = False
    """Whether parameters may go to disk while a script still builds its model."""

    def __init__(self, action: A) -> None:
        self.action = action

    # -- in a run --------------------------------------------------------------------------------------------------

    @classmethod
    def absent(cls, target: Target) -> None:
        """Takes back what an earlier plan left in the run; called where a plan has no action of this tag.

        Raises:
            MemwallError: it cannot be taken back.
        """

    def apply(self, target: Target) -> None:
        """Applies the action, and tells `target.on_undo` what takes it back.

        Raises:
            MemwallError: it cannot be applied here; what was begun is undone through `target.on_undo`.
        """

    def optimizer_known(self, target: Target, optimizer: torch.optim.Optimizer) -> None:
        """Applies what had to wait for an optimizer, before its first step; `target.optimizers` has it already.

        Raises:
            MemwallError: the action cannot be applied to it, or not to several.
        """

    def effect(self, target: Target) -> Effect | None:
        """Returns what to watch in the first steps, once all is applied; None where nothing can be said."""
        return None

    def set_proving(self, target: Target, *, is_proving: bool) -> None:
        """Has the action compare, in the steps until this is called again, what it gives with what is so without it.

        It is asked for that in the first step under a plan, and every so many steps from then on. One that finds a
        difference gives what is so without it, in this very step, does nothing from then on, and is `lost`.
        """

    def lost(self, target: Target) -> str:
        """Returns why the action is not carried out any more, which the log has said; "" while it is."""
        return ""

    def disproof(self, target: Target) -> str:
        """Returns what differed in the step so far and was not put right; asked before gradients are used."""
        return ""

    def held_bytes(self, tier: TierName) -> int:
        """Returns what the action means to use of a tier for other things than saved tensors."""
        return 0

    # -- in a run that has no plan yet; asked of techniques that are allowed ------------------------------------------

    @classmethod
    def prepare(cls, settings: Settings) -> Settings:
        """Does what must be done in the process before a step is recorded, so that what that takes is known.

        Raises:
            ApplyError: a library is missing.
        """
        return settings

    @classmethod
    def measured(cls, machine: Machine) -> Machine:
        """Returns what is known of the machine, with what planning with the technique needs to know beside that."""
        return machine

    @classmethod
    def why_not_here(cls, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        """Returns why the technique cannot be used with what steps the model; None if it can, as far as is known."""
        return None

    @classmethod
    def begin_recording(cls, model: nn.Module, settings: Settings, *, is_streamed: bool) -> InRecording | None:
        """Has the step that is about to be recorded run with the technique; None where it is recorded without.

        Args:
            settings: what the user asked for.
            is_streamed: whether parameters are on disk until their own module is called.
        """
        return None

    @classmethod
    def record_again(cls, model: nn.Module, trace: Trace, *, is_running: bool) -> InRecording | None:
        """Has the next step recorded with the technique, as no plan fits without; None where that is not possible.

        Args:
            is_running: whether the model's forward is being called right now, by a hook before it.
        """
        return None

    # -- before a run ----------------------------------------------------------------------------------------------

    def before_cuda(self) -> None:
        """Does what must be done before CUDA starts.

        Raises:
            ApplyError: CUDA has started otherwise.
        """

    def why_not_under_deepspeed(self, zero: Zero) -> str | None:
        """Returns None if the action can be applied to a model in a DeepSpeed engine, else why not."""
        return (
            f"the plan has the action '{tag_of(self.action)}', which memwall applies to a model that it "
            "trains alone; make the plan without it, or run without DeepSpeed"
        )

    def under_deepspeed(self) -> A:
        """Returns the action as it is applied to a model in a DeepSpeed engine."""
        return self.action


_handlers: dict[str, type[Handler[Any]]] = {}


def register(tag: str) -> Callable[[H], H]:
    """Makes a class the handler of all actions with a tag; a decorator.

    Raises:
        ValueError: the tag has a handler already.
    """

    def registering(handler: H) -> H:
        if tag in _handlers:
            raise ValueError(f"'{tag}' is handled by {_handlers[tag].__qualname__} already")
        _handlers[tag] = handler
        return handler

    return registering


def unregister(tag: str) -> None:
    """Forgets the handler of a tag."""
    del _handlers[tag]


def registered() -> dict[str, type[Handler[Any]]]:
    """Returns the handlers by tag, in the order in which a plan without them has them take back what they left.

    That is the reverse of the order in which plans are applied.
    """
    _discover()
    return dict(sorted(_handlers.items(), key=lambda item: (item[1].applies_last, item[0]), reverse=True))


def allowed(allow: Sequence[str]) -> Iterator[tuple[Technique[Any], type[Handler[Any]]]]:
    """Yields the techniques that need a word of --allow and have it, each with what applies it."""
    for technique in techniques():
        if technique.allow in allow:
            yield technique, registered()[technique.tag]


def usable(allow: Sequence[str]) -> Iterator[tuple[Technique[Any], type[Handler[Any]]]]:
    """Yields the techniques that need no word of --allow, or have it, each with what applies it."""
    for technique in techniques():
        if not technique.allow or technique.allow in allow:
            yield technique, registered()[technique.tag]


def tag_of(action: Struct) -> str:
    """Returns what a plan file calls an action."""
    return str(action.__struct_config__.tag)


def handler_of(action: Struct) -> Handler[Any]:
    """Returns a new handler of an action.

    Raises:
        ApplyError: no technique is registered for it.
    """
    _discover()
    tag = tag_of(action)
    if tag not in _handlers:
        raise ApplyError(
            f"the plan has the action '{tag}', and nothing in this memwall applies it; known are "
            f"{', '.join(sorted(_handlers))}: make the plan again with `memwall plan`"
        )
    return _handlers[tag](action)


@cache
def _discover() -> None:
    """Imports the files of the techniques, which register themselves."""
    package = importlib.import_module("memwall.apply.techniques")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
