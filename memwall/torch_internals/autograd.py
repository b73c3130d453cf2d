"""Autograd's insides: the node that runs, the numbers of nodes and backward passes, versions of tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.names import attribute, find, function, method

current_node: Callable[[], Any] = function("torch._C._current_autograd_node", "telling forward from backward")
"""Returns the autograd node that runs in this thread; None outside of backward.

Raises NotAvailableError without it: no step can be recorded or watched.
"""

sequence_number_of: Callable[[Any], int] = method(
    "torch._C._functions.AccumulateGrad._sequence_nr", "telling which forward operation a backward one belongs to"
)
"""Returns the number of an autograd node, which grows with every node made in a thread.

Raises NotAvailableError without it: no step can be recorded.
"""

next_sequence_number: Callable[[], int] = function(
    "torch.autograd._get_sequence_nr", "telling which autograd nodes a module's forward makes"
)
"""Returns the number that the next autograd node of this thread gets.

Raises NotAvailableError without it: no step can be recorded.
"""

current_backward: Callable[[], int] = function(
    "torch._C._current_graph_task_id", "telling a backward from one that runs inside it, for tables of rows,"
)
"""Returns what tells the backward that runs in this thread from all others; -1 outside of one.

Raises NotAvailableError without it: tables of rows take no gradients.
"""

version_of: Callable[[Tensor], int] = attribute("torch.Tensor._version", "seeing that a tensor was written in place")
"""Returns how often a tensor, or what shares its memory by autograd's knowledge, was written in place.

Raises NotAvailableError without it, where a changed tensor would otherwise go unseen; RuntimeError for tensors made in
inference mode, as torch does.
"""

_set_versions = find("torch._C._autograd._unsafe_set_version_counter", "seeing that writes to two tensors count as one")


def are_counted_together(one: Tensor, other: Tensor) -> bool:
    """Returns whether writes to either tensor raise the version of both; False where this torch does not tell.

    Tensors of one memory need not be: those that `unsafe_chunk` returns have a counter each.
    """
    version = version_of(one)
    if _set_versions is None or version_of(other) != version:
        return False
    _set_versions((one,), (version + 1,))
    is_raised = version_of(other) != version
    _set_versions((one,), (version,))
    return is_raised


_top_hooks = function(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "proving what a block saves inside of others' hooks",
)


def innermost_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Returns the pack and the unpack hook that the next saved tensor goes through; None where there are none.

    Raises:
        NotAvailableError: this torch does not tell; what a block saves inside of other hooks cannot be proved then.
    """
    found: tuple[Any, Any] | None = _top_hooks(True)
    return found


_push_hooks = function(
    "torch._C._autograd._push_saved_tensors_default_hooks", "looking at what is saved beneath a script's own hooks"
)
_pop_hooks = function(
    "torch._C._autograd._pop_saved_tensors_default_hooks", "looking at what is saved beneath a script's own hooks"
)


class SavedTensorHooksBeneath:
    """Has tensors that are saved for backward pass these hooks, but for those that hooks of the script's own take.

    torch keeps hooks on a stack, and a context of a script, as of its own checkpoint around the model, takes away
    whatever lies on top. So these lie beneath all that are there when they begin, and may end before or after them.
    """

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._own = pack, unpack

    def begin(self) -> None:
        """Begins with it, in this thread.

        Raises:
            NotAvailableError: this torch lets nobody look at the hooks that are there.
        """
        lifted = self._lift()
        try:
            _push_hooks(*self._own)
        finally:
            for pair in reversed(lifted):
                _push_hooks(*pair)

    def end(self) -> None:
        """Ends that; to be called in the thread that began."""
        lifted = self._lift()
        try:
            if innermost_saved_tensor_hooks() is not None:
                _pop_hooks()
        finally:
            for pair in reversed(lifted):
                _push_hooks(*pair)

    def _lift(self) -> list[tuple[Any, Any]]:
        """Takes away the hooks down to these, or all; returns them, the innermost first."""
        lifted = []
        while (pair := innermost_saved_tensor_hooks()) is not None and pair[0] is not self._own[0]:
            lifted.append(pair)
            _pop_hooks()
        return lifted


_queue_callback = function(
    "torch.autograd.Variable._execution_engine.queue_callback", "letting parameters go when a backward ends"
)


def after_backward(callback: Callable[[], None]) -> None:
    """Has `callback` called when the backward that runs now ends; to be called inside one.

    Raises:
        NotAvailableError: this torch has no such callbacks; parameters cannot be streamed from disk then.
    """
    _queue_callback(callback)


_top_of_functorch = function("torch._C._functorch.peek_interpreter_stack", "moving saved tensors away")


def execution_is_transformed() -> bool:
    """Returns whether a transform of torch.func (vmap, grad, ...) runs, whose tensors have no memory of their own.

    Raises:
        NotAvailableError: this torch does not tell; saved tensors cannot be moved then.
    """
    return _top_of_functorch() is not None


has_input_dtypes: bool = (
    find("torch._C._functions.AccumulateGrad._input_metadata", "seeing in which precision a forward has computed")
    is not None
)
"""Whether `input_dtypes` can tell."""

_metadata = attribute(
    "torch._C._functions.AccumulateGrad._input_metadata", "seeing in which precision a forward has computed"
)


def input_dtypes(node: Any) -> Iterable[torch.dtype]:
    """Returns the dtypes of an autograd node's gradients, which are those of what its forward computed.

    Raises:
        NotAvailableError: this torch does not tell; who watches precision asks `has_input_dtypes` first.
    """
    return (metadata.dtype for metadata in _metadata(node))


_accumulation_hooks = attribute(
    "torch.Tensor._post_accumulate_grad_hooks", "telling memwall's own hooks on gradients from those of others"
)


def accumulation_hooks(parameter: Tensor) -> dict[int, Any]:
    """Returns the hooks that run when a gradient has been accumulated, by number.

    Raises:
        NotAvailableError: this torch does not show them; hooks of others could go unseen.
    """
    return _accumulation_hooks(parameter) or {}
