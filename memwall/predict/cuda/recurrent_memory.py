"""Memory of recurrent layers and fused cells on CUDA: their results, what they keep for backward, what they work in.

torch's fake version of the layer lacks the memory that forward keeps for backward, and its backward has none. How large
that is, and what a call works in, only cuDNN knows: both are **assumed** here as on the phantom device
(phantom/src/cudnn_rnn.cpp). In which order all is asked for is torch's.

Source: aten/src/ATen/native/cudnn/RNN.cpp, `_cudnn_rnn`, `_cudnn_rnn_backward`; native/cuda/RNN.cu (torch 2.13).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.torch_internals.operators import operator_named
from memwall.trace.recurrent import num_elements, parts_of
from memwall.trace.workspaces import AheadOfResults, BeforeLastResult

LAYER, LAYER_BACKWARD = operator_named("_cudnn_rnn.default"), operator_named("_cudnn_rnn_backward.default")
GRU_CELL, _GRU_CELL_BACKWARD = (operator_named(f"_thnn_fused_gru_cell{end}.default") for end in ("", "_backward"))
NUM_GATES = (1, 1, 4, 3)
"""Gates of a cell, by its number in cuDNN."""
# What the two operators that backward is recorded as are asked for: gradients of data and states, or of weights.
_OF_DATA, _OF_WEIGHTS = (True, True, True, False), (False, False, False, True)


class Layer(NamedTuple):
    """Holds what `_cudnn_rnn` and its backward are told of a layer."""

    mode: int
    hidden: int
    projected: int
    num_layers: int
    is_batch_first: bool
    dropout: float
    is_training: bool
    is_bidirectional: bool
    batch_sizes: list[int]
    """Samples at each position of packed sequences, of which the number and the first are read; else empty."""

    def time_first(self, data: Tensor) -> Tensor:
        """Returns data as cuDNN reads it."""
        return data.transpose(0, 1) if self.is_batch_first and not self.batch_sizes else data

    def workspace_bytes(self, data: Tensor) -> int:
        """Returns what a call works in: the gates of one layer."""
        return self._position_bytes(data) * (1 + self.is_bidirectional) * NUM_GATES[self.mode] * self.hidden

    def reserve_bytes(self, data: Tensor) -> int:
        """Returns what forward keeps: of each layer gates, an LSTM's cells or a GRU's candidate, and results."""
        num_states = NUM_GATES[self.mode] + (NUM_GATES[self.mode] > 1)
        num_stacked = self.num_layers * (1 + self.is_bidirectional)
        each = num_states * self.hidden + (self.projected or self.hidden)
        return self.is_training * self._position_bytes(data) * num_stacked * each

    def _position_bytes(self, data: Tensor) -> int:
        sizes = self.batch_sizes
        length, batch = (len(sizes), sizes[0]) if sizes else data.shape[:2]
        return int(length * batch * data.element_size())


def _forward(
    data: Tensor, weights: list[Tensor], _: int, buffer: Tensor | None, states: Tensor, cells: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    layer = Layer(*rest[:-1])
    read = layer.time_first(data)
    width = (layer.projected or layer.hidden) * (1 + layer.is_bidirectional)
    return (
        layer.time_first(data.new_empty((*read.shape[:-1], width))),
        states.new_empty(states.shape),
        states.new_empty(0) if cells is None else cells.new_empty(cells.shape),
        data.new_empty(layer.reserve_bytes(data), dtype=torch.uint8),
        data.new_empty(num_elements(weights, states.shape[0])) if buffer is None else buffer,
    )


def _backward(
    data: Tensor, weights: list[Tensor], num_each: int, buffer: Tensor, states: Tensor, cells: Any, *rest: Any
) -> Any:
    layer, is_wanted = Layer(*rest[4:-3]), rest[-1]
    of_weights: list[Tensor] = []
    if is_wanted[3]:
        parts = parts_of(torch.empty_like(buffer), weights)
        if num_each < 4:  # gradients are there for biases as well, and these are copied from among them
            parts = [torch.empty_like(each) for each in weights]
        of_weights = [part.view(each.shape) for part, each in zip(parts, weights, strict=True)]
    if not any(is_wanted[:3]):
        return None, None, None, of_weights
    return (
        layer.time_first(torch.empty_like(layer.time_first(data), memory_format=torch.contiguous_format)),
        torch.empty_like(states),
        None if cells is None else torch.empty_like(cells),
        of_weights,
    )


def _backward_in_pieces(run: Callable[..., Any], *args: Any) -> Any:
    """Runs backward as the two that it is made of, for data and states and then for weights.

    Both read gradients of results, which are zeros where there are none.
    """
    results, is_wanted = (args[6], args[4], args[5]), args[-1]
    gradients = [
        run(torch.ops.aten.zeros_like.default, (result,), {"memory_format": torch.contiguous_format})
        if gradient is None and result is not None
        else gradient
        for gradient, result in zip(args[7:10], results, strict=True)
    ]
    asked = (*args[:7], *gradients, *args[10:-1])
    of_data = run(LAYER_BACKWARD, (*asked, _OF_DATA), {})[:3]
    return *of_data, run(LAYER_BACKWARD, (*asked, _OF_WEIGHTS), {})[3] if is_wanted[3] else []


RECURRENT_PIECES: dict[Any, Callable[..., Any]] = {LAYER_BACKWARD: _backward_in_pieces}
"""Functions by operator, each of which runs it as several: see `Workspaces.in_pieces`."""


def _gru_cell(gates: Tensor, other: Tensor, states: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(states), states.new_empty(states.shape[0], states.shape[1] * 5)


def _gru_cell_backward(gradient: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return (*gates, gradient.new_empty(rows, width), *biases)


def in_order(func: Any, results: list[Tensor]) -> list[Tensor]:
    """Returns an operator's results in the order of allocation: what a layer keeps for backward is its last."""
    if func is not LAYER:
        return results
    *first, kept, buffer = results
    return [*first, buffer, kept]


