"""Models whose forward or backward runs out of memory where it is told to."""

import torch
from torch import Tensor, nn

__all__ = ["Block", "Bomb"]


class Bomb:
    """Fails so often at a place, as torch does when a device is full.

    It is no state of the model that holds it, which would be put back: nothing is found in an object with slots.
    """

    __slots__ = ("asked", "num_left", "place")

    def __init__(self) -> None:
        self.place = ""
        self.num_left = 0
        self.asked = "4.00 MiB"

    def arm(self, place: str, *, times: int = 1) -> None:
        self.place, self.num_left = place, times

    def passes(self, place: str = "") -> None:
        if place == self.place and self.num_left:
            self.num_left -= 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.asked}. GPU 0 has no more")


class Block(nn.Module):
    """Random numbers, statistics that a forward changes, and more activations than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 64))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.norm(self.inner(values))
