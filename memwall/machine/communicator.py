"""Measures what a communicator of NCCL or RCCL holds on each rank beside torch's allocator, where the devices are.

It grows with the channels that NCCL gives the links between the devices, so that published figures differ threefold.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from memwall.errors import MemwallError
from memwall.units import format_bytes

__all__ = ["measured_communicator_bytes"]

# One rank for each device. Its context, kernels and libraries are there before it looks; an all-reduce then makes NCCL
# connect to the others. It prints how much more its device has in use, beyond its own allocator.
_RANK = """
import sys, torch, torch.distributed as dist
rank, path, *indices = sys.argv[1:]
device = torch.device("cuda", int(indices[int(rank)]))
torch.cuda.set_device(device)
matrix = torch.ones(64, 64, device=device)
numbers = (matrix @ matrix).new_ones(1 << 24)

def in_use():
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)

before = in_use()
dist.init_process_group("nccl", init_method=f"file://{path}", rank=int(rank), world_size=len(indices))
dist.all_reduce(numbers)
print(in_use() - before, flush=True)
dist.destroy_process_group()
"""
_TIMEOUT_SECONDS = 120


@cache
def measured_communicator_bytes(indices: tuple[int, ...]) -> int:
    """Returns the most bytes that a communicator of these CUDA devices holds on one of them; takes some seconds.

    Raises:
        MemwallError: a rank ended without a figure, or others freed memory of its device meanwhile.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_started(rank, Path(folder) / "ranks", indices) for rank in range(len(indices))]
        try:
            found = [_figure(process) for process in ranks]
        finally:
            for process in ranks:  # one that waits for a rank that failed
                process.kill()
                process.communicate()
    if min(found) <= 0:
        raise MemwallError(
            "cannot measure a communicator: while it was made, the memory in use of a device went down by "
            f"{format_bytes(-min(found))}; end what else runs there"
        )
    return max(found)


def _started(rank: int, meeting: Path, indices: Sequence[int]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, str(rank), str(meeting), *map(str, indices)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _figure(process: "subprocess.Popen[str]") -> int:
    try:
        out, said = process.communicate(timeout=_TIMEOUT_SECONDS)
        return int(out)
    except subprocess.TimeoutExpired:
        reason = f"did not end within {_TIMEOUT_SECONDS} s"
    except ValueError:
        lines = said.strip().splitlines()
        reason = f"ended with {lines[-1] if lines else 'no message'}"
    raise MemwallError(f"cannot measure a communicator: one of its ranks {reason}") from None
