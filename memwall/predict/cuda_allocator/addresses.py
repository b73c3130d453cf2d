"""Addresses that the device may give to new segments: a guess that matters only where addresses decide ties."""

import random
from collections.abc import Iterator
from typing import Literal

AddressOrder = Literal["ascending", "descending", "random"]

# Apart by more than any reservation is long, and within the 72 bits that keys have for ties.
_STRIDE_BITS = 44
_NUM_PLACES_BITS = 26


def placed_addresses(order: AddressOrder) -> Iterator[int]:
    """Yields segment addresses without end, far enough apart for any segment; none is used twice."""
    num_places = 1 << _NUM_PLACES_BITS
    if order == "random":
        draw = random.Random(0)
        used: set[int] = set()
        while True:
            place = draw.randrange(1, num_places)
            if place not in used:
                used.add(place)
                yield place << _STRIDE_BITS
    for place in range(1, num_places):
        yield (place if order == "ascending" else num_places - place) << _STRIDE_BITS
