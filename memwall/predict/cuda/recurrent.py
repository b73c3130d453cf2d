"""Recurrent layers and cells as CUDA runs them: cuDNN's layer as one operator, a fused kernel for a cell.

With other functions in `torch._VF` than the CPU's, a layer of fake tensors calls `_cudnn_rnn`, whose fake version lacks
the memory that forward keeps for backward, and whose backward has none. How large that is, and what a call works in,
only cuDNN knows: both are **assumed** here as on the phantom device (phantom/src/cudnn_rnn.cpp).

Source: aten/src/ATen/native/RNN.cpp; native/cudnn/RNN.cpp, `_cudnn_impl`, `_cudnn_rnn`, `_cudnn_rnn_backward`;
cudnn/AutocastRNN.cpp, `_cudnn_rnn_cast_reflatten`; native/cuda/RNN.cu (torch 2.13).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.patches import Patches
from memwall.predict.cuda.autocast_lists import without_autocast
from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.torch_internals.operators import operator_named, recurrent_functions
from memwall.torch_internals.storages import identity_of
from memwall.trace.recurrent import num_elements, parts_of
from memwall.trace.workspaces import AheadOfResults, BeforeLastResult

_LAYER, _LAYER_BACKWARD = operator_named("_cudnn_rnn.default"), operator_named("_cudnn_rnn_backward.default")
_LSTM_CELL = operator_named("_thnn_fused_lstm_cell.default")
_GRU_CELL, _GRU_CELL_BACKWARD = (operator_named(f"_thnn_fused_gru_cell{end}.default") for end in ("", "_backward"))
# By their numbers in cuDNN.
_FUNCTIONS = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_NUM_GATES = (1, 1, 4, 3)
_DROPOUT_STATE_BYTES = 3 << 20


class _Layer(NamedTuple):
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
        return self._position_bytes(data) * (1 + self.is_bidirectional) * _NUM_GATES[self.mode] * self.hidden

    def reserve_bytes(self, data: Tensor) -> int:
        """Returns what forward keeps: of each layer gates, an LSTM's cells or a GRU's candidate, and results."""
        num_states = _NUM_GATES[self.mode] + (_NUM_GATES[self.mode] > 1)
        num_stacked = self.num_layers * (1 + self.is_bidirectional)
        each = num_states * self.hidden + (self.projected or self.hidden)
        return self.is_training * self._position_bytes(data) * num_stacked * each

    def _position_bytes(self, data: Tensor) -> int:
        sizes = self.batch_sizes
        length, batch = (len(sizes), sizes[0]) if sizes else data.shape[:2]
        return int(length * batch * data.element_size())


@contextmanager
def cuda_recurrent() -> Iterator[None]:
    """Has recurrent layers and cells call CUDA's operators, within."""
    dropout_states: list[Tensor] = []  # made by the first layer that needs one, and kept for all
    with Patches("runs recurrent layers as CUDA does") as patches:
        if recurrent_functions is not None:  # without them such layers are recorded as the CPU runs them
            for mode, name in enumerate(_FUNCTIONS):
                patches.wrap(recurrent_functions, name, partial(_run_layer, mode, dropout_states))
            patches.wrap(recurrent_functions, "lstm_cell", partial(_run_cell, _LSTM_CELL))
            patches.wrap(recurrent_functions, "gru_cell", partial(_run_cell, _GRU_CELL))
        yield


