"""The room that a step which is to be recorded needs with its parameters and gradients in memory."""

import logging

import torch
from torch import nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.machine.meter import meter_of
from memwall.planning.menu import WINDOW_BYTES
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# What a step makes beside parameters, gradients and what passes to disk, at least: small tensors, graph nodes, Python
# objects, and what a layer computes and its operator takes for itself.
_SLACK_BYTES = 40 << 20
# What parked activations and cut up segments add to a device's first step, as a part of its gradients.
_CUT_UP_SHARE = 0.5
# Moments of a parameter that is stepped, and temporaries.
_STEP_COPIES = 4


def lacks_room(model: nn.Module, allocator: AllocatorHandler, budget_bytes: int, coming_bytes: int) -> bool:
    """Returns whether a step that adds so much would pass the budget."""
    room_bytes, meter = budget_bytes - coming_bytes, meter_of(model)
    if meter.now_bytes() > room_bytes:
        give_back(model, allocator)
    lacks = meter.now_bytes() > room_bytes
    if lacks:
        where = "disk" if meter.device == "cpu" else "host memory"
        gradients_text = format_bytes(_gradient_bytes(model))
        _log.info("the first step's parameters and %s of gradients go to %s", gradients_text, where)
    return lacks


def give_back(model: nn.Module, allocator: AllocatorHandler) -> None:
    """Gives free memory back to the system, or to the device."""
    allocator.trim() if meter_of(model).device == "cpu" else torch.cuda.empty_cache()


def coming_bytes_of(model: nn.Module, built_bytes: int) -> int:
    """Returns what a step adds at least that has everything in memory, beside parameters that would come back.

    A device's adds the step of one parameter, whose optimizer may not be known yet, and what its allocator cannot use
    of segments that it has cut up.
    """
    gradient_bytes = _gradient_bytes(model)
    coming_bytes = built_bytes + gradient_bytes + WINDOW_BYTES + _SLACK_BYTES
    if meter_of(model).device == "cpu":
        return coming_bytes
    largest_bytes = max((parameter.nbytes for parameter in model.parameters()), default=0)
    return coming_bytes + int(_CUT_UP_SHARE * gradient_bytes) + _STEP_COPIES * largest_bytes


def _gradient_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
