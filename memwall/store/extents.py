"""Free space as a sorted list of extents: the bookkeeping shared by the scratch file and the pinned host arena."""

from bisect import bisect_left


class FreeExtents:
    """Extents [offset, offset + size) that nobody uses; neighbours are merged, the best fit is given out."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    @property
    def total_bytes(self) -> int:
        """Counts all free bytes."""
        return sum(self._sizes)

    @property
    def largest_bytes(self) -> int:
        """Is the largest request that `take` can meet."""
        return max(self._sizes, default=0)

    def tail_bytes(self, end: int) -> int:
        """Returns the free bytes that touch `end`, the end of the space: growth there would be merged with them."""
        if self._offsets and self._offsets[-1] + self._sizes[-1] == end:
            return self._sizes[-1]
        return 0

    def take(self, num_bytes: int) -> int | None:
        """Returns the offset of the smallest extent that holds `num_bytes` (the first of equals), or None."""
        best = -1
        for index, size in enumerate(self._sizes):
            if size >= num_bytes and (best < 0 or size < self._sizes[best]):
                best = index
                if size == num_bytes:
                    break
        if best < 0:
            return None
        offset = self._offsets[best]
        if self._sizes[best] == num_bytes:
            del self._offsets[best], self._sizes[best]
        else:
            self._offsets[best] += num_bytes
            self._sizes[best] -= num_bytes
        return offset

    def give(self, offset: int, num_bytes: int) -> None:
        """Puts an extent back.

        Raises:
            ValueError: it overlaps space that is free already (freed twice).
        """
        index = bisect_left(self._offsets, offset)
        end = offset + num_bytes
        overlaps_next = index < len(self._offsets) and end > self._offsets[index]
        previous_end = self._offsets[index - 1] + self._sizes[index - 1] if index else -1
        if overlaps_next or previous_end > offset:
            raise ValueError(f"extent [{offset}, {end}) is free already")
        if index < len(self._offsets) and end == self._offsets[index]:
            num_bytes += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if previous_end == offset:
            self._sizes[index - 1] += num_bytes
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, num_bytes)
