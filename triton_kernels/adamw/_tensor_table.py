"""What one launch over many tensors reads: their addresses and sizes, brought to the device without waiting for it."""

import torch
from torch import Tensor

from .._configs import ADAMW_CHUNK

__all__ = ["TensorTable"]

_MAX_KEPT = 16
# Tables of programs by the tensors' sizes, which hardly ever change.
_kept: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
# Pinned memory of tables that were copied: allocating some would end the capture of a CUDA graph.
_spares: dict[int, list[Tensor]] = {}
# What CUDA graphs read whenever they are replayed.
_held: list[Tensor] = []


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _addresses_on(device: torch.device, rows: list[int]) -> Tensor:
    """The table of tensors on the device, without waiting for it."""
    host = torch.tensor(rows, dtype=torch.int64)
    if device.type != "cuda":
        return host
    spares = _spares.setdefault(len(rows), [])
    if len(_spares) > _MAX_KEPT:
        del _spares[next(iter(_spares))]
    if _is_capturing(device):
        # No copy from a spare one is under way: a capture begins by waiting for the device.
        pinned = spares.pop().copy_(host) if spares else host.pin_memory()
        _held.append(pinned)
    else:
        pinned = host.pin_memory()
        spares += [pinned] if len(spares) < _MAX_KEPT else []
    return pinned.to(device, non_blocking=True)


def _programs_on(device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    """[programs]: the tensor that each one works on."""
    found = _kept.get((device, sizes))
    if found is None:
        counts = torch.tensor([-(-size // ADAMW_CHUNK) for size in sizes])
        found = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
        if device.type == "cuda":
            found = found.pin_memory().to(device, non_blocking=True)
        # What a graph allocates is its own.
        if not _is_capturing(device):
            if len(_kept) == _MAX_KEPT:
                del _kept[next(iter(_kept))]
            _kept[device, sizes] = found
    if _is_capturing(device):
        _held.append(found)
    return found


class TensorTable:
    """For `FusedAdamW`: a row for each tensor, and for each program the row it works on."""

    rows: Tensor
    """[tensors * 9] int64: the six addresses, elements, the first program, the parameter's number."""
    chunks: Tensor
    """[programs] int32."""
    num_programs: int
    is_even: bool
    """Whether all sizes, and all addresses but those of units, are multiples of 16."""

    def __init__(self, columns: list[list[Tensor]], numbers: list[int]) -> None:
        """Columns: param, grad, both moments, both units; the second is always there."""
        device, tensors = columns[1][0].device, columns[1]
        sizes = tuple(tensor.numel() for tensor in tensors)
        self.chunks = _programs_on(device, sizes)
        addresses = [[t.data_ptr() for t in column] or [0] * len(sizes) for column in columns]
        self.is_even = all(size % 16 == 0 for size in sizes) and all(
            address % 16 == 0 for column in addresses[:4] for address in column
        )
        rows: list[int] = []
        first = 0
        for index, size in enumerate(sizes):
            rows += [column[index] for column in addresses] + [size, first, numbers[index]]
            first += -(-size // ADAMW_CHUNK)
        self.rows = _addresses_on(device, rows)
        self.num_programs = first
