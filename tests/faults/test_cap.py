"""Under a cap that the kernel enforces: a script is killed plain, and finishes under memwall with the same weights."""

import sys
from pathlib import Path

import pytest
from cap import run_case, run_reference
from cgroup import CapUnavailable, memory_cap, own_group

pytestmark = pytest.mark.cgroup


@pytest.fixture(autouse=True)
def _needs_cgroup() -> None:
    try:
        with memory_cap(1 << 30):
            pass
    except CapUnavailable as reason:
        pytest.skip(f"no memory cap can be enforced here: {reason}")


def test_a_command_above_the_cap_is_killed_and_counted() -> None:
    with memory_cap(64 << 20) as cap:
        below = cap.run([sys.executable, "-S", "-c", "bytearray(8 << 20)"], timeout_s=30)
        assert (below.status, below.num_oom_kills) == (0, 0)
        assert 8 << 20 < below.peak_bytes < 64 << 20
        above = cap.run([sys.executable, "-S", "-c", "bytearray(128 << 20)"], timeout_s=30)
    assert above.is_oom_killed
    assert above.peak_bytes <= 64 << 20


def test_no_group_and_no_process_is_left_behind() -> None:
    before = {path.name for path in own_group()[0].iterdir()}
    with memory_cap(64 << 20) as cap:
        # The shell ends at once, its child stays in the group.
        cap.run(["sh", "-c", "sleep 100 > /dev/null 2>&1 &"], timeout_s=30)
        (left,) = cap.processes()
    status = Path(f"/proc/{left}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()  # ended, though its new parent may not have looked
    assert {path.name for path in own_group()[0].iterdir()} == before


@pytest.mark.slow(seconds=20)
@pytest.mark.timeout(300)
def test_memwall_finishes_where_the_plain_script_is_killed(tmp_path: Path) -> None:
    reference = run_reference(tmp_path, num_steps=2)
    case = run_case(tmp_path, num_steps=2, cap_bytes=reference.peak_bytes * 60 // 100)
    assert case.plain.is_oom_killed
    assert case.memwall.status == 0, case.memwall.errors
    assert case.memwall.output.count("loss") == 2
    assert case.memwall.num_oom_kills == 0
    assert case.memwall.peak_bytes < case.cap_bytes
    assert case.report["within_budget"]
    assert case.sha256 == reference.sha256
