"""Operators' own workspaces on this CPU, measured beside a step on fake tensors.

An operator that the live recorder would watch while it computes is run once per set of shapes on scratch tensors, on a
shorter batch where they would be large. Products of float32 matrices are left
out: they use no allocator memory, those of bfloat16 do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.dispatch import without_dispatch
from memwall.torch_internals.storages import identity_of
from memwall.torch_internals.trees import tree_flatten, tree_map_only
from memwall.trace.recurrent import LAYER
from memwall.trace.workspaces import Workspace, Workspaces

__all__ = ["ScratchWorkspaces"]

_aten = torch.ops.aten
LAYER_BACKWARD = _aten.mkldnn_rnn_layer_backward.default
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
# Only these are run, since zeros may mean anything to others.
_MEASURED = (
    *_MATMULS,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.native_batch_norm.default,
    _aten.native_batch_norm_backward.default,
    _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default,
    _aten.native_layer_norm.default,
    _aten.native_layer_norm_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _aten._safe_softmax.default,
    _aten._softmax.default,
    _aten._softmax_backward_data.default,
    _aten._log_softmax.default,
    _aten._log_softmax_backward_data.default,
    _aten.embedding_dense_backward.default,
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.sum.dim_IntList,
    _aten.mean.dim,
    _aten.cumsum.default,
    _aten.sort.default,
    _aten.topk.default,
    LAYER,
    LAYER_BACKWARD,
)
# Time of a matrix product grows faster than its bytes; at this size one takes about a second on one core.
_MOST_MATMUL_BYTES = 16 << 20
# Which arguments carry the batch as their first dimension; their workspace is a constant plus so much per sample.
_BATCHED: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0,),
    _aten.convolution_backward.default: (0, 1),
    _aten.native_batch_norm.default: (0,),
    _aten.native_batch_norm_backward.default: (0, 1),
}
# Scratch tensors of one run stay below this. Large enough that a shorter batch takes the same code path: oneDNN copies
# the input of a 1x1 convolution from about 16 samples on.
_MOST_BYTES = 128 << 20


class ScratchWorkspaces(Workspaces):
    """Workspaces of operators whose tensors hold nothing."""

    @contextmanager
    def measuring(
        self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Workspace]:
        """Runs a fake operator; before it, the real one on scratch tensors, if their layout is new."""
        is_measured = func in _MEASURED and not (func in _MATMULS and inputs[0].dtype == torch.float32)
        if not is_measured or not self.is_worth(inputs):
            yield Workspace(())
            return
        key = self.key_of(func, inputs)
        if key not in self.known:
            self.known[key] = Workspace((self._extrapolated(func, args, kwargs),))
        yield self.known[key]

    def _extrapolated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        batched = _BATCHED.get(func, ())
        batch = args[0].shape[0] if batched else 0
        longest = _MOST_BYTES * batch // max(1, _num_bytes(args)) if batched else 0
        if longest >= batch or longest < 2:
            return self._measured(func, args, kwargs)
        shorter = longest // 2
        few, more = (
            self._measured(func, tuple(a[:size] if i in batched else a for i, a in enumerate(args)), kwargs)
            for size in (shorter, longest)
        )
        return max(0, round(more + (more - few) / (longest - shorter) * (batch - longest)))

    def _measured(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes beyond its results that one real run allocates; 0 for operators too large to be run."""
        if _num_bytes((args, kwargs)) > (_MOST_MATMUL_BYTES if func in _MATMULS else _MOST_BYTES):
            return 0
        with without_dispatch():
            real_args, real_kwargs = tree_map_only(Tensor, _scratch, (args, kwargs))
            if func is LAYER_BACKWARD:
                real_args = with_real_workspace(real_args)
            reals = [value for value in tree_flatten((real_args, real_kwargs))[0] if isinstance(value, Tensor)]
            try:
                with super().measuring(func, reals, real_args, real_kwargs) as workspace:
                    out = func(*real_args, **real_kwargs)
            except (RuntimeError, IndexError):  # zeros are no valid arguments, as for the lengths of a CTC loss
                return 0
        before = {identity_of(tensor.untyped_storage()) for tensor in reals}
        born = {
            identity_of(value.untyped_storage()): value.untyped_storage().nbytes()
            for value in tree_flatten(out)[0]
            if isinstance(value, Tensor)
        }
        return sum(workspace.beyond(sum(size for key, size in born.items() if key not in before)))


def _num_bytes(arguments: Any) -> int:
    return sum(value.nbytes for value in tree_flatten(arguments)[0] if isinstance(value, Tensor))


def _scratch(fake: Tensor) -> Tensor:
    """A real tensor of the same layout; zeros are valid indices and finite numbers."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


def with_real_workspace(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a backward on real tensors, with the workspace that its forward would have left.

    Any other bytes would be taken for addresses.
    """
    tensors, (reverse, mode, hidden, layers, has_biases, train, bidirectional, batch_sizes, batch_first) = (
        args[:7],
        args[13:22],
    )
    with torch.enable_grad():  # otherwise there is none
        out = LAYER(*tensors, reverse, batch_sizes, mode, hidden, layers, has_biases, bidirectional, batch_first, train)
    return (*args[:22], out[3])
