"""Recurrent layers: what oneDNN's, which torch runs for an LSTM on a CPU, keep for backward; how cuDNN's weights lie.

torch's fake version of the layer returns an empty workspace (torch/_meta_registrations.py, `mkldnn_rnn_layer`, 2.13),
while the real one holds gates and states of every token, several times the layer's result. How large it is only
oneDNN knows, so that it is asked: by a layer of the same widths on few tokens, since the workspace grows by the token.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from memwall.torch_internals.dispatch import without_dispatch

LAYER = torch.ops.aten.mkldnn_rnn_layer.default

# Tokens of the two runs that are made where there are more. The workspace is rounded to pages, which this many hide.
_FEW, _MANY = 16, 32

# torch/backends/cudnn/__init__.py, `CUDNN_TENSOR_DTYPES`: weights of other types are gathered in every call.
_FLATTENED = (torch.float16, torch.float32, torch.float64)


def with_workspace(args: tuple[Any, ...], out: Any) -> Any:
    """Returns the results of a fake forward [tokens, samples, width], with a workspace as large as the real one."""
    if not (args[15] and torch.is_grad_enabled()):  # then the real one is empty as well
        return out
    tokens = args[0].shape[0]  # also where the caller's own tensors have the samples first
    if tokens <= _MANY:
        num_bytes = _workspace_bytes(tokens, *_shape(args))
    else:
        few, many = (_workspace_bytes(number, *_shape(args)) for number in (_FEW, _MANY))
        num_bytes = many + (many - few) * (tokens - _MANY) // (_MANY - _FEW)
    return (*out[:3], out[3].new_empty(num_bytes))


def _shape(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what the workspace hangs on besides the number of tokens, in a form that can be a key."""
    data, weights, states = args[0], args[1:5], args[5:7]
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in (*weights, *states))
    return (*data.shape[1:], data.dtype, shapes, args[7], tuple(args[9:14]), args[15])


@cache
def _workspace_bytes(
    tokens: int,
    samples: int,
    width: int,
    dtype: torch.dtype,
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    reverse: bool,
    settings: tuple[Any, ...],
    train: bool,
) -> int:
    with without_dispatch(), torch.enable_grad():
        data = torch.zeros(tokens, samples, width, dtype=dtype)
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
        workspace: Tensor = LAYER(data, *tensors, reverse, [], *settings, False, train)[3]
        return workspace.numel()


def flatten_weights(model: nn.Module) -> None:
    """Lays the weights of each recurrent layer in one buffer, as moving it to CUDA does (`flatten_parameters`)."""
    for layer, weights in plain_layers(model):
        if {weight.dtype for weight in weights} in ({each} for each in _FLATTENED):
            num_stacked = layer.num_layers * (1 + layer.bidirectional)
            buffer = torch.empty(num_elements(weights, num_stacked), dtype=weights[0].dtype)
            for weight, part in zip(weights, parts_of(buffer, weights), strict=True):
                weight.data = part.view(weight.shape)


def drops_between_layers(model: nn.Module) -> bool:
    """Tells whether a recurrent layer drops values between the layers that it stacks, which takes random state."""
    return any(isinstance(layer, nn.RNNBase) and layer.dropout > 0 for layer in model.modules())


def plain_layers(model: nn.Module) -> Iterator[tuple[nn.RNNBase, list[Any]]]:
    """Yields each recurrent layer with its weights, if these are parameters and not computed from others."""
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            weights = [weight for stacked in layer.all_weights for weight in stacked]
            if all(isinstance(weight, nn.Parameter) for weight in weights):
                yield layer, weights


def num_elements(weights: Sequence[Tensor], num_stacked: int) -> int:
    """Returns the elements of the buffer of a layer's weights, in which a layer without biases has them all the same.

    Args:
        num_stacked: layers, each direction counted.
    """
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return matrices + 2 * num_stacked * weights[0].shape[0]


def parts_of(buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parts of a buffer that weights have the elements of."""
    sizes = [weight.numel() for weight in weights]
    return list(buffer.split([*sizes, buffer.numel() - sum(sizes)]))[: len(sizes)]
