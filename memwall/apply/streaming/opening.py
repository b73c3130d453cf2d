"""Files and threads for parameters on disk: a scratch file, or, of a run that is committed, the checkpoint's own."""

import logging
from collections.abc import Callable, Sequence

from torch import nn

from memwall.apply.optimizer_state.kept_space import kept_space
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.errors import StoreError
from memwall.machine.disk_location import check_directory, default_directory
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
from memwall.units import format_bytes

__all__ = ["close_tier", "open_parameter_streaming", "open_tier"]

_log = logging.getLogger(__name__)


def open_tier(*, disk: str | None, capacity_bytes: int | None, window_bytes: int, min_bytes: int) -> ParameterTier:
    """A place for parameters on disk, until `close_tier`.

    Raises:
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    directory = disk if disk is not None else default_directory()
    check_directory(directory)
    kept = kept_space()
    pool = TransferPool(ScratchFile(directory, capacity_bytes=capacity_bytes))
    # Of a run that is committed, parameters lie where a commit need only name them.
    values_pool = None if kept is None else kept.pool
    return ParameterTier(pool, window_bytes=window_bytes, min_bytes=min_bytes, values_pool=values_pool)


def close_tier(tier: ParameterTier) -> None:
    """Brings back whatever is there, and closes files and threads.

    Raises:
        StoreError: bytes cannot be read back.
    """
    try:
        for member in list(tier):
            tier.give_up(member)
    finally:
        tier.pool.close()


def open_parameter_streaming(
    model: nn.Module,
    *,
    disk: str | None,
    capacity_bytes: int | None,
    window_bytes: int,
    min_bytes: int,
    blocks: Sequence[str] | None = None,
    has_root: bool = True,
    built: ParameterTier | None = None,
) -> tuple[ParameterStreaming, Callable[[], None]]:
    """Puts a model's parameters and gradients on disk.

    Args:
        built: has some of them already; it is closed as well where this fails.

    Returns:
        Their keeper, and what brings them back and closes files and threads.

    Raises:
        ApplyError: a block is missing or cannot be wrapped.
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    kept = kept_space()
    tier = built
    if tier is None:
        tier = open_tier(disk=disk, capacity_bytes=capacity_bytes, window_bytes=window_bytes, min_bytes=min_bytes)
    tier.forget_unused()
    tier.set_window(window_bytes)
    try:
        streaming = ParameterStreaming(model, tier, blocks=blocks, has_root=has_root)
    except BaseException:
        close_tier(tier)
        raise
    if kept is not None:
        kept.parameters = streaming
    _log.info("%s of the parameters are on disk in %s", format_bytes(streaming.away_bytes), tier.pool.scratch.path)

    def close() -> None:
        try:
            streaming.undo()
            close_tier(tier)
        except StoreError as error:
            if streaming.failure is None:
                raise
            _log.error(
                "the parameters could not be brought back into memory: %s; load the model again before it is used",
                error,
            )
        finally:
            if kept is not None:
                kept.parameters = None
            tier.pool.close()

    return streaming, close
