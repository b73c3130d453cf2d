"""What DeepSpeed is said to be able to do here: each thing that it lacks is named with the parts that need it."""

import ctypes.util
import importlib.util
import json
import shutil
import sysconfig
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall.cli.app import main
from memwall.observe import deepspeed_parts as subject
from memwall.observe.deepspeed_parts import deepspeed_parts

BUILDING = ("optimizer on the CPU", "NVMe", "shared-memory collectives")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that DeepSpeed takes, and no operator built; its folders."""
    for name in ("deepspeed/__init__.py", "include/Python.h", "include/libaio.h", "ops"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    find_spec: Callable[..., Any] = importlib.util.find_spec
    specs = {
        "deepspeed": ModuleSpec("deepspeed", None, origin=str(tmp_path / "deepspeed" / "__init__.py")),
        "cpuinfo": ModuleSpec("cpuinfo", None),
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: specs.get(name) or find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/bin/{name}")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *_, **__: str(tmp_path / name))
    monkeypatch.setattr(subject, "_has_header", lambda name: (tmp_path / "include" / name).is_file())
    monkeypatch.setattr(subject, "_may_lock_all", lambda: False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: True)
    return tmp_path


def lacking(memlock_bytes: int | None = None) -> dict[str, tuple[str, ...]]:
    return {part.name: part.missing for part in deepspeed_parts(memlock_bytes)}


def test_with_everything_there_only_what_needs_a_device_is_missing(machine: Path) -> None:
    found = lacking()
    assert [name for name, missing in found.items() if missing] == ["activation offload"]
    assert {part.name: part.note for part in deepspeed_parts(None)}["NVMe"] == "ZeRO 3 only"


@pytest.mark.parametrize(
    ("lose", "words", "parts"),
    [
        ("c++", "a C++ compiler: c++ (apt install g++)", BUILDING),
        ("ninja", "ninja (pip install ninja", BUILDING),
        ("cpuinfo", "py-cpuinfo (pip install py-cpuinfo)", BUILDING),
        ("Python.h", "(apt install python3-dev)", BUILDING),
        ("libaio.h", "the header libaio.h (apt install libaio-dev)", ("NVMe",)),
        ("libaio", "the library libaio (apt install libaio-dev)", ("NVMe",)),
        ("gloo", "a torch with the gloo backend", ("ZeRO 1, 2 and 3",)),
        ("deepspeed", "pip install 'torch-memwall[deepspeed]'", ("ZeRO 1, 2 and 3", *BUILDING, "activation offload")),
    ],
)
def test_what_is_missing_is_named_where_it_is_needed(
    lose: str, words: str, parts: tuple[str, ...], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lose in ("Python.h", "libaio.h"):
        (machine / "include" / lose).unlink()
    elif lose in ("cpuinfo", "deepspeed"):
        there = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == lose else there(name))
    elif lose == "libaio":
        monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    elif lose == "gloo":
        monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    else:
        monkeypatch.setattr(shutil, "which", lambda name, *_: None if name == lose else f"/bin/{name}")
    named = tuple(name for name, missing in lacking().items() if any(words in line for line in missing))
    assert named == parts


def test_an_operator_that_is_built_already_needs_nothing_to_build_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN one that was used before, and one that was installed with DeepSpeed."""
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    for built in ("extensions/cpu_adam/cpu_adam.so", "deepspeed/ops/comm/deepspeed_shm_comm_op.cpython.so"):
        (machine / built).parent.mkdir(parents=True)
        (machine / built).touch()
    found = lacking()
    assert found["optimizer on the CPU"] == found["shared-memory collectives"] == ()
    assert found["NVMe"]


@pytest.mark.parametrize(("memlock_bytes", "is_enough"), [(None, True), (8 << 20, True), (64 << 10, False)])
def test_too_little_locked_memory_is_said(memlock_bytes: int | None, is_enough: bool, machine: Path) -> None:
    missing = lacking(memlock_bytes)["NVMe"]
    assert missing == (() if is_enough else ("locked memory: ulimit -l allows 64.0 KiB",))


def test_a_process_that_may_lock_all_has_no_limit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_may_lock_all", lambda: True)
    assert lacking(64 << 10)["NVMe"] == ()


def test_the_command_shows_it_only_where_it_is_asked_for(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", str(machine), "--deepspeed"]) == 0
    shown = capsys.readouterr().out
    assert "DeepSpeed, NVMe" in shown
    assert "available (ZeRO 3 only)" in shown
    assert main(["doctor", "--disk", str(machine), "--deepspeed", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["deepspeed"]
    assert [part["name"] for part in parts] == list(lacking())
    assert main(["doctor", "--disk", str(machine)]) == 0
    assert "DeepSpeed, " not in capsys.readouterr().out
