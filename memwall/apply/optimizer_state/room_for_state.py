"""Says how much room a step needs for its optimizers' state, and whether there is as much."""

import logging
from collections.abc import Sequence

import torch

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.optimizer_state.open_state import device_of
from memwall.apply.optimizer_state.shares import expected_state_bytes
from memwall.machine.meter import CudaMeter, process_bytes
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# Beside the state, a step makes temporaries of a parameter's size, and Python objects.
_TEMPORARIES = 2
_SLACK_BYTES = 16 << 20


def stepping_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Returns what optimizers whose state is on disk hold at most beside parameters and gradients.

    That is one parameter's state, which a first step makes, and its temporaries.
    """
    return max(
        (
            expected_state_bytes(optimizer, parameter, group, MIN_STATE_BYTES) + _TEMPORARIES * parameter.nbytes
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ),
        default=0,
    )


def lacks_room(optimizers: Sequence[torch.optim.Optimizer], allocator: AllocatorHandler, budget_bytes: int) -> bool:
    """Returns whether a step that keeps its state in memory would pass the budget."""
    device = device_of(optimizers[0])
    new_bytes = largest_bytes = all_bytes = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                largest_bytes = max(largest_bytes, parameter.nbytes)
                all_bytes += parameter.nbytes
                if not optimizer.state.get(parameter):
                    new_bytes += expected_state_bytes(optimizer, parameter, group, MIN_STATE_BYTES, device)
    # On a device the usual step computes with all parameters at once.
    at_once_bytes = largest_bytes if device.type == "cpu" else all_bytes
    room_bytes = budget_bytes - new_bytes - _TEMPORARIES * at_once_bytes - _SLACK_BYTES
    held_bytes = process_bytes if device.type == "cpu" else CudaMeter(device).now_bytes
    if held_bytes() > room_bytes:  # what is free is given back before the budget is passed anyway
        allocator.trim() if device.type == "cpu" else torch.cuda.empty_cache()
    lacks = held_bytes() > room_bytes
    if lacks:
        where = "disk" if device.type == "cpu" else "host memory"
        _log.info("the first step's %s of optimizer state go to %s", format_bytes(new_bytes), where)
    return lacks
