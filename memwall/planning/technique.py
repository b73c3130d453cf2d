"""A technique as the planner knows it: a base class whose hooks do nothing, and the registry of its subclasses.

A technique is a pair of files that are joined by the tag of its action's record: one in `planning.techniques` with the
record, the legality, the variants with bytes and seconds and the words, and one in `apply.techniques` with the handler.
Search, explanation, reports, options and export ask every technique in turn and name none.
"""

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec

from memwall.planning.action import Action, Exactness
from memwall.planning.location import Location
from memwall.planning.menu import Costs, Menu
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.settings import Settings
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.process import Resident
from memwall.predict.treatment import StepModel
from memwall.trace.records import ModuleCall, Step, Trace

A = TypeVar("A", bound=Action)

Choice = Literal["shorter", "clearly-shorter", "worth-freedom", "worth-digits", "last-resort"]
"""When a location is taken though tensors in memory would fit: if the whole step is shorter, if it is clearly so, if it
is so much shorter that what a loop may do no longer is worth it, or lost digits are, or never: only where nothing else
fits."""


class Recording(NamedTuple):
    """Holds another recording of the same step, and the settings under which to plan with it."""

    trace: Trace
    settings: Settings

    def changed(self, change: Callable[[Trace], Trace]) -> "Recording":
        """Returns it with its trace changed, and those of all further recordings in the same way."""
        further = self.settings.recordings
        if further is None:
            return Recording(change(self.trace), self.settings)
        settings = msgspec.structs.replace(self.settings, recordings=further.changed(change))
        return Recording(change(self.trace), settings)


class DeepSpeedPart(NamedTuple):
    """Says what DeepSpeed's own configuration does for an action."""

    state_tier: Literal["disk", "host"] | None = None
    bucket_bytes: int = 0
    resident_bytes: int = 0
    """State that the plan keeps in memory, all of which DeepSpeed moves."""
    dtype: str = ""
    remark: str = ""
    """Tells what DeepSpeed does otherwise than the plan says; "" for nothing."""


