"""The safest plan, under which the first step is recorded: every large saved tensor leaves the device."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import torch
from torch import Tensor, nn

from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.packed import pack_seconds_per_element
from memwall.errors import StoreError, UsageError
from memwall.machine.disk_location import check_directory, default_directory
from memwall.machine.disk_probe import known_disk
from memwall.machine.hardware import hardware_of_device
from memwall.machine.limits import pinnable_bytes
from memwall.machine.link_speed import probe_link
from memwall.machine.memory_speed import copy_seconds_per_byte, fault_seconds_per_byte
from memwall.machine.tiers import Machine, Tier
from memwall.predict.packed_bytes import device_pack_seconds
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.trace.gathered import Gathered

_log = logging.getLogger(__name__)

_PROBE_BYTES = 64 << 20
_LOOK_SECONDS = 0.2
# An optimizer's state per byte of its parameters: of those in 16 bits two moments may be in float32.
_MOST_STATE = 4
_closing = threading.Lock()
_needed: list[tuple[ActivationOffload, Callable[[], None]]] = []
"""Engines that nobody saves to any more, and what closes them: a graph that they were used in still waits for its
backward, as that of a generator does while its discriminator steps."""


def parameter_guard(roots: Sequence[nn.Module]) -> Callable[[Tensor], bool]:
    """Says which tensors share memory with a parameter or buffer: autograd saves those too, and they stay."""
    with without_subclass_functions():  # an address does not bring a parameter in
        addresses = {
            local_part(tensor).untyped_storage().data_ptr()
            for root in roots
            for tensor in (*root.parameters(), *root.buffers())
        }
    gathered = Gathered(roots)

    def is_excluded(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in addresses or gathered.holds(tensor)

    return is_excluded


def open_engine(
    roots: Sequence[nn.Module],
    *,
    disk: str | None,
    capacity_bytes: int | None,
    window_bytes: int,
    min_bytes: int,
    host_limit_bytes: int | None = None,
    owns_pages: Callable[[int], bool] | None = None,
    holds_sources: bool = True,
) -> tuple[ActivationOffload, Callable[[], None]]:
    """Opens an offload engine for the modules' devices: disk under CPU tensors, pinned host memory under CUDA ones.

    Args:
        host_limit_bytes: the most host memory to pin; None for `memwall.machine.limits.pinnable_bytes`.
        owns_pages: see `ActivationOffload`, as all others but `roots`: the modules that are trained.

    Returns:
        The engine, and what closes it with its files and threads: now, or at a `close_unneeded` after the last backward
        that needs it.

    Raises:
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    close_unneeded()
    is_cuda = _cuda_device(roots) is not None
    pool = None
    if is_cuda:
        host_limit_bytes = pinnable_bytes() if host_limit_bytes is None else host_limit_bytes
    else:
        directory = disk if disk is not None else default_directory()
        check_directory(directory)
        pool = TransferPool(ScratchFile(directory, capacity_bytes=capacity_bytes))
    engine = ActivationOffload(
        pool,
        window_bytes=window_bytes,
        min_bytes=min_bytes,
        is_excluded=parameter_guard(roots),
        host_limit_bytes=host_limit_bytes,
        owns_pages=owns_pages,
        holds_sources=holds_sources,
    )

    def close_all() -> None:
        engine.close()
        if pool is not None:
            pool.close()

    def close() -> None:
        _needed.append((engine, close_all))
        close_unneeded()

    return engine, close


def close_unneeded() -> None:
    """Closes what was to be closed and waited for a backward that has run now. To be called between steps."""
    if not _needed:
        return
    with _closing:
        ready = [pair for pair in _needed if not pair[0].num_held]
        _needed[:] = [pair for pair in _needed if pair not in ready]
    for _, close_all in ready:
        close_all()


def close_once_unneeded() -> None:
    """Closes the rest as soon as nobody needs it, in a thread: for the end of a session, after which no step may come.

    The frames of an error hold the graph of the step that it ended, for as long as somebody holds the error.
    """
    close_unneeded()
    if _needed:
        threading.Thread(target=_close_in_time, name="memwall-closing", daemon=True).start()


def _close_in_time() -> None:
    while _needed:
        time.sleep(_LOOK_SECONDS)
        close_unneeded()


class Parked:
    """Opens the engine for the recorded step and measures what planning needs to know of the machine.

    Args:
        host_limit_bytes: of modules on CUDA, the most host memory to use, here and in plans.
        no_disk: of modules on CUDA, whether plans may write to no disk; nothing is written here either.

    Attributes:
        min_bytes: from which size on saved tensors leave: none do where host memory cannot be had for a probe of the
            link, and so not for them.

    Raises:
        StoreError: see `open_engine`.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        *,
        disk: str | None,
        capacity_bytes: int | None,
        window_bytes: int,
        min_bytes: int,
        host_limit_bytes: int | None = None,
        no_disk: bool = False,
    ) -> None:
        self.window_bytes = window_bytes
        device, self.machine = _cuda_device(roots), Machine()
        if device is not None:
            self.machine = machine_above_host(device, limit_bytes=host_limit_bytes)
            if not no_disk:
                self.machine = with_disk_below(self.machine, roots, disk, capacity_bytes)
            min_bytes = min_bytes if self.machine.tiers else sys.maxsize
        self.min_bytes = min_bytes
        # All are copied: how long a tensor stays until it is written would show in the peak, which a replay is compared
        # with.
        self._engine, self._close = open_engine(
            roots,
            disk=disk,
            capacity_bytes=capacity_bytes,
            window_bytes=window_bytes,
            min_bytes=min_bytes,
            host_limit_bytes=host_limit_bytes,
            holds_sources=False,
        )
        if device is None:
            self.machine = measured_machine(disk if disk is not None else default_directory())

    @property
    def engine(self) -> ActivationOffload:
        """Returns the engine, as the recorder's parking."""
        return self._engine

    def close(self) -> int:
        """Lets go of everything parked that no graph needs; returns the bytes that were moved out."""
        moved_bytes = self._engine.bytes_written
        self._close()
        return moved_bytes


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


def _cuda_device(roots: Sequence[nn.Module]) -> torch.device | None:
    """Returns the device of the modules' first parameter on CUDA; None where there is none."""
    return next((p.device for root in roots for p in root.parameters() if p.device.type == "cuda"), None)


def measured_machine(disk: str) -> Machine:
    """Measures this machine in about half a second, once: disk as the store uses it, faults, copies, packing."""
    tiers = (known_disk(disk, _PROBE_BYTES),) if disk else ()
    return msgspec.structs.replace(_measured_memory(), tiers=tiers)


@cache
def _measured_memory() -> Machine:
    faults = fault_seconds_per_byte()
    return Machine(
        copy_seconds_per_byte=copy_seconds_per_byte() + faults,
        fault_seconds_per_byte=faults,
        huge_fault_seconds_per_byte=fault_seconds_per_byte(in_huge_pages=True),
        pack_seconds_per_element=pack_seconds_per_element() + torch.float32.itemsize * faults,
    )
