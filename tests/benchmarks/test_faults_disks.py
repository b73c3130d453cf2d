"""The small disk of benchmarks/faults.py: blocks that are cut off fail as those of a broken device, and none stays."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CODE = """
import errno, os, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from faults_small_disk import small_disk

with small_disk(Path(sys.argv[2]), 16 << 20) as disk:
    paths = [disk.mount / "run" / name for name in ("one", "other")]
    for path in paths:
        with path.open("wb") as file:
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
    kept, lost = sorted(paths, key=lambda path: disk.blocks_of(path)[0].start)
    whole = kept.read_bytes()
    disk.cut(disk.blocks_of(lost)[0].start)
    assert disk.rescue(Path(sys.argv[2]) / "copy") is False
    copies = [(Path(sys.argv[2]) / "copy" / name).read_bytes() for name in (kept.name, lost.name)]
    assert copies == [whole, bytes(1 << 20)]
    try:
        with lost.open("r+b", buffering=0) as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
    except OSError as error:
        assert error.errno == errno.EIO
    else:
        raise AssertionError("written to blocks that are not there")
    print(disk.loop, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("is_killed", [False, True], ids=["left", "killed"])
def test_blocks_that_are_cut_off_fail_and_nothing_of_the_disk_stays(tmp_path: Path, *, is_killed: bool) -> None:
    command = [sys.executable, "-c", CODE, str(BENCHMARKS), str(tmp_path)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    loop = process.stdout.readline().strip()
    if is_killed:
        process.kill()
    _, said = process.communicate()
    if "losetup" in said or "mount" in said or "mkfs" in said:
        pytest.skip(f"no file system can be made and mounted here: {said.splitlines()[-1]}")
    assert loop.startswith("/dev/loop"), said
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert not (tmp_path / "disk.img").exists()
    deadline = time.monotonic() + 10
    while behind(loop).startswith(str(tmp_path)):
        assert time.monotonic() < deadline, f"{loop} still has {behind(loop)}"
        time.sleep(0.05)


def behind(loop: str) -> str:
    """The file behind a loop device; "" where there is none."""
    path = Path("/sys/block") / loop.removeprefix("/dev/") / "loop" / "backing_file"
    return path.read_text() if path.exists() else ""
