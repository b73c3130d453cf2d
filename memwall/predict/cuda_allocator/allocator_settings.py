"""The allocator's settings: PYTORCH_CUDA_ALLOC_CONF read into a record, checked, and written back complete.

Reads what `c10/core/AllocatorConfig.cpp` of torch 2.13 reads.
"""

import re

import msgspec
from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.torch_releases import VersionProfile

MIB = 1 << 20
NUM_DIVISIONS = 16
_NO_DIVISIONS = (0,) * NUM_DIVISIONS
_MIN_LARGE_ALLOC_MB = 10
_BOOLEANS = {"True": True, "False": False}
_OPTION = r"[a-z0-9_]+:(?:[A-Za-z0-9_.+-]+|\[(?:\d+|>):\d+(?:,(?:\d+|>):\d+)*\])"
_WELL_FORMED = re.compile(rf"{_OPTION}(?:,{_OPTION})*", re.ASCII)


class AllocatorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the settings of the CUDA caching allocator that decide where and how much it allocates."""

    expandable_segments: bool = False
    """Grow one virtual reservation per stream and pool instead of one device malloc per segment."""
    large_segment_bytes: int = 20 * MIB
    """Segment for requests from 1 to 10 MiB, and granule of expandable segments of the large pool."""
    max_split_bytes: int | None = None
    """Blocks from this size are never split, and smaller requests do not use them; None: unlimited."""
    max_non_split_rounding_bytes: int | None = None
    """Slack up to which an oversize request takes a larger block; None: the large segment size."""
    garbage_collection_threshold: float = 0.0
    """Share of the memory limit above which old cached blocks are released; 0: never. Needs a limit."""
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    """Steps between powers of two to which requests are rounded, for below 2 MiB, 2-4 MiB, ... from 32 GiB; 0: none."""
    per_process_memory_fraction: float | None = None
    """Share of the device's memory that may be reserved; None: no limit."""
    throw_on_cudamalloc_oom: bool = False
    """Refuse a request beyond the fraction at once instead of releasing cached memory."""
    others: tuple[tuple[str, str], ...] = ()
    """Options that change nothing here, such as pinned memory, as (name, value)."""

    @property
    def slack_bytes(self) -> int:
        """Returns how much larger than an oversize request its block may be."""
        rounding = self.max_non_split_rounding_bytes
        return self.large_segment_bytes if rounding is None else rounding


def parse_settings(text: str, profile: VersionProfile) -> AllocatorSettings:
    """Returns the settings that a fresh process has with this configuration string.

    Raises:
        UsageError: a key is unknown to this release, a value is malformed or out of range, or two options exclude
            each other; the message names the option and what was expected.
    """
    settings = AllocatorSettings()
    for key, value in read_items(text):
        settings = with_option(settings, key, value, profile)
    _refuse_conflicts(settings)
    return settings


def is_well_formed(text: str) -> bool:
    """Returns whether a string is name:value,name:value throughout, without blanks; not whether torch takes it.

    Nothing that passes has a meaning to a shell but `>`, as the name of an interval in a list of divisions.
    """
    return _WELL_FORMED.fullmatch(text) is not None


def read_items(text: str) -> list[tuple[str, str]]:
    """Returns names and values of a configuration string; lists in brackets stay one value.

    Raises:
        UsageError: the text is not of the form name:value,name:value.
    """
    squeezed = re.sub(r"\s+", "", text)
    if not squeezed:
        return []
    items: list[tuple[str, str]] = []
    for part in re.split(r",(?![^\[]*\])", squeezed):
        key, colon, value = part.partition(":")
        if not (key and colon and value):
            raise UsageError(f"'{part}' in '{text}' is not an allocator option; expected name:value")
        items.append((key, value))
    return items


def with_option(settings: AllocatorSettings, key: str, value: str, profile: VersionProfile) -> AllocatorSettings:
    """Returns the settings with one option read from its text.

    Raises:
        UsageError: this release does not know the option, or the value is not one that it takes.
    """
    if key not in profile.keys:
        known = ", ".join(sorted(profile.keys))
        raise UsageError(f"allocator option '{key}' is not known to torch {profile.version}; it knows {known}")
    change: dict[str, object]
    if key == "max_split_size_mb":
        change = {"max_split_bytes": _mebibytes(key, value)}
    elif key == "large_segment_size_mb":
        change = {"large_segment_bytes": _mebibytes(key, value, above=_MIN_LARGE_ALLOC_MB)}
    elif key == "max_non_split_rounding_mb":
        change = {"max_non_split_rounding_bytes": _mebibytes(key, value)}
    elif key == "garbage_collection_threshold":
        change = {key: _fraction(key, value, includes_one=False)}
    elif key == "per_process_memory_fraction":
        change = {key: _fraction(key, value, includes_one=True)}
    elif key in ("expandable_segments", "throw_on_cudamalloc_oom"):
        change = {key: _boolean(key, value)}
    elif key == "roundup_power2_divisions":
        change = {key: _divisions(value)}
    else:
        if key in ("release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"):
            _boolean(key, value)
        if key == "backend" and value != "native":
            raise UsageError(f"backend:{value} does not use PyTorch's own allocator, so there is nothing to simulate")
        kept = tuple(item for item in settings.others if item[0] != key)
        change = {"others": (*kept, (key, value))}
    return msgspec.structs.replace(settings, **change)


