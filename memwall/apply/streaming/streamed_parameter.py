"""One parameter that lives below memory: where its elements and its gradient are, and who else holds its memory."""

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memwall.apply.streaming.gradients import GradientStore, Reductions, StandsFor
from memwall.apply.streaming.guard import Guard, guarded
from memwall.apply.streaming.places import Streamed, StreamingPlace
from memwall.patches import Patch
from memwall.store.page_map import return_file_pages
from memwall.store.paged import WriteBehind
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.storages import num_references


class StreamingTier(Protocol):
    """Keeps parameters below memory, and decides when each is in memory; `ParameterTier` says what each name is."""

    place: StreamingPlace
    values_place: StreamingPlace
    writes: WriteBehind
    reductions: Reductions
    stands_for: StandsFor | None
    num_spilled: int

    def use(self, members: "Sequence[StreamedParameter]", run: Callable[[], Any]) -> Any:
        """Runs code that uses parameters, with all of them in memory."""

    def show(self, member: "StreamedParameter", run: Callable[[], Any]) -> Any:
        """Runs code that makes another tensor over a parameter's memory."""

    def replace(self, member: "StreamedParameter", run: Callable[[], Any], new: Any, *, is_passing: bool) -> Any:
        """Runs code that gives a parameter other memory."""


class StreamedParameter:
    """Holds one parameter of the tier, and guards its uses."""

    def __init__(self, tier: StreamingTier, parameter: nn.Parameter, name: str) -> None:
        self._tier, self.parameter, self.name = tier, parameter, name
        self.num_holders = 0
        """Blocks and steps that have it in memory now."""
        self.num_exposures = 0
        """Counts those of them that use it as a plain parameter."""
        self.stays = False
        """Says whether it is in memory between its uses as well: only its gradient leaves."""
        self.has_graph = False
        """Says whether a graph may have saved it, so that references to its storage tell nothing."""
        self.gradient_hook: Patch | None = None
        """Sees its gradient arrive; goes when it leaves the tier."""
        self.values: Streamed = tier.values_place.take(parameter.data, name)
        self.gradient = GradientStore(
            tier.place,
            tier.writes,
            tier.reductions,
            self.values.tensor,
            f"the gradient of {name}",
            partial(_put_gradient, weakref.ref(parameter)),
        )
        address = parameter.data_ptr()
        if self.values.tensor.data_ptr() != address:
            parameter.data = self.values.tensor
            return_file_pages(address, parameter.nbytes)  # of a checkpoint that was mapped
        self._num_own_references, self._was_aliased = num_references_of(parameter), False
        self.spill_gradient()
        guarded(parameter, self)

    @property
    def resident_bytes(self) -> int:
        """Counts the memory that its elements and those of its gradient take."""
        return (self.values.num_bytes if self.values.is_resident else 0) + self.gradient.resident_bytes

    @property
    def is_aliased(self) -> bool:
        """Says whether somebody else holds a tensor over its memory, and would see it go; with a graph, did before."""
        if not self.has_graph:
            self._was_aliased = num_references_of(self.parameter) > self._num_own_references
        return self._was_aliased

    @property
    def has_gradient(self) -> bool:
        """Says whether there is a gradient, here or away."""
        with without_subclass_functions():
            return self.gradient.handle is not None or self.parameter.grad is not None

    def spill_gradient(self) -> None:
        """Takes the gradient that lies in memory, if it is an ordinary one; to be called without guards."""
        new = self.parameter.grad
        if type(new) is Tensor and new.layout is torch.strided and new.dtype == self.parameter.dtype:
            self.gradient.add(new, self._tier.stands_for)
            self.parameter.grad = None
            self._tier.num_spilled += 1

    def use(self, others: Sequence[Guard], run: Callable[[], Any]) -> Any:
        return self._tier.use([self, *(other for other in others if isinstance(other, StreamedParameter))], run)

    def show(self, run: Callable[[], Any]) -> Any:
        return self._tier.show(self, run)

    def replace(self, run: Callable[[], Any], new: Any, *, is_passing: bool) -> Any:
        return self._tier.replace(self, run, new, is_passing=is_passing)

    def get_gradient(self) -> Tensor | None:
        return self.gradient.handle if self.gradient.handle is not None else self.parameter.grad

    def set_gradient(self, value: Tensor | None) -> None:
        if value is None or value is not self.gradient.handle:
            self.gradient.drop()
            self.parameter.grad = value


def _put_gradient(reference: "weakref.ref[nn.Parameter]", value: Tensor) -> None:
    """Sets the gradient. No method: who leaves the tier must be forgotten at once, or its memory seems shared."""
    parameter = reference()
    assert parameter is not None  # the tier has it
    with without_subclass_functions():
        parameter.grad = value


def num_references_of(tensor: Tensor) -> int:
    """Returns how many tensors, and other objects, hold a tensor's storage."""
    with without_subclass_functions():
        return num_references(tensor.untyped_storage())


@functools.cache
def usual_references() -> int:
    """Returns what counts for a parameter that nobody else holds."""
    return num_references_of(nn.Parameter(torch.empty(1)))
