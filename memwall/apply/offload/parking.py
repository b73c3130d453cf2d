"""The safest plan, under which the first step is recorded: every large saved tensor leaves the device."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.machine_below import machine_above_host, measured_machine, with_disk_below
from memwall.machine.disk_location import check_directory, default_directory
from memwall.machine.limits import pinnable_bytes
from memwall.machine.tiers import Machine
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.torch_internals.storages import StorageWeakRef, identity_of
from memwall.trace.gathered import Gathered

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_closing = threading.Lock()
_needed: list[tuple[ActivationOffload, Callable[[], None]]] = []
"""Engines that nobody saves to any more, and what closes them: a graph that they were used in still waits for its
backward, as that of a generator does while its discriminator steps."""


def parameter_guard(roots: Sequence[nn.Module]) -> Callable[[Tensor], bool]:
    """Says which tensors share memory with a parameter or buffer: autograd saves those too, and they stay.

    On a device the address of one that leaves between its uses is another one each time, and others' meanwhile.
    """
    with without_subclass_functions():  # neither an address nor an identity brings a parameter in
        storages = [
            local_part(tensor).untyped_storage() for root in roots for tensor in (*root.parameters(), *root.buffers())
        ]
        addresses = {storage.data_ptr() for storage in storages if storage.device.type != "cuda"}
        # While a reference lives no other storage has the identity.
        known = {identity_of(storage): StorageWeakRef(storage) for storage in storages}
    gathered = Gathered(roots)

    def is_excluded(tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return identity_of(storage) in known or storage.data_ptr() in addresses or gathered.holds(tensor)

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


def _cuda_device(roots: Sequence[nn.Module]) -> torch.device | None:
    """Returns the device of the modules' first parameter on CUDA; None where there is none."""
    return next((p.device for root in roots for p in root.parameters() if p.device.type == "cuda"), None)
