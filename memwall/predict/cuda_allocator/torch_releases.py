"""What differs between releases of PyTorch's CUDA caching allocator, one profile per generation.

Releases before 2.11 were read from `c10/cuda/CUDACachingAllocator.cpp` (pytorch/pytorch at eb42ad6e, about 2.4;
ROCm/pytorch at 08b2238, about 2.10), and the dates of pull requests say which release a change went into. For 2.11.0,
2.12.0, 2.13.0, 2.14.0 and 2.15.0 the tie rules and the rest were settled by driving `libc10_cuda.so` of the wheels over
a stub of the CUDA runtime (benchmarks/allocator_oracle).
"""

import re
from collections.abc import Set
from typing import Literal

import msgspec
from msgspec import Struct

from memwall.errors import UsageError

__all__ = ["GrowStep", "TieRule", "VersionProfile", "covered_releases", "profile_for", "releases_reading"]

TieRule = Literal["address", "block", "segment"]
"""What decides between free blocks of one size: the lower address, the block created earlier, or the segment created
earlier and then the address."""

GrowStep = Literal["allocate", "overflow", "release_available", "release_cached"]
"""What is tried in turn when no free block fits; all but the first release memory and allocate again."""


class VersionProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one generation of the allocator behaves where generations differ."""

    version: str
    """First release with this behaviour, as "2.11"."""
    tie: TieRule
    chain: tuple[GrowStep, ...]
    expands_private_pools: bool
    """Whether expandable segments also serve private pools."""
    releases_expandable_in_gc: bool
    """Whether garbage collection counts blocks of expandable segments among those it may release."""
    limit_holds_at_one: bool
    """Whether a memory fraction of 1.0 is a limit; later it means none."""
    has_no_split: bool
    """Whether a pool can forbid splitting."""
    routing_defers_frees: bool
    """Whether routing allocations into a MemPool stops cross-stream frees and retries, as capturing a graph does."""
    keys: frozenset[str]
    """What the configuration string may contain."""
    ignored_variables: tuple[str, ...] = ()
    """Environment variables that this release silently ignores for expandable segments."""


_OLD_CHAIN: tuple[GrowStep, ...] = ("allocate", "release_available", "release_cached", "overflow")
_NEW_CHAIN: tuple[GrowStep, ...] = ("allocate", "overflow", "release_available", "release_cached")
_KEYS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "max_split_size_mb",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
    }
)

_V24 = VersionProfile(
    version="2.4",
    tie="address",
    chain=_OLD_CHAIN,
    expands_private_pools=False,
    releases_expandable_in_gc=True,
    limit_holds_at_one=True,
    has_no_split=False,
    routing_defers_frees=True,
    keys=_KEYS,
)
_V25 = msgspec.structs.replace(_V24, version="2.5", expands_private_pools=True, releases_expandable_in_gc=False)
_V26 = msgspec.structs.replace(_V25, version="2.6", keys=_KEYS | {"max_non_split_rounding_mb"})
# pytorch 183387: PYTORCH_ALLOC_CONF=expandable_segments:True has no effect on CUDA.
_V291 = msgspec.structs.replace(_V26, version="2.9.1", ignored_variables=("PYTORCH_ALLOC_CONF",))
_V210 = msgspec.structs.replace(
    _V26,
    version="2.10",
    limit_holds_at_one=False,
    has_no_split=True,
    keys=_V26.keys
    | {"per_process_memory_fraction", "graph_capture_record_stream_reuse", "pinned_reserve_segment_size_mb"},
)
_V211 = msgspec.structs.replace(_V210, version="2.11", chain=_NEW_CHAIN, keys=_V210.keys | {"large_segment_size_mb"})
_V212 = msgspec.structs.replace(
    _V211,
    version="2.12",
    tie="block",
    keys=_V211.keys | {"throw_on_cudamalloc_oom", "pinned_free_catch_all"},
)
_V213 = msgspec.structs.replace(
    _V212,
    version="2.13",
    tie="segment",
    routing_defers_frees=False,
    keys=_V212.keys | {"pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"},
)

_V215 = msgspec.structs.replace(
    _V213,
    version="2.15",
    keys=_V213.keys | {"expandable_segments_reserve", "expandable_segments_reserve_by_class"},
)

_PROFILES = (_V24, _V25, _V26, _V291, _V210, _V211, _V212, _V213, _V215)
_NEWEST_KNOWN = (2, 15)


def profile_for(torch_version: str) -> tuple[VersionProfile, str]:
    """Profile of a torch release, and "" or why it may not be that release's own.

    A release newer than all profiles gets the newest one.

    Raises:
        UsageError: the text does not begin with a version number, or names a release before 2.4.

    >>> profile_for("2.13.0+cpu")[0].tie, profile_for("2.11.0")[0].tie
    ('segment', 'address')
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", torch_version)
    if found is None:
        raise UsageError(f"'{torch_version}' is not a torch version; expected something like 2.13.0")
    version = (int(found[1]), int(found[2]), int(found[3] or 0))
    known = [profile for profile in _PROFILES if _numbers(profile.version) <= version]
    if not known:
        raise UsageError(
            f"torch {torch_version} is older than the oldest allocator that is modelled here; use torch 2.11 or later"
        )
    note = ""
    if version[:2] > _NEWEST_KNOWN:
        note = f"the allocator of torch {torch_version} is not known here; modelled as that of {known[-1].version}"
    return known[-1], note


def covered_releases(profile: VersionProfile) -> str:
    """The releases that behave as one profile says.

    >>> covered_releases(profile_for("2.13.0")[0])
    '2.13 and later, before 2.15'
    """
    following = _PROFILES[_PROFILES.index(profile) + 1 :]
    return f"{profile.version} and later" + (f", before {following[0].version}" if following else "")


def releases_reading(keys: Set[str]) -> str:
    """The releases that know all of these options.

    >>> releases_reading({"expandable_segments", "large_segment_size_mb"})
    '2.11 and later'
    """
    oldest = next(profile for profile in _PROFILES if keys <= profile.keys)
    return f"{oldest.version} and later"


def _numbers(text: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in text.split(".")]
    return (numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 0)