def _run_layer(
    mode: int, dropout_states: list[Tensor], _: Callable[..., Any], data: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Runs a layer on padded sequences, or on packed ones, where the samples at each position are given as well."""
    is_packed = not isinstance(args[2], bool)
    sizes, states, weights, _has_biases, num_layers, dropout, is_training, is_bidirectional, *batch_first = (
        args if is_packed else (None, *args)
    )
    states, cells = states if _FUNCTIONS[mode] == "lstm" else (states, None)
    num_stacked = num_layers * (1 + is_bidirectional)
    num_each = len(weights) // num_stacked
    layer = _Layer(
        mode=mode,
        hidden=weights[1].shape[0] // _NUM_GATES[mode],
        projected=states.shape[2] if num_each % 2 else 0,
        num_layers=num_layers,
        is_batch_first=any(batch_first),
        dropout=dropout,
        is_training=is_training,
        is_bidirectional=is_bidirectional,
        batch_sizes=[states.shape[1], *[1] * (sizes.numel() - 1)] if is_packed else [],
    )
    has_dropout = dropout > 0 and is_training
    if has_dropout and not dropout_states:
        dropout_states.append(torch.empty(_DROPOUT_STATE_BYTES, dtype=torch.uint8))
    size = num_elements(weights, num_stacked)
    buffer = None  # as of a layer without biases, whose weights are gathered in every call
    if num_each >= 4 and len({identity_of(weight.untyped_storage()) for weight in weights}) == 1:
        buffer = weights[0].detach().as_strided((size,), (1,), 0)
    if torch.is_autocast_enabled("cpu") and data.dtype != torch.float64:  # to float16, whatever else is cast to
        data, states = data.half(), states.half()
        cells = None if cells is None else cells.half()
        if weights[0].dtype != torch.float16:
            buffer = torch.zeros(size, dtype=torch.float16)
            parts = zip(parts_of(buffer, weights), weights, strict=True)
            weights = [part.view(-1, 1).detach().copy_(weight.view(-1, 1)) for part, weight in parts]
    with without_autocast():
        results = _LAYER(
            data, weights, num_each, buffer, states, cells, *layer, dropout_states[0] if has_dropout else None
        )
    return tuple(results[: 2 + (cells is not None)])


def _run_cell(
    operator: Any, _: Callable[..., Any], data: Tensor, states: Any, *weights: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """Runs an LSTM's or a GRU's cell: two products, and what follows in one kernel."""
    tensors = (data, *(states if operator is _LSTM_CELL else (states,)), *weights)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        tensors = tuple(each if each is None else each.to(dtype) for each in tensors)
    *cells, from_data, from_state, data_bias, state_bias = (
        tensors[2:] if len(weights) == 4 else (*tensors[2:], None, None)
    )
    with without_autocast():
        products = F.linear(tensors[0], from_data), F.linear(tensors[1], from_state)
        results = operator(*products, *(cells or tensors[1:2]), data_bias, state_bias)
    return tuple(results[:2]) if cells else results[0]


# -- results and workspaces --------------------------------------------------------------------------------------------


def _forward(
    data: Tensor, weights: list[Tensor], _: int, buffer: Tensor | None, states: Tensor, cells: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    layer = _Layer(*rest[:-1])
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
    layer = _Layer(*rest[4:-3])
    parts = parts_of(torch.empty_like(buffer), weights)
    if num_each < 4:  # gradients are there for biases as well, and these are copied from among them
        parts = [torch.empty_like(each) for each in weights]
    return (
        layer.time_first(torch.empty_like(layer.time_first(data), memory_format=torch.contiguous_format)),
        torch.empty_like(states),
        None if cells is None else torch.empty_like(cells),
        [part.view(each.shape) for part, each in zip(parts, weights, strict=True)] if rest[-1][3] else [],
    )


def _gru_cell(gates: Tensor, other: Tensor, states: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(states), states.new_empty(states.shape[0], states.shape[1] * 5)


def _gru_cell_backward(gradient: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return (*gates, gradient.new_empty(rows, width), *biases)


def in_order(func: Any, results: list[Tensor]) -> list[Tensor]:
    """Returns an operator's results in the order of allocation: what a layer keeps for backward is its last."""
    if func is not _LAYER:
        return results
    *first, kept, buffer = results
    return [*first, buffer, kept]


RECURRENT_RESULTS: dict[Any, Callable[..., Any]] = {
    _LAYER: _forward,
    _LAYER_BACKWARD: _backward,
    _GRU_CELL: _gru_cell,
    _GRU_CELL_BACKWARD: _gru_cell_backward,
}
"""Functions by operator, called in its place."""


def _forward_blocks(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Copies what is not positions first, and works in memory that it asks for before what is kept for backward."""
    layer = _Layer(*args[6:-1])
    return (*_copied(layer, args[0]), BeforeLastResult(layer.workspace_bytes(args[0])))


def _backward_blocks(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Finds the data's gradient, for which it copies that of the results, and then those of the weights."""
    data, buffer, output, gradients = args[0], args[3], args[6], args[7:10]
    layer = _Layer(*args[10:-3])
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


def _copied(layer: _Layer, data: Tensor) -> tuple[int, ...]:
    return () if layer.time_first(data).is_contiguous() else (AheadOfResults(data.nbytes),)


RECURRENT_FORMULAS: dict[Any, Callable[[CudaDevice, tuple[Any, ...], dict[str, Any]], tuple[int, ...]]] = {
    _LAYER: _forward_blocks,
    _LAYER_BACKWARD: _backward_blocks,
}
"""Functions by operator: called with its arguments, each returns the bytes of each block."""
