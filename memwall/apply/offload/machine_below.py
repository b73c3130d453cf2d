"""Measures the machine below a model: the link to host memory, a disk, and memory itself, for sessions and plans."""

import logging
import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import torch
from torch import nn

from memwall.apply.offload.packed import pack_seconds_per_element
from memwall.errors import StoreError, UsageError
from memwall.machine.disk_location import default_directory
from memwall.machine.disk_probe import STANDS_SECONDS, known_disk
from memwall.machine.hardware import hardware_of_device
from memwall.machine.limits import pinnable_bytes
from memwall.machine.link_speed import probe_link
from memwall.machine.memory_speed import copy_seconds_per_byte, fault_seconds_per_byte
from memwall.machine.process_group import num_processes
from memwall.machine.tiers import Machine, Tier
from memwall.predict.packed_bytes import device_pack_seconds

_log = logging.getLogger(__name__)

_PROBE_BYTES = 64 << 20
# An optimizer's state per byte of its parameters: of those in 16 bits two moments may be in float32.
_MOST_STATE = 4


def machine_above_host(device: torch.device, *, limit_bytes: int | None = None) -> Machine:
    """Measures a CUDA device's link to host memory.

    What passes the link is copied by the device, and costs the host's cores nothing.

    Args:
        limit_bytes: what plans may use of host memory; None for `memwall.machine.limits.pinnable_bytes`.

    Returns:
        Without a tier where host memory cannot be pinned, or the device has no room for the copies, which is logged:
        plans leave host memory out then.
    """
    limit_bytes = pinnable_bytes() if limit_bytes is None else limit_bytes
    try:
        tier = probe_link(device, limit_bytes=limit_bytes)
    except (StoreError, torch.OutOfMemoryError) as error:
        _log.warning("plans leave out host memory: %s", error)
        return Machine()
    try:
        card = hardware_of_device(torch.cuda.get_device_name(device))
    except UsageError:  # nothing leaves packed where it is not known what that takes
        return Machine(tiers=(tier,))
    return Machine(tiers=(tier,), pack_seconds_per_element=device_pack_seconds(card.memory_bytes_per_second))


def with_disk_below(
    machine: Machine, roots: Sequence[nn.Module], disk: str | None, capacity_bytes: int | None
) -> Machine:
    """Returns a machine with the disk below its host memory, where that may be too small for an optimizer's state.

    A disk that cannot be used is left out, which is logged.

    Args:
        roots: the modules that are trained.
        disk: directory; None for the default one.
        capacity_bytes: the most to take there; None for what is free.
    """
    if num_processes() > 1:
        return machine  # nothing of a device is on disk where there are several
    state_bytes = _MOST_STATE * sum(p.nbytes for root in roots for p in root.parameters() if p.requires_grad)
    if not machine.tiers or machine.tiers[0].free_bytes >= state_bytes:
        return machine
    try:
        below = probed_disk(disk if disk is not None else default_directory(), capacity_bytes)
    except StoreError as error:
        _log.warning("plans leave out the disk: %s", error)
        return machine
    return msgspec.structs.replace(machine, tiers=(*machine.tiers, below))


def probed_disk(directory: str, capacity_bytes: int | None) -> Tier:
    """Measures a disk, of which so much may be taken; None for what is free.

    Raises:
        StoreError: it cannot be used.
    """
    tier = known_disk(directory, _PROBE_BYTES)
    free_bytes = tier.free_bytes if capacity_bytes is None else min(tier.free_bytes, capacity_bytes)
    return msgspec.structs.replace(tier, free_bytes=free_bytes)


def measured_machine(disk: str) -> Machine:
    """Measures this machine in about half a second, once: disk as the store uses it, faults, copies, packing."""
    tiers = (known_disk(disk, _PROBE_BYTES),) if disk else ()
    turn = int(time.monotonic() // STANDS_SECONDS)  # one moment's noise is not for the rest of the process
    return msgspec.structs.replace(_measured_memory(torch.get_num_threads(), turn), tiers=tiers)


@lru_cache(maxsize=1)
def _measured_memory(num_threads: int, turn: int) -> Machine:
    """Measures memory, by as many threads as torch has."""
    faults = fault_seconds_per_byte()
    return Machine(
        copy_seconds_per_byte=copy_seconds_per_byte() + faults,
        fault_seconds_per_byte=faults,
        huge_fault_seconds_per_byte=fault_seconds_per_byte(in_huge_pages=True),
        pack_seconds_per_element=pack_seconds_per_element() + torch.float32.itemsize * faults,
    )
