"""Releases of PyTorch's CUDA caching allocator: where they differ, one profile per generation.

For 2.11.0, 2.12.0, 2.13.0, 2.14.0 and 2.15.0 the tie rules and the rest were settled by driving `libc10_cuda.so` of the
wheels over a stub of the CUDA runtime (benchmarks/allocator_oracle).
"""

import re
from typing import Literal

import msgspec
from msgspec import Struct

from memwall.errors import UsageError

TieRule = Literal["address", "block", "segment"]
"""The rule that decides between free blocks of one size: the lower address, the block created earlier, or the segment
created earlier and then the address."""


class VersionProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how one generation of the allocator behaves where generations differ."""

    version: str
    """First release with this behaviour, as "2.11"."""
    tie: TieRule
    keys: frozenset[str]
    """Names that the configuration string may contain."""


_V211 = VersionProfile(
    version="2.11",
    tie="address",
    keys=frozenset(
        {
            "backend",
            "expandable_segments",
            "garbage_collection_threshold",
            "graph_capture_record_stream_reuse",
            "large_segment_size_mb",
            "max_non_split_rounding_mb",
            "max_split_size_mb",
            "per_process_memory_fraction",
            "pinned_num_register_threads",
            "pinned_reserve_segment_size_mb",
            "pinned_use_background_threads",
            "pinned_use_cuda_host_register",
            "release_lock_on_cudamalloc",
            "roundup_power2_divisions",
        }
    ),
)
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
    keys=_V212.keys | {"pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"},
)
_V215 = msgspec.structs.replace(
    _V213,
    version="2.15",
    keys=_V213.keys | {"expandable_segments_reserve", "expandable_segments_reserve_by_class"},
)

_PROFILES = (_V211, _V212, _V213, _V215)


def profile_for(torch_version: str) -> tuple[VersionProfile, str]:
    """Returns the profile of a torch release, and "" or why it may not be that release's own.

    A release newer than all profiles gets the newest one.

    Raises:
        UsageError: the text does not begin with a version number, or names a release before all profiles, whose
            allocator reads fewer settings.

    >>> profile_for("2.13.0+cpu")[0].tie, profile_for("2.11.0")[0].tie
    ('segment', 'address')
    """
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if found is None:
        raise UsageError(f"'{torch_version}' is not a torch version; expected something like 2.13.0")
    version = (int(found[1]), int(found[2]))
    profile = next((profile for profile in reversed(_PROFILES) if _numbers(profile) <= version), None)
    if profile is None:
        raise UsageError(
            f"the allocator of torch {torch_version} is not known here, and reads fewer settings than later ones; give "
            f"a release from {_PROFILES[0].version} on, or none for the installed one"
        )
    if version <= _numbers(_PROFILES[-1]):
        return profile, ""
    return profile, f"the allocator of torch {torch_version} is not known here; modelled as that of {profile.version}"


def covered_releases(profile: VersionProfile) -> str:
    """Returns the releases that behave as one profile says.

    >>> covered_releases(profile_for("2.13.0")[0])
    '2.13 and later, before 2.15'
    """
    following = _PROFILES[_PROFILES.index(profile) + 1 :]
    return f"{profile.version} and later" + (f", before {following[0].version}" if following else "")


def _numbers(profile: VersionProfile) -> tuple[int, int]:
    major, _, minor = profile.version.partition(".")
    return int(major), int(minor)
