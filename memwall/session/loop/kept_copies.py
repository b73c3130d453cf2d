"""Notices that a loop has come to keep a copy of its weights, as its best ones, before the step that follows.

Whoever copies them asks for a state dict first. Copies by their names are counted there, and again as the next step
begins: what came in between is held in that step, too.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from memwall.checkpoint.discovery import objects_of
from memwall.predict.first_step import FirstStep
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.together import models_of


def copies_bytes(model: nn.Module) -> int:
    """Returns the bytes of copies that dictionaries hold of a model's weights, by its names for them."""
    found: dict[int, int] = {}
    with without_subclass_functions():  # to look at parameters on disk does not bring them in
        for each in models_of(model):
            weights = dict(each.named_parameters())
            own = {_address(tensor) for tensor in (*weights.values(), *each.buffers()) if tensor.device.type != "meta"}
            for held in _dictionaries_of(weights):
                tensors = [
                    tensor for tensor in held.values() if type(tensor) is Tensor and tensor.device.type != "meta"
                ]
                found.update(
                    (_address(one), one.untyped_storage().nbytes()) for one in tensors if _address(one) not in own
                )
    return sum(found.values())


def _dictionaries_of(weights: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    name = next(iter(weights), None)
    others = (held for held in objects_of((dict,)) if len(held) >= len(weights) and held is not weights)
    return [held for held in others if name in held and weights.keys() <= held.keys()]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class KeptCopies:
    """Counts copies that have come since a state dict was asked for, of a process that trains alone on a CPU.

    Args:
        model: returns what is trained.
        known: returns what is known of the run, and with it what is to come so: plans have room for that.
    """

    def __init__(self, model: Callable[[], nn.Module], known: Callable[[], FirstStep | None]) -> None:
        self._model, self._known = model, known
        self._before_bytes: int | None = None
        self._come_bytes = 0

    def saving_begins(self) -> None:
        """Counts what is there already; of several state dicts in turn before the first."""
        if self._before_bytes is None:
            self._before_bytes = copies_bytes(self._model())

    def begin_step(self) -> int:
        """Returns the bytes of copies that have come since then, beside those that were expected."""
        before_bytes, self._before_bytes = self._before_bytes, None
        if before_bytes is None:
            return 0
        come_bytes = max(0, copies_bytes(self._model()) - before_bytes)
        known = self._known()
        expected_bytes = min(come_bytes, max(0, known.kept_bytes - self._come_bytes)) if known is not None else 0
        self._come_bytes += expected_bytes
        return come_bytes - expected_bytes
