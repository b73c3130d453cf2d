"""Values for the phantom device: what a kernel that does nothing should have written, computed by torch's CPU kernels.

Device memory of the phantom is host memory, so a CPU tensor can lie over every CUDA tensor. A dispatch mode lets each
operator run on CUDA first, for its allocations, streams and choices, and then once more on CPU tensors over the same
memory. Copies between host and device are left to the runtime, which carries them out when their stream gets there:
with PHANTOM_ORDER=lazy, no sooner than somebody waits for them. So a missing wait shows up as wrong numbers.
"""

import ctypes
import os
import traceback

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
_device = ctypes.CDLL(os.environ["PHANTOM_LIBRARY"])
_VERBOSE = bool(os.environ.get("PHANTOM_VERBOSE"))
failures: dict[str, str] = {}
"""Operators that no CPU kernel ran for, with the error: what they return holds whatever was there."""


def over(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(storage.data_ptr()), dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_cuda(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _finish_stream(leaves) -> None:
    devices = {value.device for value in leaves if _is_cuda(value)} or {None}
    for device in devices:
        stream = torch.cuda.current_stream(device)
        _device.phantom_finish_stream(ctypes.c_void_p(stream.cuda_stream), stream.device_index)


# -- operators that only CUDA has --------------------------------------------------------------------------------------


def _scores(q, k, bias, is_causal, scale):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = q.float() @ k.float().transpose(-1, -2) * scale
    if bias is not None:
        found = found + bias.float()
    if is_causal:
        keep = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
        found = found.masked_fill(~keep, float("-inf"))
    return found, scale


def _expanded(k, q):
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _attention(q, k, v, bias, is_causal, scale):
    scores, _ = _scores(q, _expanded(k, q), bias, is_causal, scale)
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse[..., None]) @ _expanded(v, q).float()), lse


def _attention_backward(grad, q, k, v, bias, out, lse, is_causal, scale):
    wide_k, wide_v = _expanded(k, q), _expanded(v, q)
    scores, scale = _scores(q, wide_k, bias, is_causal, scale)
    lse = lse[..., : scores.shape[-2]].reshape(scores.shape[:-1])
    p = torch.exp(scores - lse[..., None].float())
    grad = grad.float()
    dv = p.transpose(-1, -2) @ grad
    dp = grad @ wide_v.float().transpose(-1, -2)
    ds = p * (dp - (grad * out.float()).sum(-1, keepdim=True))
    dq, dk = ds @ wide_k.float() * scale, ds.transpose(-1, -2) @ q.float() * scale
    if k.shape[1] != q.shape[1]:
        shape = (k.shape[0], k.shape[1], -1, *k.shape[2:])
        dk, dv = dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)
    return dq, dk, dv, ds


def _put(target, value):
    if target is not None and target.numel():
        over(target).copy_(value)


