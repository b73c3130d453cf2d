"""Recurrent layers and cells as CUDA runs them: cuDNN's layer as one operator, a fused kernel for a cell.

With other functions in `torch._VF` than the CPU's, a layer of fake tensors calls `_cudnn_rnn`, whose fake version lacks
the memory that forward keeps for backward, and whose backward has none: `recurrent_memory.py` has them.

Source: aten/src/ATen/native/RNN.cpp; native/cudnn/RNN.cpp, `_cudnn_impl`, `get_dropout_state`;
cudnn/AutocastRNN.cpp, `_cudnn_rnn_cast_reflatten`; native/cuda/RNN.cu (torch 2.13).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.patches import Patches
from memwall.predict.cuda.autocast_lists import without_autocast
from memwall.predict.cuda.recurrent_memory import GRU_CELL, LAYER, NUM_GATES, Layer
from memwall.torch_internals.operators import operator_named, recurrent_functions
from memwall.torch_internals.storages import identity_of
from memwall.trace.recurrent import num_elements, parts_of
from memwall.trace.seeding import hearing_seeds

_LSTM_CELL = operator_named("_thnn_fused_lstm_cell.default")
# By their numbers in cuDNN.
_FUNCTIONS = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_DROPOUT_STATE_BYTES = 3 << 20


class _RandomState:
    """Holds the random state of dropout: made by the first layer that needs one, and kept for all."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._is_current = False

    def is_seeded(self) -> None:
        """Has the next layer that needs the state make it anew."""
        self._is_current = False

    def now(self) -> Tensor:
        """Returns it; where it is made, its seed is drawn on the device before, and one that was there goes after."""
        if self._tensor is None or not self._is_current:
            torch.empty((), dtype=torch.int64)
            old = torch.empty(0, dtype=torch.uint8) if self._tensor is None else self._tensor
            self._tensor = old.new_empty(_DROPOUT_STATE_BYTES)  # a step that reads the old one knows that it was there
            self._is_current = True
        return self._tensor


@contextmanager
def cuda_recurrent() -> Iterator[None]:
    """Has recurrent layers and cells call CUDA's operators, within."""
    random_state = _RandomState()

    def set_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        random_state.is_seeded()
        original(*args, **kwargs)

    with hearing_seeds(random_state.is_seeded), Patches("runs recurrent layers as CUDA does") as patches:
        # A checkpoint sets the state of the CPU before it recomputes and after that, and that of a device as well.
        patches.wrap(torch, "set_rng_state", set_state)
        if recurrent_functions is not None:  # without them such layers are recorded as the CPU runs them
            for mode, name in enumerate(_FUNCTIONS):
                patches.wrap(recurrent_functions, name, partial(_run_layer, mode, random_state))
            patches.wrap(recurrent_functions, "lstm_cell", partial(_run_cell, _LSTM_CELL))
            patches.wrap(recurrent_functions, "gru_cell", partial(_run_cell, GRU_CELL))
        yield


def _run_layer(
    mode: int, random_state: _RandomState, _: Callable[..., Any], data: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Runs a layer on padded sequences, or on packed ones, where the samples at each position are given as well."""
    is_packed = not isinstance(args[2], bool)
    sizes, states, weights, _has_biases, num_layers, dropout, is_training, is_bidirectional, *batch_first = (
        args if is_packed else (None, *args)
    )
    states, cells = states if _FUNCTIONS[mode] == "lstm" else (states, None)
    num_stacked = num_layers * (1 + is_bidirectional)
    num_each = len(weights) // num_stacked
    layer = Layer(
        mode=mode,
        hidden=weights[1].shape[0] // NUM_GATES[mode],
        projected=states.shape[2] if num_each % 2 else 0,
        num_layers=num_layers,
        is_batch_first=any(batch_first),
        dropout=dropout,
        is_training=is_training,
        is_bidirectional=is_bidirectional,
        batch_sizes=[states.shape[1], *[1] * (sizes.numel() - 1)] if is_packed else [],
    )
    state = random_state.now() if dropout > 0 and is_training else None
    size = num_elements(weights, num_stacked)
    buffer = None  # weights are gathered in every call
    if len({identity_of(weight.untyped_storage()) for weight in weights}) == 1:
        buffer = weights[0].detach().as_strided((size,), (1,), 0)
    if torch.is_autocast_enabled("cpu") and data.dtype != torch.float64:  # to float16, whatever else is cast to
        if weights[0].dtype != torch.float16:
            buffer = torch.zeros(size, dtype=torch.float16)
            parts = zip(parts_of(buffer, weights), weights, strict=True)
            weights = [part.view(-1, 1).detach().copy_(weight.view(-1, 1)) for part, weight in parts]
        # The compiler's order of arguments, seen with torch 2.13.
        cells = None if cells is None else cells.half()
        states = states.half()
        data = data.half()
    with without_autocast():
        results = LAYER(data, weights, num_each, buffer, states, cells, *layer, state)
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
