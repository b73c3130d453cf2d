"""Notices that a loop has come to keep a copy of its weights, as its best ones, before the step that follows.

Whoever copies them asks for a state dict first, or tensors come to live on: then copies are counted as the next step
begins, as dictionaries, lists and models hold them. What came in between is held in that step, too.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from memwall.checkpoint.discovery import objects_of, shapes_of
from memwall.predict.first_step import FirstStep
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.together import models_of


def copies_bytes(model: nn.Module, *, with_models: bool = False) -> int:
    """Returns the bytes of copies of a model's weights: in dictionaries by its names for them, and in lists.

    Args:
        with_models: whether the weights of other models of the same form count as well.
    """
    found: dict[int, int] = {}
    with without_subclass_functions():  # to look at parameters on disk does not bring them in
        for each in models_of(model):
            own = {_address(tensor) for tensor in (*each.parameters(), *each.buffers()) if tensor.device.type != "meta"}
            others = map(_weights_of, _models_like(each)) if with_models else ()
            for held in chain(_held_in(dict(each.named_parameters())), others):
                tensors = [tensor for tensor in held if type(tensor) is Tensor and tensor.device.type != "meta"]
                found.update(
                    (_address(one), one.untyped_storage().nbytes()) for one in tensors if _address(one) not in own
                )
    return sum(found.values())


def _models_like(model: nn.Module) -> Iterator[nn.Module]:
    shapes = shapes_of(model)
    return (one for one in objects_of((type(model),)) if one is not model and shapes_of(one) == shapes)


def _weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.data for parameter in model.parameters()]


def _held_in(weights: dict[str, nn.Parameter]) -> Iterator[list[Any]]:
    """Yields the values of each dictionary that has all of the weights' names, and each list of as many such shapes."""
    name, shapes = next(iter(weights), None), [weight.shape for weight in weights.values()]
    for held in objects_of((dict, list)):
        if len(held) < len(weights) or held is weights:
            continue
        if isinstance(held, list):
            if len(held) == len(shapes) and [one.shape for one in held if issubclass(type(one), Tensor)] == shapes:
                yield held
        elif name in held and weights.keys() <= held.keys():
            yield list(held.values())


def _address(tensor: Tensor) -> int:
    """Returns where a tensor's memory begins; 0 of one that has none of its own, as a subclass around others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class KeptCopies:
    """Counts copies that have come to be kept, of a process that trains alone on a CPU.

    Args:
        model: returns what is trained.
        known: returns what is known of the run, and with it what is to come so: plans have room for that.
        live_bytes: returns the bytes of tensors that are held; 0 where these are not counted.
    """

    def __init__(
        self, model: Callable[[], nn.Module], known: Callable[[], FirstStep | None], live_bytes: Callable[[], int]
    ) -> None:
        self._model, self._known, self._live_bytes = model, known, live_bytes
        self._counted_bytes: int | None = None
        """Those that were there when they were counted last."""
        self._is_asked = False
        self._begun_bytes = self._least_bytes = self._come_bytes = 0

    def saving_begins(self) -> None:
        """Has copies counted when the next step begins."""
        self._is_asked = True
        if self._counted_bytes is None:
            self._count()

    def begin_step(self) -> int:
        """Returns the bytes of copies that have come since the last count, beside those that were expected."""
        live_bytes = self._live_bytes()
        has_risen = live_bytes >= self._begun_bytes + self._least_bytes
        if not self._is_asked and not has_risen:
            return 0  # as in nearly every step, and quickly found
        self._is_asked, self._begun_bytes = False, max(live_bytes, self._begun_bytes)
        before_bytes, now_bytes = self._counted_bytes, self._count()
        come_bytes = 0 if before_bytes is None else max(0, now_bytes - before_bytes)
        known = self._known()
        expected_bytes = min(come_bytes, max(0, known.kept_bytes - self._come_bytes)) if known is not None else 0
        self._come_bytes += expected_bytes
        return come_bytes - expected_bytes

    def _count(self) -> int:
        model = self._model()
        with without_subclass_functions():
            self._least_bytes = max(1, sum(parameter.nbytes for parameter in model.parameters()) // 2)
        self._counted_bytes = copies_bytes(model, with_models=True)
        return self._counted_bytes
