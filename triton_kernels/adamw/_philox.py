"""Random bits by torch: Philox-4x32-10 (Salmon et al., 2011), the same ones that the kernels draw."""

import torch
from torch import Tensor

__all__ = ["random_bits"]

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)


def random_bits(
    seed: int | Tensor,
    begin: int,
    num_elements: int,
    third: int | Tensor,
    fourth: int | Tensor,
    device: torch.device,
) -> Tensor:
    """16 bits for each element from `begin` on, int64: one call of the generator serves eight elements.

    Args:
        seed: the key, not negative; a tensor of one element is not read by the host.
        begin: index of the first element; of index / 8 consist the counter's first two words.
        num_elements: how many.
        third: the counter's third word.
        fourth: the counter's fourth word.
        device: of the result.
    """
    groups = torch.arange(begin // 8, -(-(begin + num_elements) // 8), device=device)
    zeros = torch.zeros_like(groups)
    c0, c1, c2, c3 = groups & _WORD, groups >> 32, zeros + third, zeros + fourth
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # Products of 64 bits: what overflows the sign wraps, and the shift's copies of it are masked off.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    words = torch.stack((c0, c0 >> 16, c1, c1 >> 16, c2, c2 >> 16, c3, c3 >> 16), 1) & 0xFFFF
    return words.view(-1)[begin % 8 : begin % 8 + num_elements]
