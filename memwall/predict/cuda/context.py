"""The bytes that a process holds on a device beside torch's allocator, measured where the device is at hand.

Published figures differ tenfold, since driver, loaded kernels and libraries decide it: two processes on the machine
say what a third would need.
"""

import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import msgspec
import torch

from memwall.errors import MemwallError, UsageError
from memwall.machine.hardware import Hardware, hardware_of_device
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# A process that has multiplied and convolved has loaded cuBLAS and cuDNN, as any training has. It prints what the
# device then has in use beyond its own allocator, by all processes, and stays until its input is closed.
_PROCESS = """
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
matrix = torch.ones(64, 64, device=device, requires_grad=True)
(matrix @ matrix).sum().backward()
image = torch.ones(1, 8, 16, 16, device=device, requires_grad=True)
torch.nn.functional.conv2d(image, torch.ones(8, 8, 3, 3, device=device, requires_grad=True)).sum().backward()
torch.cuda.synchronize(device)
free_bytes, total_bytes = torch.cuda.mem_get_info(device)
print(total_bytes - free_bytes - torch.cuda.memory_reserved(device), torch.cuda.memory_reserved(device), flush=True)
sys.stdin.read()
"""


@cache
def measured_context_bytes(index: int) -> int:
    """Measures the bytes of a CUDA device that a process takes for context, kernels and libraries; takes some seconds.

    Two processes run at once: by how much the second finds more in use than the first, so much one process takes. What
    others hold cancels out, as long as they hold still.

    Raises:
        MemwallError: a process ended without a figure, or others used the device meanwhile.
    """
    with _started(index) as first:
        first_bytes, held_bytes = _figures(first)
        with _started(index) as second:
            both_bytes, _ = _figures(second)
    # The second sees the first one's allocator as in use, too.
    context_bytes = both_bytes - first_bytes - held_bytes
    if context_bytes <= 0:
        raise MemwallError(
            f"cannot measure the CUDA context of cuda:{index}: its memory in use went from {format_bytes(first_bytes)} "
            f"to {format_bytes(both_bytes)} while a process started; end what else runs there"
        )
    return context_bytes


def with_measured_context(hardware: Hardware) -> Hardware:
    """Measures the context of a device that this machine has; of others, and where that fails, it stays as it is."""
    index = next(_indices_of(hardware), None)
    if index is None:
        return hardware
    try:
        num_bytes = measured_context_bytes(index)
    except MemwallError as error:
        _log.warning("%s; the published range is taken instead, and the forecast says so", error)
        return hardware
    sources = hardware.sources | {"context_bytes": f"measured on cuda:{index} of this machine"}
    return msgspec.structs.replace(hardware, context_bytes=(num_bytes, num_bytes), sources=sources)


def _indices_of(hardware: Hardware) -> Iterator[int]:
    """Yields the devices of this machine that are of its kind."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            if hardware_of_device(torch.cuda.get_device_name(index)).name == hardware.name:
                yield index
        except UsageError:
            continue


def _started(index: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _figures(process: "subprocess.Popen[str]") -> tuple[int, int]:
    """Returns the bytes in use beyond its own allocator, and those of its allocator."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    try:
        in_use_bytes, held_bytes = (int(word) for word in line.split())
    except ValueError:
        process.kill()
        said = process.stderr.read().strip().splitlines()
        raise MemwallError(
            f"cannot measure the CUDA context: a process of its own ended with {said[-1] if said else 'no message'}"
        ) from None
    return in_use_bytes, held_bytes
