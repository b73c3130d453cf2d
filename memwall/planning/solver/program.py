"""A mixed-integer program as columns and rows, as HiGHS takes them; a binary for each option of each block is first."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memwall.planning.solver.instance import Instance, Int64s

_ROW_SCALE = 1 << 12


class Program:
    """Holds columns and rows for HiGHS. The binaries come first, those of a block from offsets[block] on."""

    def __init__(self, instance: Instance) -> None:
        room_bytes = instance.link.capacity_bytes if instance.link else 0
        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.row_lowers: list[float] = []
        self.row_uppers: list[float] = []
        self.row_starts: list[int] = [0]
        self.columns: list[int] = []
        self.values: list[float] = []
        self.offsets: list[int] = []
        self.ties = 0.0
        self.unit_bytes = 1
        self.may: list[list[int]] = []
        for block in instance.blocks:
            self.offsets.append(len(self.costs))
            self.may.append([o for o, option in enumerate(block.options) if option.moved_bytes <= room_bytes])
            for option in block.options:
                self.add_column(0.0, 1.0 if option.moved_bytes <= room_bytes else 0.0)
        self.num_binaries = len(self.costs)
        for offset, block in zip(self.offsets, instance.blocks, strict=True):
            self.add_row([(offset + o, 1.0) for o in range(len(block.options))], 1.0, 1.0)
        self.allowed = np.array([x for i in range(len(self.offsets)) for x, _ in self.each(i)], dtype=np.intp)
        moved = [option.moved_bytes for block in instance.blocks for option in block.options]
        sizes = np.array(moved, dtype=np.int64)[self.allowed]
        self.add_bytes_row(self.allowed[sizes > 0], sizes[sizes > 0], room_bytes)

    def each(self, block: int) -> Iterator[tuple[int, int]]:
        """Yields (column, option) of the options of a block that may be chosen."""
        return ((self.offsets[block] + option, option) for option in self.may[block])

    def add_column(self, cost: float, upper: float) -> int:
        self.costs.append(cost)
        self.uppers.append(upper)
        return len(self.costs) - 1

    def add_row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        self.row_lowers.append(lower)
        self.row_uppers.append(upper)
        self.columns.extend(column for column, _ in terms)
        self.values.extend(value for _, value in terms)
        self.row_starts.append(len(self.columns))

    def add_bytes_row(self, columns: NDArray[np.intp], sizes: Int64s, room_bytes: int) -> None:
        """Adds sum of non-negative integers <= room, divided by their common divisor and scaled to what floats keep."""
        for column in columns[sizes > room_bytes]:
            self.uppers[column] = 0.0
        columns, sizes = columns[sizes <= room_bytes], sizes[sizes <= room_bytes]
        if room_bytes >= int(sizes.sum()):
            return
        divisor = int(np.gcd.reduce(sizes))
        room = room_bytes // divisor
        scale = max(1.0, 2.0 ** math.ceil(math.log2(max(1, room) / _ROW_SCALE)))
        self.add_terms(columns, sizes / divisor / scale, -math.inf, room / scale)

    def add_terms(self, columns: NDArray[np.intp], values: NDArray[np.float64], lower: float, upper: float) -> None:
        self.row_lowers.append(lower)
        self.row_uppers.append(upper)
        self.columns.extend(columns.tolist())
        self.values.extend(values.tolist())
        self.row_starts.append(len(self.columns))
