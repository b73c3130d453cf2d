"""The CUDA caching allocator's settings: one complete string, validated, set before CUDA starts, read back and logged.

torch reads the variables when its settings are first asked for, so after `import torch` is early enough as a rule;
where it was not, its setter is called. Once CUDA runs nothing is changed any more: there are segments then, and what
torch does with them under other settings is not what was simulated.
"""

import logging
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime

import torch

from memwall.errors import ApplyError, UsageError
from memwall.patches import Patches, note_permanent
from memwall.predict.cuda_allocator.advice import EXPANDABLE_GUARDS, HIP_VARIABLE, VARIABLES
from memwall.predict.cuda_allocator.allocator_settings import (
    AllocatorSettings,
    format_settings,
    parse_settings,
    useless_options,
)
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for
from memwall.torch_internals.allocator import set_settings, settings_in_force
from memwall.torch_internals.allocator import snapshot as snapshot_of_allocator

_log = logging.getLogger(__name__)

_variables = Patches("names the plan's allocator setting to processes that are started")

# c10/cuda/CUDACachingAllocator.cpp, forceUncachedAllocator.
_UNCACHED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


def require_cuda_setting(setting: str) -> None:
    """Makes sure that torch uses this complete setting; to be called before the script builds its model.

    Raises:
        ApplyError: this torch does not take the setting, CUDA has started with another one, or the user set one.
    """
    profile, _ = profile_for(str(torch.__version__))
    try:
        parse_settings(setting, profile)
    except UsageError as error:
        raise ApplyError(f"the plan's allocator setting {setting} cannot be used with this torch: {error}") from None
    present = {name: os.environ[name] for name in _variables_read() if os.environ.get(name)}
    for name, value in present.items():
        if value != setting:
            raise ApplyError(
                f"the plan needs {VARIABLES[0]}={setting}, and the environment has {name}={value}; unset {name}, or "
                "set it to what the plan needs"
            )
    for finding in lint_variables(os.environ, profile):
        _log.warning("%s", finding)
    if torch.cuda.is_initialized():
        _require_in_force(setting, profile)
        found = effective_setting()
        if found != setting:
            raise ApplyError(
                f"the plan needs {VARIABLES[0]}={setting} before CUDA starts, and it has started with "
                f"'{found}'; set {' and '.join(VARIABLES)} for the whole process, or run the script with "
                "`memwall run --plan`"
            )
        return
    # All, for this process and those that it starts.
    for name in _variables_read():
        if os.environ.get(name) != setting:
            _variables.environment(name, setting)
    try:
        _make_effective(setting)
    except BaseException:
        restore_variables()
        raise
    _note("in effect", setting)
    note_permanent(
        "setting",
        "torch's CUDA allocator settings",
        why="makes the plan's allocator setting effective",
        reason="once CUDA runs there are segments made under it",
    )


def _variables_read() -> tuple[str, ...]:
    """Returns the names that this build of torch reads, the one that wins first."""
    return VARIABLES if torch.version.hip is None else (HIP_VARIABLE, *VARIABLES)


def restore_variables() -> None:
    """Gives the environment back as it was before `require_cuda_setting`; torch's allocator keeps its settings."""
    _variables.undo()


def effective_setting() -> str:
    """Returns the string that torch took last, from the environment or by its setter.

    Where this torch cannot tell, what the environment says, which is right unless the setter was called.
    """
    found = settings_in_force()
    if found is not None:
        return found
    return next((os.environ[name] for name in _variables_read() if os.environ.get(name)), "")


def lint_variables(environment: Mapping[str, str], profile: VersionProfile) -> tuple[str, ...]:
    """Returns what is doubtful or wrong about the allocator's variables, as sentences."""
    present = {name: environment[name] for name in VARIABLES if environment.get(name)}
    found = []
    uncached = next((name for name in _UNCACHED if environment.get(name)), None)
    if uncached is not None:
        found.append(f"{uncached} is set: nothing is cached, and every allocation asks the device; unset it to train")
    if len(present) == 1:
        (name,) = present
        (other,) = set(VARIABLES) - {name}
        found.append(
            f"only {name} is set: torch 2.9.1 ignores PYTORCH_ALLOC_CONF on CUDA, and later releases drop "
            f"PYTORCH_CUDA_ALLOC_CONF; set {other} to the same value"
        )
    over = environment.get(HIP_VARIABLE)
    if over and torch.version.hip is not None and any(value != over for value in present.values()):
        found.append(f"{HIP_VARIABLE}={over} is what torch for ROCm reads first; set the others to the same value")
    if len(set(present.values())) == 2:
        shown = ", ".join(f"{name}={value}" for name, value in present.items())
        found.append(f"{shown}: they differ, and which one counts depends on the release; set both to the same value")
    for value in dict.fromkeys(present.values()):
        try:
            settings = parse_settings(value, profile)
            found.extend(useless_options(settings))
            if settings.expandable_segments:
                found.append(f"expandable_segments:True is not for runs with {'; '.join(EXPANDABLE_GUARDS)}")
        except UsageError as error:
            found.append(str(error))
    return tuple(found)


def _require_in_force(setting: str, profile: VersionProfile) -> None:
    """Asks the allocator itself, which runs: a release may take the string and ignore an option (pytorch 183387)."""
    present = snapshot_of_allocator()["allocator_settings"]
    wanted = parse_settings(setting, profile)
    found = {
        "expandable_segments": (wanted.expandable_segments, present.get("expandable_segments")),
        "garbage_collection_threshold": (
            wanted.garbage_collection_threshold,
            present.get("garbage_collection_threshold"),
        ),
    }
    for option, (asked, has) in found.items():
        if has is not None and not math.isclose(asked, has, rel_tol=1e-6):
            raise ApplyError(
                f"the plan needs {option}:{asked}, and the allocator runs with {has} whatever its variables say; "
                f"torch {torch.__version__} has ignored the option, or read it too late"
            )


def _note(what: str, setting: str) -> None:
    """Logs every string that was sent, with the time, whatever the log's own format."""
    _log.info("%s: CUDA allocator settings %s: %s", datetime.now(UTC).isoformat(timespec="seconds"), what, setting)


def _make_effective(setting: str) -> None:
    """Has torch take the setting if it read the environment before; a refusal leaves the previous settings."""
    before = settings_in_force()
    if before == setting:
        return
    try:
        _note("sent", setting)
        set_settings(setting)
    except (ValueError, RuntimeError) as error:
        # A refused string has been half applied by now.
        previous = before or format_settings(AllocatorSettings())
        _note("refused, sent again those before", previous)
        set_settings(previous)
        raise ApplyError(f"torch refuses the allocator setting {setting}: {error}; '{before or ''}' stays") from error
    found = settings_in_force()
    if found is None:
        _log.warning("the CUDA allocator's settings cannot be read back with torch %s", torch.__version__)
    elif found != setting:
        raise ApplyError(
            f"torch took '{found}' where the plan needs {setting}; set {' and '.join(VARIABLES)} before it starts"
        )
