"""What a call of the allocator's setter at run time leaves behind, also after a bad value.

`torch._C._accelerator_setAllocatorSettings` of torch 2.13.0, watched from outside: options that a string does not name
are reset or silently kept depending on the option, and a string that is refused has by then been half applied.
"""

import msgspec
from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.settings import AllocatorSettings, check, read_items, with_option
from memwall.predict.cuda_allocator.versions import VersionProfile

__all__ = ["SetterState", "call_setter", "check_change"]

_RESETTING = AllocatorSettings()


class SetterState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effective settings and the last string given, which is what a snapshot shows."""

    settings: AllocatorSettings
    text: str
    error: str
    """Why the last call was refused; "" if it was not."""


def call_setter(state: SetterState, text: str, profile: VersionProfile) -> SetterState:
    """State after one more call: with an error the string is replaced and the settings are half changed."""
    settings = msgspec.structs.replace(
        state.settings,
        max_split_bytes=_RESETTING.max_split_bytes,
        max_non_split_rounding_bytes=_RESETTING.max_non_split_rounding_bytes,
        garbage_collection_threshold=_RESETTING.garbage_collection_threshold,
        roundup_power2_divisions=_RESETTING.roundup_power2_divisions,
    )
    error = ""
    try:
        # The large segment size is read before the others: they are checked against it.
        for key, value in sorted(read_items(text), key=lambda item: item[0] != "large_segment_size_mb"):
            changed = with_option(settings, key, value, profile)
            large = changed.large_segment_bytes
            limits = (changed.max_split_bytes, changed.max_non_split_rounding_bytes)
            if any(limit is not None and limit < large for limit in limits):
                check(changed, profile)
            settings = changed
    except UsageError as refusal:
        error = str(refusal)
    return SetterState(settings=settings, text=text, error=error)


def check_change(before: AllocatorSettings, after: AllocatorSettings) -> None:
    """Refuse what must not be changed in a live process.

    Raises:
        UsageError: max_split_size_mb would become lower. Releasing oversize blocks does not look whether they were
            split, so a block of a segment that a higher value had allowed to split would be given back alone.
    """
    if after.max_split_bytes is None:
        return
    if before.max_split_bytes is None or after.max_split_bytes < before.max_split_bytes:
        had = "unlimited" if before.max_split_bytes is None else f"{before.max_split_bytes >> 20} MiB"
        raise UsageError(
            f"max_split_size_mb must not be lowered in a running process (from {had} to "
            f"{after.max_split_bytes >> 20} MiB): set it before the first allocation"
        )