RECURRENT_RESULTS: dict[Any, Callable[..., Any]] = {
    LAYER: _forward,
    LAYER_BACKWARD: _backward,
    GRU_CELL: _gru_cell,
    _GRU_CELL_BACKWARD: _gru_cell_backward,
}
"""Functions by operator, called in its place."""


def _forward_blocks(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Copies what is not positions first, and works in memory that it asks for before what is kept for backward."""
    layer = Layer(*args[6:-1])
    return (*_copied(layer, args[0]), BeforeLastResult(layer.workspace_bytes(args[0])))


def _backward_blocks(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Finds the data's gradient, for which it copies that of the results, and then those of the weights."""
    data, buffer, output, gradients = args[0], args[3], args[6], args[7:10]
    layer = Layer(*args[10:-3])
    like = output, args[4], args[5]
    zeros = [given for each, given in zip(gradients, like, strict=True) if each is None and given is not None]
    copy = 0 if gradients[0] is None else sum(_copied(layer, gradients[0]))
    weights_bytes = buffer.nbytes if args[-1][3] else 0
    return (
        *(AheadOfResults(each.nbytes) for each in zeros),
        *_copied(layer, data),
        max(0, copy - weights_bytes),
        layer.workspace_bytes(data),
    )


def _piece_blocks(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Copies for each of the two, and lets go of the copies between them."""
    layer, data = Layer(*args[10:-3]), args[0]
    works_in = layer.workspace_bytes(data)
    if args[-1] == _OF_DATA:
        return (*_copied(layer, data), *_copied(layer, args[7]), works_in)
    if args[2] >= 4:
        return (*_copied(layer, data), works_in)
    return (*_copied(layer, data), AheadOfResults(args[3].nbytes), AheadOfResults(works_in))


def _copied(layer: Layer, data: Tensor) -> tuple[int, ...]:
    return () if layer.time_first(data).is_contiguous() else (AheadOfResults(data.nbytes),)


RECURRENT_FORMULAS: dict[Any, Callable[[CudaDevice, tuple[Any, ...], dict[str, Any]], tuple[int, ...]]] = {
    LAYER: _forward_blocks,
    LAYER_BACKWARD: _backward_blocks,
}
"""Functions by operator: called with its arguments, each returns the bytes of each block."""
PIECE_FORMULAS = {LAYER_BACKWARD: _piece_blocks}
"""Functions as in `RECURRENT_FORMULAS`, for what is run in pieces."""