class Technique(Generic[A]):
    """Decides one way to need less memory; every hook has a default that offers nothing."""

    record: ClassVar[type[Action]]
    """The action's record; its tag is the technique's name in plan files."""
    order: ClassVar[int]
    """Place among the actions of a plan, in which they are applied and shown; unlike any other technique's."""
    allow: ClassVar[str] = ""
    """The word of --allow without which it is never chosen; "" where it needs none."""
    allow_means: ClassVar[str] = ""
    """Says what the word allows, for people."""
    allow_exactness: ClassVar[Exactness] = "changes-numerics"
    """How exact training is under what the word allows; by it the technique is in a mode or is not."""
    is_set_by_loop: ClassVar[bool] = False
    """Whether a training loop of Accelerate or the Trainer carries its action out by itself."""
    uses_tier: ClassVar[bool] = False
    """Whether its action keeps bytes on the next tier."""
    choice: ClassVar[Choice] = "clearly-shorter"
    """When one of its locations is chosen."""
    advice_rank: ClassVar[int] = 0
    """Place of its advice where nothing fits, the cheapest first."""
    way_out_rank: ClassVar[int] = 0
    """Place of its way out where nothing fits on a device, the cheapest first."""
    step_rank: ClassVar[int] = 0
    """Place among the techniques that change the recorded step: state is moved before parameters are, and both before
    the batch is split."""
    is_seen_recorded: ClassVar[bool] = False
    """Whether what it does to a step is known only from a recording under it, which a trace file does not have."""
    keeps_parameters: ClassVar[str] = ""
    """Why parameters cannot be on disk between their uses while its action is in effect; "" where they can."""
    block_levers: ClassVar[Mapping[str, str]] = {}
    """Name of a block's option before the first "-" -> what people call that lever."""

    @property
    def tag(self) -> str:
        """Returns the technique's name in plan files and reports."""
        return str(self.record.__struct_config__.tag)

    # -- legality ----------------------------------------------------------------------------------------------------

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        """Returns why the technique, having been allowed, cannot be used for a trace; None if it can."""
        return None

    def check_device(self, device: str) -> None:
        """Checks what is allowed to a run that makes its plan by itself, once it is known where its model is.

        Raises:
            UsageError: the technique has been allowed, and is for other devices.
        """

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        """Returns what a person can allow or give so that less memory is needed; None where that would not help.

        Args:
            can_split: whether the loop can be given smaller micro-batches already.
        """
        return None

    def way_out(self, found: Recording) -> tuple[str, Recording] | None:
        """Returns what a person can do so that a plan for a device fits, and the recording and settings under it.

        None where it cannot be done, or has been.
        """
        return None

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block_options(
        self, trace: Trace, model: StepModel, block: BlockCalls, costs: Costs, offered: Sequence[str]
    ) -> Iterator[tuple[str, Treatment, str]]:
        """Yields ways to treat a block: name, treatment, and the option that it must move fewer bytes than, if any.

        Args:
            offered: names of what techniques before this one offer for the block.
        """
        yield from ()

    def host_seconds(self, model: StepModel, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> float:
        """Returns what its executor costs the host for one call of a block under a treatment, in seconds."""
        return 0.0

    def block_action(self, menu: Menu, number: int, device: str) -> A | None:
        """Returns the action that carries out its part of a block's option, if it has one."""
        return None

    def treatment(self, action: A, other: Treatment) -> Treatment:
        """Returns the treatment of the action's block, given what other actions make of that block."""
        return other

    # -- the step outside blocks -------------------------------------------------------------------------------------

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        """Returns ways to have state or parameters elsewhere between their uses, the one that frees most first.

        Args:
            ordinary: locations of techniques whose choice is "clearly-shorter", or why there are none.

        Returns:
            Locations; of a last resort the part that is added to the leanest ordinary one. Or why there is none.
        """
        return ()

    def step(self, trace: Trace, step: Step, action: A) -> Step:
        """Returns the step under the action."""
        return step

    def parts(self, trace: Trace, step: Step, *, is_cooperative: bool) -> Iterator[tuple[Step, int, A]]:
        """Yields the step of smaller parts of the batch, how many of them there are, and the action that splits it."""
        yield from ()

    def batch_parts(self, action: A) -> tuple[int, int] | None:
        """Returns micro-batch and number of micro-batches of a step; None where the action leaves the batch alone."""
        return None

    def settled_action(
        self, inputs: SearchInputs, resident: Resident, process_bytes: int, window_bytes: int
    ) -> A | None:
        """Returns the action that a replay of the step found to be needed."""
        return None

    # -- other recordings --------------------------------------------------------------------------------------------

    def recording_where_it_costs(self, trace: Trace, settings: Settings) -> Recording | None:
        """Returns another recording to compare with where every plan of this one costs time; None if there is none."""
        return None

    def recording_where_nothing_fits(self, trace: Trace, settings: Settings) -> Recording | None:
        """Returns another recording to plan with where nothing fits; None if there is none."""
        return None

    def precision(self, action: A) -> Literal["bfloat16", "float16"] | None:
        """Returns the precision that forward runs in for the action; None where it is the model's own."""
        return None

    # -- words -------------------------------------------------------------------------------------------------------

    def what(self, action: A) -> str:
        """Returns what the action does, in a few words."""
        return self.tag

    def where(self, actions: Sequence[A]) -> str:
        """Returns where it acts: actions of one row of a table together; "" for nowhere in particular."""
        return ""

    def row_key(self, action: A) -> tuple[object, ...]:
        """Returns what two actions must share to be drawn as one row."""
        return (id(action),)

    def lever(self, action: A) -> str:
        """Returns what the action is called among the ways to need less memory; "" where it is none of them."""
        return ""

    def binding(self, trace: Trace, actions: Sequence[A]) -> Iterator[str]:
        """Yields what the technique's actions of one plan cost or change, one sentence each."""
        yield from ()

    def against(self, trace: Trace, actions: Sequence[Action], rejected: Location) -> Iterator[str]:
        """Yields why a plan with these actions was preferred to a location that this technique offered."""
        yield from ()

    # -- other programs ----------------------------------------------------------------------------------------------

    def training_arguments(self, action: A) -> dict[str, Any]:
        """Returns fields of transformers' TrainingArguments that carry out the action."""
        return {}

    def accelerate_kwargs(self, action: A) -> dict[str, Any]:
        """Returns arguments of Accelerate's Accelerator that carry out the action."""
        return {}

    def environment(self, action: A) -> dict[str, str] | None:
        """Returns environment variables that carry out the action; None where none do."""
        return None

    def environment_remark(self, action: A) -> str:
        """Returns what the variables leave to the script."""
        return ""

    def deepspeed(self, action: A) -> DeepSpeedPart | None:
        """Returns what DeepSpeed's configuration does for the action; None where memwall must still apply it.

        Raises:
            IntegrationError: DeepSpeed cannot run beside the action.
        """
        return None

    def required_cuda_setting(self, action: A) -> str:
        """Returns the allocator setting that must be in the environment before CUDA starts; "" for none."""
        return ""

    # -- phases of a run on a device ---------------------------------------------------------------------------------

    def evaluation(self, trace: Trace, step: Step, action: A) -> Step:
        """Returns an evaluation that was recorded with all parameters in memory, with them where the action has them.

        Args:
            trace: of the evaluation.
        """
        return step

    def host_parameter_bytes(self, action: A) -> int:
        """Returns the bytes of parameters and gradients in host memory between their uses."""
        return 0

    def host_state_bytes(self, action: A) -> int:
        """Returns optimizer state that the action keeps in host memory between steps."""
        return 0

    def staged_bytes(self, steady: Step, action: A) -> tuple[int, int] | None:
        """Returns host memory that passes bytes through, and the bytes that pass; None where state itself passes."""
        return None


_loading = threading.RLock()
_registry: dict[str, Technique[Any]] = {}
_ordered: tuple[Technique[Any], ...] = ()


def register(technique: Technique[Any]) -> None:
    """Makes a technique known to the planner.

    Raises:
        ValueError: another one has its tag or its order.
    """
    global _ordered
    for other in _registry.values():
        if technique.tag == other.tag or technique.order == other.order:
            raise ValueError(f"technique '{technique.tag}' of order {technique.order}: '{other.tag}' has that already")
    _registry[technique.tag] = technique
    _ordered = tuple(sorted(_registry.values(), key=lambda one: one.order))


def unregister(tag: str) -> None:
    """Takes a technique back, as a test does that has registered its own."""
    global _ordered
    del _registry[tag]
    _ordered = tuple(one for one in _ordered if one.tag != tag)


def techniques() -> tuple[Technique[Any], ...]:
    """Returns all techniques in the order in which their actions are applied and shown."""
    _discover()
    return _ordered


def alike(actions: Sequence[Action]) -> list[list[Action]]:
    """Returns actions in groups of those that do the same, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[Action]] = {}
    for action in actions:
        groups.setdefault((type(action), *technique_of(action).row_key(action)), []).append(action)
    return list(groups.values())


def technique_of(action: Action) -> Technique[Any]:
    """Returns the technique of an action.

    Raises:
        KeyError: none is registered for it.
    """
    _discover()
    return _registry[str(action.__struct_config__.tag)]


def allowable() -> dict[str, str]:
    """Returns the words of --allow, each with what allowing it means."""
    return {one.allow: one.allow_means for one in techniques() if one.allow}


def _discover() -> None:
    """Loads the techniques once, whichever thread asks first; others wait until all of them are there."""
    with _loading:
        _load()


@cache
def _load() -> None:
    """Imports every module of `planning.techniques`, each of which has one subclass as its attribute `TECHNIQUE`."""
    package = importlib.import_module("memwall.planning.techniques")
    for module in pkgutil.iter_modules(package.__path__):
        register(importlib.import_module(f"{package.__name__}.{module.name}").TECHNIQUE)
