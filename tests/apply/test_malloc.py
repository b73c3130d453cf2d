"""Setting a malloc policy in a running process, and taking it back; each case in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memwall.predict.malloc import environment, is_glibc, policy_named, unavailable_reason

pytestmark = pytest.mark.skipif(not is_glibc(), reason=f"no glibc malloc: {unavailable_reason()}")

_PRELUDE = """
import ctypes
from pathlib import Path
from memwall.apply.malloc import MallocHandler
from memwall.errors import ApplyError
from memwall.predict.malloc import policy_named
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
MIB = 1 << 20
def has_own_mapping(nbytes):
    address = libc.malloc(nbytes)
    word = ctypes.c_size_t.from_address(address - 8).value
    libc.free(address)
    return bool(word & 2)
def resident_mib():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) >> 10
handler = MallocHandler()
"""


def output_of(script: str, **variables: str) -> list[str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + script],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | {"PYTHONPATH": path} | variables,
    )
    return done.stdout.splitlines()


def test_policies_decide_which_blocks_get_mappings_of_their_own_and_undo_ends_it() -> None:
    assert output_of("""
handler.apply(policy_named("heap"))
print(has_own_mapping(2 * MIB), has_own_mapping(200 * MIB), handler.policy.name)
handler.apply(policy_named("mmap"))
print(has_own_mapping(MIB // 2), has_own_mapping(2 * MIB), handler.policy.name)
handler.undo()
print(has_own_mapping(2 * MIB), has_own_mapping(64 * MIB), handler.policy)
handler.apply_tight()
print(handler.policy.name)
handler.apply(policy_named("default"))
print(handler.policy)
""") == ["False False heap", "False True mmap", "False True None", "mmap", "None"]


def test_a_trim_returns_free_pages_in_the_middle_of_the_heap() -> None:
    before, after = map(
        int,
        output_of("""
handler.apply(policy_named("heap"))
blocks = [libc.malloc(MIB) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, MIB)
for block in blocks[:-1]:
    libc.free(block)
print(resident_mib())
handler.trim()
print(resident_mib())
"""),
    )
    assert before - after == pytest.approx(199, abs=3)


def test_a_policy_for_the_start_of_a_process_is_refused_later() -> None:
    assert output_of("""
try:
    handler.apply(policy_named("compact"))
except ApplyError as error:
    print(error)
print(handler.policy, has_own_mapping(200 * MIB))
""") == [
        "cannot set the malloc policy 'compact' in a running process: start it with "
        "GLIBC_TUNABLES=glibc.malloc.tcache_count=0, or with `memwall run`",
        "None True",
    ]


def test_a_process_started_for_it_takes_the_policy_and_makes_its_nursery_once() -> None:
    found = output_of(
        """
from memwall.predict.malloc import candidate_policies
print("compact" in [policy.name for policy in candidate_policies()])
handler.apply(policy_named("compact"))
# A small block after a large gap: it lies in the nursery, below the gap.
gap, fence = libc.malloc(8 * MIB), libc.malloc(24)
libc.free(gap)
print(handler.policy.name, all(not gap <= libc.malloc(200) < gap + 8 * MIB for _ in range(1000)))
""",
        **environment(policy_named("compact")),
    )
    assert found == ["True", "compact True"]