def _flash(out, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    value, lse = _attention(q, k, v, None, is_causal, scale)
    _put(out[0], value)
    _put(out[1], lse)


def _flash_backward(out, grad, q, k, v, o, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None):
    for target, value in zip(out, _attention_backward(grad, q, k, v, None, o, lse, is_causal, scale), strict=False):
        _put(target, value)


def _efficient(out, q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    value, lse = _attention(q, k, v, bias, is_causal, scale)
    _put(out[0], value)
    if out[1].numel():
        over(out[1])[..., : lse.shape[-1]].copy_(lse)


def _efficient_backward(
    out, grad, q, k, v, bias, o, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    for target, value in zip(out, _attention_backward(grad, q, k, v, bias, o, lse, is_causal, scale), strict=False):
        _put(target, value)


def _cudnn(out, q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    value, lse = _attention(q, k, v, bias, is_causal, scale)
    _put(out[0], value)
    if out[1].numel():
        over(out[1]).copy_(lse.reshape(out[1].shape))


def _cudnn_backward(
    out, grad, q, k, v, o, lse, seed, offset, bias, cq, ck, mq, mk, dropout_p, is_causal, *, scale=None
):
    for target, value in zip(out, _attention_backward(grad, q, k, v, bias, o, lse, is_causal, scale), strict=False):
        _put(target, value)


def _rms_norm(out, x, shape, weight, eps):
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = tuple(range(-len(shape), 0))
    r = torch.rsqrt(x.float().pow(2).mean(dims, keepdim=True) + eps)
    value = x.float() * r
    _put(out[0], value if weight is None else value * weight.float())
    _put(out[1], r)


def _rms_norm_backward(out, grad, x, shape, r, weight, mask):
    dims = tuple(range(-len(shape), 0))
    g = grad.float() * (1 if weight is None else weight.float())
    normed = x.float() * r
    _put(out[0], r * (g - normed * (g * normed).mean(dims, keepdim=True)))
    if out[1] is not None and out[1].numel():
        _put(out[1], (grad.float() * normed).flatten(0, -len(shape) - 1).sum(0))


def _batch_norm(out, x, weight, bias, mean, var, training, momentum, eps):
    value = aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    for target, each in zip(out[:3], value, strict=False):
        _put(target, each)


def _batch_norm_backward(out, x, grad, weight, mean, var, saved_mean, saved_var, eps, reserve):
    value = aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, saved_mean, saved_var, True, eps, [True] * 3
    )
    for target, each in zip(out, value, strict=False):
        _put(target, each)


OWN = {
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
RANDOM = ("native_dropout.", "bernoulli", "normal", "uniform", "random", "rand", "multinomial", "exponential")
# Their results have a shape that values decide: the CPU's comes first.
SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
NO_VALUES = (
    "empty",
    "new_empty",
    "resize_",
    "set_",
    "record_stream",
    "detach",
    "alias",
    "lift_fresh",
    "_pin_memory",
    "is_pinned",
    "_resize",
    "sym_",
    "_efficientzerotensor",
)


class Numerics(TorchDispatchMode):
    """Runs every operator with a CUDA tensor twice: on CUDA for its allocations, on the CPU for its values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        if any(
            isinstance(v, (FakeTensor, FunctionalTensor)) or (isinstance(v, torch.Tensor) and v.is_meta) for v in leaves
        ):
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        name = func.name().removeprefix("aten::") + "."
        if (
            func in SHAPED_BY_VALUES
            or (
                func is aten.index.Tensor and any(_is_cuda(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            )
        ) and any(map(_is_cuda, leaves)):
            _finish_stream(leaves)
            return tree_map(lambda v: v.cuda() if isinstance(v, torch.Tensor) else v, self._on_cpu(func, args, kwargs))
        # Copies of whole memory are the runtime's.
        is_copy = func is aten.copy_.default and args[0].device != args[1].device
        if (
            is_copy
            and args[0].dtype == args[1].dtype
            and args[0].shape == args[1].shape
            and (args[0].is_contiguous() and args[1].is_contiguous())
        ):
            return func(*args, **kwargs)
        seed = None
        if name.startswith(RANDOM):
            generator = next((g for g in leaves if isinstance(g, torch.Generator)), None)
            if generator is None or generator.device.type != "cuda":
                generator = (
                    torch.cuda.default_generators[torch.cuda.current_device()] if torch.cuda.is_initialized() else None
                )
            if generator is not None:
                seed = (generator.initial_seed() * 1000003 + generator.get_offset()) % (1 << 62)
        out = func(*args, **kwargs)
        outs, spec = tree_flatten(out)
        if not any(map(_is_cuda, leaves)) and not any(map(_is_cuda, outs)):
            return out
        if name.startswith(NO_VALUES) or func.is_view:
            return out
        if func is aten._to_copy.default:
            source, target = args[0], out
            if (
                source.device != target.device
                and source.dtype == target.dtype
                and source.is_contiguous()
                and target.is_contiguous()
            ):
                return out
        _finish_stream([*leaves, *outs])
        try:
            if func in OWN:
                OWN[func](
                    outs,
                    *tree_map(lambda v: over(v) if _is_cuda(v) else v, args),
                    **tree_map(lambda v: over(v) if _is_cuda(v) else v, kwargs),
                )
                return out
            if seed is not None:
                before = torch.get_rng_state()
                torch.manual_seed_cpu(seed) if hasattr(
                    torch, "manual_seed_cpu"
                ) else torch.default_generator.manual_seed(seed)
                try:
                    found = self._on_cpu(func, args, kwargs)
                finally:
                    torch.set_rng_state(before)
            else:
                found = self._on_cpu(func, args, kwargs)
        except Exception as error:
            if name not in failures:
                failures[name] = str(error)
                if _VERBOSE:
                    traceback.print_exc()
            return out
        written = {id(a) for a in leaves if isinstance(a, torch.Tensor)}
        results = []
        for mine, value in zip(outs, tree_flatten(found)[0], strict=False):
            if isinstance(mine, torch.Tensor):
                if id(mine) not in written and isinstance(value, torch.Tensor) and mine.numel():
                    (over(mine) if mine.is_cuda else mine).copy_(
                        value.view(mine.shape) if value.shape != mine.shape else value
                    )
                results.append(mine)
            else:
                results.append(value)
        return tree_unflatten(results, spec) if len(results) == len(outs) else out

    def _on_cpu(self, func, args, kwargs):
        def mapped(value):
            if _is_cuda(value):
                return over(value)
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("cpu")
            if isinstance(value, torch.Generator):
                return None
            return value

        args, kwargs = tree_map(mapped, args), tree_map(mapped, kwargs)
        kwargs.pop("pin_memory", None)
        if func in (aten._log_softmax.default, aten._softmax.default) and args[2]:
            args = (args[0].float(), args[1], False)
        if func in (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default):
            return func(*args, **kwargs).to(args[3]) if args[0].dtype != args[3] else func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except Exception:
            # Mixed or low precision that the CPU has no kernel for.
            wide = tree_map(lambda v: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, args)
            return func(*wide, **kwargs)


def install() -> Numerics:
    """From here on, in this thread and in backward, CUDA tensors have values."""
    mode = Numerics()
    mode.__enter__()
    return mode
