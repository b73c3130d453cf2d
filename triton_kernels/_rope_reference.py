"""The plain torch half of `rope`, which also is the CPU path. fp64 is computed in fp64: the oracle of the tests."""

from torch import Tensor

from ._rows import compute_dtype, row_slices

__all__ = ["reference_rope"]


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor, *, interleaved: bool, is_inverse: bool) -> None:
    """Fills `result`, which may be `x`.

    Args:
        x: [batch, heads, T, D], any strides.
        cos: [batch, T, P], any strides; 2 P <= D.
        sin: alike.
        result: shaped like `x`.
        interleaved: pairs are (2 i, 2 i + 1), else (i, i + P).
        is_inverse: rotates back.
    """
    num_pairs, wide = cos.shape[2], compute_dtype(x.dtype)
    for source, target, wide_cos, wide_sin in zip(x, result, cos, sin, strict=True):
        for part in row_slices(x.shape[2], x.shape[1] * x.shape[3]):
            c, s = wide_cos[part].to(wide), wide_sin[part].to(wide)
            if is_inverse:
                s = -s
            first, second = (pair.to(wide) for pair in _pairs(source[:, part], num_pairs, interleaved))
            rotated = (first * c - second * s, second * c + first * s)
            for pair, values in zip(_pairs(target[:, part], num_pairs, interleaved), rotated, strict=True):
                pair.copy_(values)
            if target.data_ptr() != source.data_ptr():
                target[:, part, 2 * num_pairs :] = source[:, part, 2 * num_pairs :]


def _pairs(x: Tensor, num_pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    rotary = x[..., : 2 * num_pairs]
    if interleaved:
        return rotary[..., ::2], rotary[..., 1::2]
    return rotary[..., :num_pairs], rotary[..., num_pairs:]
