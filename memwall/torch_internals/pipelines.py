"""Reaches what torch.distributed.pipelining keeps to itself: a schedule's modules, and when it only tries them out."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from memwall.late_imports import once_imported
from memwall.patches import Patches

_MODULE = "torch.distributed.pipelining.schedules"
_KINDS = ("PipelineScheduleSingle", "PipelineScheduleMulti")


def when_schedules_are_known(patches: Patches, do: Callable[[type], object]) -> None:
    """Calls a function with each class whose `step` runs a schedule, once a script imports them; now if it has."""

    def imported(module: ModuleType) -> None:
        for name in _KINDS:
            do(getattr(module, name))

    once_imported(patches, _MODULE, imported)


def around_trials(patches: Patches, run: Callable[..., Any]) -> None:
    """Has a schedule's first passes, by which it finds shapes alone, run `run(original, *args, **kwargs)`.

    Source: torch/distributed/pipelining/schedules.py, `_initialize_pp_stages` (2.13). Before, they took no gradients.
    """

    def imported(module: ModuleType) -> None:
        base = getattr(module, "_PipelineSchedule", None)
        if hasattr(base, "_initialize_pp_stages"):
            patches.wrap(base, "_initialize_pp_stages", run)

    once_imported(patches, _MODULE, imported)


def modules_of(schedule: Any) -> list[nn.Module]:
    """Returns the modules of the stages that a schedule runs on this rank, in the order of the stages."""
    return [stage.submod for stage in _stages_of(schedule)]


def let_go(schedule: Any) -> None:
    """Frees what a schedule's stages keep of the passes before, as its next step does first: an evaluation's graphs."""
    for stage in _stages_of(schedule):
        stage.clear_runtime_states()


def computes_gradients(schedule: Any) -> bool:
    """Returns whether a schedule's `step` runs backward: not within its `eval`, nor without a loss function."""
    return bool(getattr(schedule, "_has_backward", True))


def splits_backward(schedule: Any) -> bool:
    """Returns whether a schedule computes gradients of weights apart from those of inputs, as zero-bubble ones do.

    Autograd runs twice through each graph then.
    """
    order = getattr(schedule, "pipeline_order", None) or {}
    return any(
        action.computation_type.name == "BACKWARD_WEIGHT" for actions in order.values() for action in actions if action
    )


def _stages_of(schedule: Any) -> list[Any]:
    return getattr(schedule, "_stages", None) or [schedule._stage]
