"""What the disk does without memwall, in the process that is measured and between its steps."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

__all__ = ["RawDisk", "io_bytes"]

# As many threads as the store has.
_BLOCK_BYTES, _FILE_BYTES, _NUM_THREADS = 2 << 20, 96 << 20, 3


class RawDisk:
    """A file that three threads write and read in blocks of 2 MiB with O_DIRECT.

    Args:
        memory_bytes: of the buffers. The host of a virtual disk copies each byte: faster from and to a few blocks, that
            stay in caches of the processor, than the memory of tensors.
        file_bytes: of the file, of which every measurement moves all: at least a block. A small one shows the speed of
            a burst, which a disk does not keep up over gigabytes.
        memory: somebody else's, instead of the buffers.
    """

    def __init__(
        self,
        directory: str,
        memory_bytes: int = _NUM_THREADS * _BLOCK_BYTES,
        file_bytes: int = _FILE_BYTES,
        memory: memoryview | None = None,
    ) -> None:
        self._num_blocks = file_bytes // _BLOCK_BYTES
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        if memory is None:
            mapped = [mmap(-1, _BLOCK_BYTES) for _ in range(memory_bytes // _BLOCK_BYTES)]
            for buffer in mapped:
                buffer.write(os.urandom(_BLOCK_BYTES))
            self._buffers = [memoryview(buffer) for buffer in mapped]
        else:
            self._buffers = [
                memory[start : start + _BLOCK_BYTES] for start in range(0, len(memory) - _BLOCK_BYTES + 1, _BLOCK_BYTES)
            ]
        self._pool = ThreadPoolExecutor(_NUM_THREADS)
        self._pass(is_read=False)  # first writes into fresh extents are slower

    def seconds_per_byte(self) -> tuple[float, float]:
        """To write and to read, now."""
        return self._pass(is_read=False), self._pass(is_read=True)

    def close(self) -> None:
        """Gives the file's room back."""
        self._pool.shutdown()
        os.close(self._fd)

    def _pass(self, *, is_read: bool) -> float:
        def move(thread: int) -> None:
            for number in range(thread, self._num_blocks, _NUM_THREADS):
                buffers, offset = [self._buffers[number % len(self._buffers)]], number * _BLOCK_BYTES
                done = os.preadv(self._fd, buffers, offset) if is_read else os.pwritev(self._fd, buffers, offset)
                if done != _BLOCK_BYTES:
                    raise OSError(f"{done} of {_BLOCK_BYTES} bytes were moved")

        begin = time.perf_counter()
        list(self._pool.map(move, range(_NUM_THREADS)))
        return (time.perf_counter() - begin) / (self._num_blocks * _BLOCK_BYTES)


def io_bytes() -> tuple[int, int]:
    """Bytes that this process has had the disk read and write so far (proc_pid_io(5))."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
