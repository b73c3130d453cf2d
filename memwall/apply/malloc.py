"""Sets a malloc policy in this process, trims where a plan says so, and takes the policy back."""

import ctypes
import logging

from memwall.errors import ApplyError
from memwall.predict.malloc import (
    MallocPolicy,
    missing_environment,
    nursery_layout,
    policy_named,
    restored_policy,
    settings_of,
    unavailable_reason,
)
from memwall.trace.meter import process_bytes

__all__ = ["MallocHandler"]

_log = logging.getLogger(__name__)


class MallocHandler:
    """Holds at most one policy.

    `undo` sets the values that glibc's own rule ends at. What it cannot restore: once anything was set, glibc no longer
    adapts its thresholds; and the fences of a nursery, under 1 % of its bytes, stay allocated.
    """

    def __init__(self) -> None:
        self.policy: MallocPolicy | None = None
        """The policy in force; None while glibc's own is."""
        self._has_nursery = False
        self.num_trims = 0

    def apply(self, policy: MallocPolicy) -> None:
        """Sets a policy; it replaces the one in force.

        Raises:
            ApplyError: this process does not use glibc's malloc, was not started as the policy needs it, or glibc
                refuses a value; then glibc's own values are in force.
        """
        self.undo()
        if policy.is_default:
            return
        reason = unavailable_reason()
        if reason:
            raise ApplyError(f"cannot set the malloc policy '{policy.name}': {reason}")
        missing = missing_environment(policy)
        if missing:
            variables = " ".join(f"{name}={value}" for name, value in missing.items())
            raise ApplyError(
                f"cannot set the malloc policy '{policy.name}' in a running process: start it with {variables}, "
                "or with `memwall run`"
            )
        libc = ctypes.CDLL(None)
        for parameter, value in settings_of(policy):
            if libc.mallopt(parameter, value) != 1:
                _restore()
                raise ApplyError(
                    f"cannot set the malloc policy '{policy.name}': glibc refused mallopt({parameter}, {value})"
                )
        if policy.nursery_bytes and not self._has_nursery:
            _make_nursery(policy)
            self._has_nursery = True
        self.policy = policy
        _log.debug("malloc policy '%s' is set", policy.name)

    def apply_tight(self) -> None:
        """Sets the policy with the least memory; nothing where malloc is not glibc's."""
        if not unavailable_reason():
            self.apply(policy_named("mmap"))

    def trim(self) -> None:
        """Returns the heap's free pages to the system; nothing where malloc is not glibc's."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def make_room(self, ceiling_bytes: int) -> None:
        """Trims if the process holds more than this; about 10 us if not."""
        if process_bytes() > ceiling_bytes:
            self.num_trims += 1
            self.trim()

    def undo(self) -> None:
        """Takes the policy back, as far as glibc allows."""
        if self.policy is not None:
            _restore()
            self.policy = None


def _restore() -> None:
    for parameter, value in settings_of(restored_policy()):
        ctypes.CDLL(None).mallopt(parameter, value)


def _make_nursery(policy: MallocPolicy) -> None:
    """Leaves free small blocks, fenced so that they never merge into one large one."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    num_blocks, block_bytes, fence_bytes = nursery_layout(policy)
    blocks = []
    for _ in range(num_blocks):
        blocks.append(libc.malloc(block_bytes))
        libc.malloc(fence_bytes)
    for block in blocks:
        libc.free(block)
