"""Launch parameters of every kernel as a pure table: no autotuning, so a run and its forecast launch the same code.

Each entry is compiled ahead of time in tests/kernels for every architecture in budgets.toml, without a GPU.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """Says how one kernel is launched."""

    block: int
    """Elements that one program handles at a time."""
    num_warps: int


def row_loss_launch(vocabulary: int, warp_lanes: int) -> Launch:
    """Returns that of the loss over one row of logits: 16 elements per lane at most, two 16-byte loads."""
    block = min(4096, _power_of_two_from(max(vocabulary, 256)))
    # 512 elements per 32 lanes; with 64 lanes half as many warps, or a program would exceed AMD's 1,024 threads.
    return Launch(block, max(1, min(8, block // 512) * 32 // warp_lanes))


def glu_launch(warp_lanes: int) -> Launch:
    """Returns that of the gated activation, both ways: 8 elements per lane, one 16-byte load of a 16-bit dtype."""
    return Launch(2048, 256 // warp_lanes)


def pack_launch(warp_lanes: int) -> Launch:
    """Returns that of packing and unpacking: 16 blocks of 128 elements, 8 elements per lane."""
    return Launch(2048, 256 // warp_lanes)


def adamw_8bit_launch() -> Launch:
    """Returns that of an optimizer's step: 8 blocks of 256 elements, 8 elements per lane, or registers would spill."""
    return Launch(2048, 8)


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()