def useless_options(settings: AllocatorSettings) -> tuple[str, ...]:
    """Returns warnings about settings that do nothing in a process whose memory nobody limits otherwise."""
    if settings.garbage_collection_threshold > 0 and settings.per_process_memory_fraction is None:
        return (
            f"garbage_collection_threshold:{settings.garbage_collection_threshold} does nothing without a memory "
            "limit; set one with torch.cuda.set_per_process_memory_fraction",
        )
    return ()


def _refuse_conflicts(settings: AllocatorSettings) -> None:
    max_split, large = settings.max_split_bytes, settings.large_segment_bytes
    for option, nbytes in (
        ("max_split_size_mb", max_split),
        ("max_non_split_rounding_mb", settings.max_non_split_rounding_bytes),
    ):
        if nbytes is not None and nbytes < large:
            raise UsageError(
                f"{option}:{nbytes // MIB} is below the large segment size of {large // MIB} MiB; "
                f"torch refuses it: give {large // MIB} or more"
            )
    if max_split is not None and settings.expandable_segments:
        raise UsageError(
            f"expandable_segments:True together with max_split_size_mb:{max_split // MIB} lets reserved memory grow "
            "without bound (pytorch 123548): drop one of the two"
        )


def format_settings(settings: AllocatorSettings) -> str:
    """Returns one complete configuration string: what a later setter call would leave as it was is always named.

    Options that such a call resets (max_split_size_mb, the threshold, divisions) are named where they are set, because
    "unlimited" and "none" cannot be written.
    """
    parts = [
        f"expandable_segments:{settings.expandable_segments}",
        f"large_segment_size_mb:{settings.large_segment_bytes // MIB}",
    ]
    if settings.max_split_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_bytes // MIB}")
    if settings.max_non_split_rounding_bytes is not None:
        parts.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // MIB}")
    if settings.garbage_collection_threshold > 0:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold}")
    if any(settings.roundup_power2_divisions):
        parts.append(f"roundup_power2_divisions:{divisions_text(settings.roundup_power2_divisions)}")
    if settings.per_process_memory_fraction is not None:
        parts.append(f"per_process_memory_fraction:{settings.per_process_memory_fraction}")
    if settings.throw_on_cudamalloc_oom:
        parts.append("throw_on_cudamalloc_oom:True")
    return ",".join([*parts, *(f"{key}:{value}" for key, value in settings.others)])


def divisions_text(divisions: tuple[int, ...]) -> str:
    """Returns divisions as torch reads them: one number, or a list whose first interval stands for those below it.

    Every interval above it is named. torch would take `>` for the rest, which a shell takes for a redirection, and no
    quoting is read alike by shells, `docker run --env-file` and systemd.

    >>> divisions_text((1,) * 12 + (2, 4) + (8,) * 2)
    '[2048:1,4096:2,8192:4,16384:8,32768:8]'
    """
    if len(set(divisions)) == 1:
        return str(divisions[0])
    first = next(index for index in range(NUM_DIVISIONS) if divisions[index] != divisions[index + 1])
    return f"[{','.join(f'{1 << index}:{divisions[index]}' for index in range(first, NUM_DIVISIONS))}]"


def _divisions(value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_division(value),) * NUM_DIVISIONS
    divisions = [0] * NUM_DIVISIONS
    last = -1
    for part in value.strip("[]").split(","):
        name, colon, number = part.partition(":")
        if not colon:
            raise UsageError(f"roundup_power2_divisions:{value}: '{part}' is not of the form mebibytes:divisions")
        count = _division(number)
        if name == ">":
            divisions[last + 1 :] = [count] * (NUM_DIVISIONS - last - 1)
            continue
        if not name.isdecimal() or int(name) & (int(name) - 1) or int(name) == 0:
            raise UsageError(f"roundup_power2_divisions:{value}: '{name}' is not a power of two, in MiB")
        index = min(int(name).bit_length() - 1, NUM_DIVISIONS - 1)
        if last < 0:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _division(text: str) -> int:
    if not text.isdecimal() or int(text) & (int(text) - 1):
        raise UsageError(f"roundup_power2_divisions: '{text}' is neither 0 nor a power of two")
    return int(text)


def _mebibytes(key: str, value: str, *, above: int = -1) -> int:
    if not value.isdecimal() or int(value) <= above:
        raise UsageError(f"{key}:{value}: expected a whole number of MiB" + (f" above {above}" if above >= 0 else ""))
    return int(value) * MIB


def _fraction(key: str, value: str, *, includes_one: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0 < number < 1 or (number == 1 and includes_one)):
        raise UsageError(f"{key}:{value}: expected a number above 0 and {'up to' if includes_one else 'below'} 1")
    return number


def _boolean(key: str, value: str) -> bool:
    if value not in _BOOLEANS:
        raise UsageError(f"{key}:{value}: expected True or False, with a capital")
    return _BOOLEANS[value]
