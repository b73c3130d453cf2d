"""Which kernel scaled_dot_product_attention takes on a CUDA device, and the call made with its operators.

On a CPU torch has two kernels to choose from, on CUDA four, which save and allocate differently. The operators of all
of them have meta functions, so that fake tensors on a CPU can run through the one the device would take.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend` and the checks below it;
sdp_utils_cpp.h of the torch 2.13 wheel; attention.cpp, `scaled_dot_product_attention`. Dense tensors only.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from memwall.predict.cuda.attention_calls import mark_math_attention
from memwall.predict.cuda.autocast_lists import without_autocast
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.torch_internals.operators import operator_named

AttentionKernel = Literal["cudnn", "flash", "efficient", "math"]
Capability = tuple[int, int]

_ALL: frozenset[AttentionKernel] = frozenset(("cudnn", "flash", "efficient", "math"))
_OLDEST_FLASH, _OLDEST_EFFICIENT, _NEWEST = (8, 0), (5, 0), (12, 1)
_MOST_FLASH_HEAD, _MOST_CUDNN_HEAD = 256, 128
_MOST_CUDNN_SIZE = 65535
# Alignment in elements that the efficient kernel wants of a mask's strides: attention.cpp, `preprocess_mask`.
_MASK_ALIGNMENT = 8

_aten = torch.ops.aten


class AttentionCall(Struct, frozen=True, kw_only=True):
    """Holds what the choice of a kernel depends on. Shapes are [batch, heads, tokens, head size]."""

    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    mask_needs_gradient: bool = False
    is_causal: bool = False
    dropout: float = 0.0
    needs_gradient: bool = True
    enable_gqa: bool = False
    is_last_dim_dense: bool = True
    """Whether the elements of a head lie next to each other in query, key and value, and those of the mask's rows."""


def attention_kernel(
    call: AttentionCall, capability: Capability, enabled: frozenset[AttentionKernel] = _ALL
) -> AttentionKernel:
    """Returns the kernel that torch takes for a call on a device of this compute capability.

    Args:
        enabled: kernels that have not been switched off by `torch.nn.attention.sdpa_kernel` or a backend flag.
    """
    if "cudnn" in enabled and capability[0] in (9, 10) and _can_use_cudnn(call, capability):
        return "cudnn"
    if "flash" in enabled and _can_use_flash(call, capability):
        return "flash"
    if "efficient" in enabled and _can_use_efficient(call, capability):
        return "efficient"
    return "math"


def _can_use_cudnn(call: AttentionCall, capability: Capability) -> bool:
    """Lets cuDNN come first on sm90 and sm10x, given more than cuDNN 9.15; torch 2.11 to 2.13 bring 9.19 and 9.20."""
    if not (_is_dense_4d(call) and _is_half(call, capability) and _OLDEST_FLASH <= capability <= _NEWEST):
        return False
    if not (_has_plain_mask(call) and _has_heads(call, supports_gqa=True, must_share=False)):
        return False
    counts_sixteenths = profile_for(str(torch.__version__))[0].version != "2.11"
    if counts_sixteenths and not (call.dropout * 16).is_integer():
        return False
    if max(call.query[0], call.query[1]) > _MOST_CUDNN_SIZE:
        return False
    size, value_size = call.query[3], call.value[3]
    if size % 8 or value_size % 8:
        return False
    if max(size, value_size) > _MOST_CUDNN_HEAD and (size, value_size) != (192, 128):
        return False
    return call.key[2] != 1 and not (call.dropout and call.query[2] == 1)


def _can_use_flash(call: AttentionCall, capability: Capability) -> bool:
    if not (_is_dense_4d(call) and _is_half(call, capability) and _OLDEST_FLASH <= capability <= _NEWEST):
        return False
    if call.mask is not None or not _has_heads(call, supports_gqa=True):
        return False
    size = call.query[3]
    if not size == call.key[3] == call.value[3] or size > _MOST_FLASH_HEAD:
        return False
    if call.is_causal and call.query[2] != call.key[2]:
        return False
    has_small_registers = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= _NEWEST
    return not (has_small_registers and call.needs_gradient and not (size <= 192 or (size > 224 and not call.dropout)))


def _can_use_efficient(call: AttentionCall, capability: Capability) -> bool:
    """Grouped queries go to the math kernel: up to torch 2.13 this kernel has one number of heads for all tensors."""
    if not (_is_dense_4d(call) and _OLDEST_EFFICIENT <= capability <= _NEWEST):
        return False
    is_half = call.dtype in ("float16", "bfloat16")
    if call.dtype != "float32" and not is_half:
        return False
    if call.dtype == "bfloat16" and capability < (8, 0):
        return False
    if not _has_heads(call, supports_gqa=False):
        return False
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and is_half):  # matrix units read 128 bits at once
        alignment = max(alignment, 8 if is_half else 4)
    size, value_size = call.query[3], call.value[3]
    return size == call.key[3] and size % alignment == 0 and value_size % alignment == 0


