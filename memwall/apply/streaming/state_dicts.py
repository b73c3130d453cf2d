"""A model's state dict while its parameters are below a CUDA device: in CPU tensors where the device lacks the room."""

import logging
from collections.abc import MutableMapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.patches import Patches
from memwall.store.room import cuda_room_bytes
from memwall.torch_internals.modules import own_parameters
from memwall.trace.attached import attach_hook
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# A device's segments, cut up as they are, have room for less than is free in them.
_CUT_UP = 1.5


class StateDictsBelow:
    """Has state dicts of a model take no more of a device than it has, until `undo`.

    A module's parameters come to the device for the moment in which the module saves them.

    Args:
        tier: has the parameters, in the host's memory.
    """

    def __init__(self, model: nn.Module, tier: ParameterTier) -> None:
        self._tier, self._has_told = tier, False
        self._patches = Patches("has a state dict without room on the device in host memory")
        saved = partial(self._saved)  # torch marks it with an attribute, which no method can have
        for module in model.modules():
            if any(p is not None and tier.get(p) is not None for p in own_parameters(module).values()):
                self._patches.push(attach_hook(module.register_state_dict_post_hook, saved))

    def undo(self) -> None:
        """Has state dicts on the device from now on."""
        self._patches.undo()

    def _saved(self, module: nn.Module, saved: MutableMapping[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in own_parameters(module).items():
            key = prefix + name
            member = None if parameter is None else self._tier.get(parameter)
            # With `keep_vars` it is the parameter itself that is asked for.
            if member is not None and type(saved.get(key)) is Tensor and self._lacks_room():
                saved[key] = saved[key].cpu()

    def _lacks_room(self) -> bool:
        absent_bytes = sum(member.values.num_bytes for member in self._tier if not member.values.is_resident)
        lacks = _CUT_UP * absent_bytes > cuda_room_bytes(self._tier.place.device)
        if lacks and not self._has_told:
            self._has_told = True
            _log.warning(
                "a state dict of the model has parameters in CPU tensors: the device has no room for all %s of them",
                format_bytes(self._tier.num_bytes),
            )
        return lacks
