"""Disks that offloaded bytes cannot go to: one message that says what to do, and the right exit status."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

Refused = Callable[..., str]
pytestmark = pytest.mark.usefixtures("folder")

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
WITH_SHM = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")


@contextmanager
def mounted(folder: Path, num_bytes: int, options: str) -> Iterator[Path]:
    """A small filesystem of its own: root may write whatever permission bits say."""
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    with image.open("r+b") as file:
        file.truncate(num_bytes)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False)
    done = subprocess.run(["mount", "-o", options, str(image), str(mount)], capture_output=True, check=False)
    if made.returncode or done.returncode:
        pytest.skip("cannot make and mount a loop filesystem here (needs root and a loop device)")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_missing(refused: Refused) -> None:
    assert refused("run", "--budget", "8GiB", "--disk", "/no/disk", PLAIN) == (
        "--disk /no/disk: this directory does not exist; create it (mkdir -p /no/disk) or give another one"
    )


def test_a_disk_that_is_read_only(refused: Refused, folder: Path) -> None:
    with mounted(folder, 2 << 20, "loop,ro") as mount:
        assert refused("run", "--budget", "8GiB", "--disk", mount, PLAIN) == (
            f"--disk {mount}: its filesystem is mounted read-only; remount it or give another directory"
        )


def test_a_disk_that_is_full(refused: Refused, folder: Path) -> None:
    with mounted(folder, 8 << 20, "loop") as mount:
        with (mount / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        assert refused("run", "--budget", "8GiB", "--disk", mount, PLAIN) == (
            f"--disk {mount}: 64.0 MiB are needed there, 0 B are free; "
            "free 64.0 MiB or give a directory on a larger disk"
        )


@pytest.fixture
def large(folder: Path) -> Path:
    """A script whose step saves 96 MiB and which drops every error."""
    script = folder / "large.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(256, 256), *(torch.nn.Sigmoid() for _ in range(6)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "try:\n"
        "    model(torch.ones(16384, 256)).sum().backward()\n"
        "    optimizer.step()\n"
        "except Exception:\n"
        "    pass\n"
    )
    return script


def test_a_disk_limit_that_the_step_exceeds(refused: Refused, folder: Path, large: Path) -> None:
    message = refused("run", "--budget", "8GiB", "--disk", f"{folder}:64MiB", "--json", large)
    assert re.search(rf"more of disk are needed in {re.escape(str(folder))}, but of its limit of 64\.0 MiB ", message)
    assert message.endswith(f"; raise the limit with --disk {folder}:SIZE")


@WITH_SHM
def test_a_disk_in_ram(refused: Refused) -> None:
    assert refused("run", "--budget", "8GiB", "--disk", "/dev/shm", PLAIN) == (
        "--disk /dev/shm: this is a RAM disk (tmpfs), so moving bytes there would free no memory; "
        "give a directory on a real disk"
    )


@WITH_SHM
@WITHOUT_CUDA
def test_no_temporary_space(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    assert refused("run", "--budget", "8GiB", PLAIN) == (
        "offloading needs a directory on a disk, and the default one is unsuitable (/dev/shm: this is a RAM disk "
        "(tmpfs), so moving bytes there would free no memory; give a directory on a real disk); "
        "name one with --disk DIR"
    )