def _is_dense_4d(call: AttentionCall) -> bool:
    shapes = (call.query, call.key, call.value)
    return call.is_last_dim_dense and all(len(shape) == 4 and 0 not in shape for shape in shapes)


def _is_half(call: AttentionCall, capability: Capability) -> bool:
    return call.dtype == "float16" or (call.dtype == "bfloat16" and capability >= (8, 0))


def _has_plain_mask(call: AttentionCall) -> bool:
    """Accepts no mask, or one of two or four dimensions that can be broadcast and needs no gradient."""
    if call.mask is None:
        return True
    wanted = (call.query[0], call.query[1], call.query[2], call.key[2])
    if call.mask_needs_gradient or len(call.mask) not in (2, 4):
        return False
    return all(size in (1, most) for size, most in zip(reversed(call.mask), reversed(wanted), strict=False))


def _has_heads(call: AttentionCall, *, supports_gqa: bool, must_share: bool = True) -> bool:
    heads, key_heads, value_heads = call.query[1], call.key[1], call.value[1]
    if not call.query[0] == call.key[0] == call.value[0]:
        return False
    if call.enable_gqa and supports_gqa:
        if must_share and key_heads != value_heads:
            return False
        return heads % key_heads == 0 and heads % value_heads == 0
    return heads == key_heads == value_heads


# -- the call itself ---------------------------------------------------------------------------------------------------


def run_attention(
    capability: Capability,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs `F.scaled_dot_product_attention` as a device of this compute capability runs it."""
    if torch.is_autocast_enabled("cpu"):  # torch casts what this function is called with, not the operators below it
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    tensors = (query, key, value)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    kernel = attention_kernel(
        AttentionCall(
            dtype=str(query.dtype).removeprefix("torch."),
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            mask=None if attn_mask is None else tuple(attn_mask.shape),
            mask_needs_gradient=attn_mask is not None and attn_mask.requires_grad,
            is_causal=is_causal,
            dropout=dropout_p,
            needs_gradient=needs_gradient,
            enable_gqa=enable_gqa,
            is_last_dim_dense=all(
                tensor.stride(-1) == 1 for tensor in (*tensors, *([] if attn_mask is None else [attn_mask]))
            ),
        ),
        capability,
        _enabled(),
    )
    with without_autocast():
        mask = _as_addend(attn_mask, query.dtype)
        return _run(kernel, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, needs_gradient)


def _run(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needs_gradient: bool,
) -> Tensor:
    """Makes the call with the operators of a kernel."""
    out: Tensor
    if kernel == "cudnn":
        out = operator_named("_scaled_dot_product_cudnn_attention.default")(
            query, key, value, mask, needs_gradient, dropout, is_causal, False, scale=scale
        )[0]
    elif kernel == "flash":
        size = query.shape[-1]
        padded = (_padded(tensor, 8) for tensor in (query, key, value))
        out = operator_named("_scaled_dot_product_flash_attention.default")(
            *padded, dropout, is_causal, False, scale=1 / math.sqrt(size) if scale is None else scale
        )[0]
        out = out[..., :size] if out.shape[-1] != size else out
    elif kernel == "efficient":
        if mask is not None:
            mask = _aligned(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        out = operator_named("_scaled_dot_product_efficient_attention.default")(
            query, key, value, mask, needs_gradient, dropout, is_causal, scale=scale
        )[0]
    else:
        mark_math_attention()
        kept = None
        if dropout:  # given, it is one of bools, as a device's fused dropout saves it; on a CPU it would be of numbers
            kept = torch.empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool, device=query.device)
        out = operator_named("_scaled_dot_product_attention_math.default")(
            query, key, value, mask, dropout, is_causal, kept, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def _enabled() -> frozenset[AttentionKernel]:
    """Returns the kernels that the flags of torch.backends.cuda leave: they hold for every device."""
    flags: dict[AttentionKernel, bool] = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return frozenset(kernel for kernel, is_on in flags.items() if is_on)


def _as_addend(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Makes of a mask of truths one of numbers, a tensor of its own: attention.cpp, `convert_boolean_attn_mask`."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype))


def _aligned(mask: Tensor) -> Tensor:
    """Returns a mask whose rows begin at multiples of 8 elements, as a view of a padded copy where they don't."""
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    return _padded(mask, _MASK_ALIGNMENT)[..., : mask.shape[-1]]


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor
