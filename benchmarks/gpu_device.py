"""Says which device the gpu benchmarks run on: a real one, or the phantom one, of which every figure is simulated."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from memwall.machine.hardware import Hardware, hardware_named, hardware_of_device

__all__ = [
    "device_name",
    "device_name_by_child",
    "hardware_here",
    "has_device",
    "is_phantom",
    "slug_of",
    "tag",
    "used_bytes",
]


def is_phantom() -> bool:
    """Returns whether this process runs under `phantom/run`."""
    return "PHANTOM_LIBRARY" in os.environ


def tag() -> str:
    """Returns how figures of this device were obtained."""
    return "simulated" if is_phantom() else "gpu-measured"


def has_device(program: str) -> bool:
    """Returns whether there is a CUDA device; says what to do where there is none."""
    if torch.cuda.is_available():
        return True
    print(
        f"{program}: needs a CUDA device, and torch {torch.__version__} finds none here; nothing was measured, "
        "nothing written. Run it on a GPU machine, with torch's CUDA build.",
        file=sys.stderr,
    )
    return False


def device_name() -> str:
    """Returns CUDA's name of the device; that of a phantom says so."""
    name = torch.cuda.get_device_name()
    return f"phantom {name}" if is_phantom() else name


def device_name_by_child() -> str:
    """Returns the same from a process of its own: a context of this one would count as somebody else's in others."""
    command = [sys.executable, "-c", "from gpu_device import device_name; print(device_name())"]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def hardware_here() -> Hardware:
    """Returns the entry of hardware.toml for this device.

    Raises:
        UsageError: there is none.
    """
    if is_phantom():
        return hardware_named(os.environ.get("PHANTOM_CARD", "h100-80gb"))
    return hardware_of_device(torch.cuda.get_device_name())


def slug_of(name: str) -> str:
    """Returns the name of a device's folder of results."""
    return name.lower().replace(" ", "-")


def used_bytes() -> int:
    """Returns what the device holds without us, by nvidia-smi; a phantom is each process's alone."""
    if is_phantom():
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]) << 20
