"""Computes, in plain float32, the operations that only CUDA has: attention kernels, fused norms, cuDNN's batch norm.

A function gets the tensors that the operation returned, the seed that stands for the place in its generator's sequence,
and the operation's arguments; the tensors of all of these are laid over the device's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["OWN_VALUES"]

aten = torch.ops.aten
Outs = Sequence[Any]


def _put(target: Tensor | None, value: Tensor) -> None:
    if target is not None and target.numel():
        target.copy_(value.reshape(target.shape) if value.numel() == target.numel() else value)


# -- attention ---------------------------------------------------------------------------------------------------------


def _wide(k: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values with a head for each of the queries'."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    found = q.float() @ _wide(k, q).float().transpose(-1, -2) * scale
    if bias is not None:
        found = found + bias.float()
    if is_causal:
        keep = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
        found = found.masked_fill(~keep, float("-inf"))
    return found


def _kept(shape: Sequence[int], dropout_p: float, seed: int) -> Tensor:
    """Returns what dropout multiplies probabilities by: forward and backward draw it from the same seed."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn >= dropout_p).float() / (1 - dropout_p)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse[..., None])
    if dropout_p:
        p = p * _kept(p.shape, dropout_p, seed)
    return p @ _wide(v, q).float(), lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = _scores(q, k, bias, is_causal, scale)
    lse = lse.reshape(*scores.shape[:2], -1)[..., : scores.shape[-2]]
    p = torch.exp(scores - lse[..., None].float())
    kept = _kept(p.shape, dropout_p, seed) if dropout_p else torch.ones(())
    grad = grad.float()
    dv = (p * kept).transpose(-1, -2) @ grad
    dp = grad @ _wide(v, q).float().transpose(-1, -2) * kept
    ds = p * (dp - (grad * out.float()).sum(-1, keepdim=True))
    dq, dk = ds @ _wide(k, q).float() * scale, ds.transpose(-1, -2) @ q.float() * scale
    if k.shape[1] != q.shape[1]:
        shape = (k.shape[0], k.shape[1], -1, *k.shape[2:])
        dk, dv = dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)
    return dq, dk, dv, ds


def _put_attention(outs: Outs, value: tuple[Tensor, Tensor], seed_at: int, seed: int) -> None:
    out, lse = value
    _put(outs[0], out)
    if outs[1].numel():
        # The memory-efficient kernel pads rows.
        outs[1].view(*lse.shape[:2], -1)[..., : lse.shape[-1]].copy_(lse)
    if isinstance(outs[seed_at], Tensor) and outs[seed_at].numel():
        outs[seed_at].view(torch.int64).view(-1)[0] = seed


def _seed_of(tensor: Tensor) -> int:
    return int(tensor.view(torch.int64).view(-1)[0]) if tensor.numel() else 0


def _flash(
    outs: Outs,
    seed: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> None:
    _put_attention(outs, _forward(q, k, v, None, dropout_p, is_causal, scale, seed), 6, seed)


def _efficient(
    outs: Outs,
    seed: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_lse: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> None:
    _put_attention(outs, _forward(q, k, v, bias, dropout_p, is_causal, scale, seed), 2, seed)


def _cudnn(
    outs: Outs,
    seed: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_lse: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> None:
    _put_attention(outs, _forward(q, k, v, bias, dropout_p, is_causal, scale, seed), 6, seed)


def _flash_backward(outs: Outs, _: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                    cq: Any, ck: Any, mq: int, mk: int, dropout_p: float, is_causal: bool, philox: Tensor,
                    offset: Tensor, *, scale: float | None = None) -> None:  # fmt: skip
    values = _backward(grad, q, k, v, None, o, lse, dropout_p, is_causal, scale, _seed_of(philox))
    for target, value in zip(outs, values[:3], strict=True):
        _put(target, value)


def _efficient_backward(outs: Outs, _: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                        o: Tensor, lse: Tensor, philox: Tensor, offset: Tensor, dropout_p: float, mask: list[bool],
                        is_causal: bool = False, *, scale: float | None = None) -> None:  # fmt: skip
    values = _backward(grad, q, k, v, bias, o, lse, dropout_p, is_causal, scale, _seed_of(philox))
    for target, value in zip(outs, values, strict=True):
        _put(target, value)


def _cudnn_backward(outs: Outs, _: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                    philox: Tensor, offset: Tensor, bias: Tensor | None, cq: Any, ck: Any, mq: int, mk: int,
                    dropout_p: float, is_causal: bool, *, scale: float | None = None) -> None:  # fmt: skip
    values = _backward(grad, q, k, v, bias, o, lse, dropout_p, is_causal, scale, _seed_of(philox))
    for target, value in zip(outs, values[:3], strict=True):
        _put(target, value)


# -- norms -------------------------------------------------------------------------------------------------------------


def _rms_norm(outs: Outs, _: int, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> None:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    r = torch.rsqrt(x.float().pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    value = x.float() * r
    _put(outs[0], value if weight is None else value * weight.float())
    _put(outs[1], r)


def _rms_norm_backward(outs: Outs, _: int, grad: Tensor, x: Tensor, shape: Sequence[int], r: Tensor,
                       weight: Tensor | None, mask: list[bool]) -> None:  # fmt: skip
    g = grad.float() if weight is None else grad.float() * weight.float()
    normed = x.float() * r
    mean = (g * normed).mean(tuple(range(-len(shape), 0)), keepdim=True)
    _put(outs[0], r * (g - normed * mean))
    if outs[1] is not None and outs[1].numel():
        _put(outs[1], (grad.float() * normed).flatten(0, -len(shape) - 1).sum(0))


def _batch_norm(outs: Outs, _: int, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None,
                var: Tensor | None, training: bool, momentum: float, eps: float) -> None:  # fmt: skip
    values = aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    for target, value in zip(outs[:3], values, strict=True):
        _put(target, value)


def _batch_norm_backward(outs: Outs, _: int, x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor | None,
                         var: Tensor | None, saved_mean: Tensor, saved_var: Tensor, eps: float,
                         reserve: Tensor) -> None:  # fmt: skip
    values = aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, saved_mean, saved_var, True, eps, [True] * 3
    )
    for target, value in zip(outs, values, strict=True):
        _put(target, value)


OWN_VALUES: dict[Any, Callable[..., None]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.cudnn_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
}
