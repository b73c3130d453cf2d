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
from memwall.observe import doctor_deepspeed as subject
from memwall.observe.doctor_deepspeed import _has_header, deepspeed_parts
from memwall.units import format_bytes

BUILDING = ("ZeRO 1, 2 and 3", "optimizer on the CPU", "NVMe")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that DeepSpeed takes, and no operator built; its folders."""
    for name in ("deepspeed/__init__.py", "include/Python.h", "include/libaio.h", "ops"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    find_spec: Callable[..., Any] = importlib.util.find_spec
    specs = {
        "deepspeed": ModuleSpec("deepspeed", None, origin=str(tmp_path / "deepspeed" / "__init__.py")),
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: specs.get(name) or find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/bin/{name}")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *_, **__: str(tmp_path / name))
    monkeypatch.setattr(subject, "_has_header", lambda name, **_: (tmp_path / "include" / name).is_file())
    monkeypatch.setattr(subject, "_may_lock_all", lambda: False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    for variable in ("CXX", "CC", "CFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "gcc -pthread" if name == "CC" else None)
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
        ("gcc", "a C compiler: gcc (apt install gcc)", ("NVMe",)),
        ("Python.h", "(apt install python3-dev)", BUILDING),
        ("libaio.h", "the header libaio.h (apt install libaio-dev,", ("NVMe",)),
        ("libaio", "the library libaio (apt install libaio-dev,", ("NVMe",)),
        ("gloo", "a torch with the gloo backend", ("ZeRO 1, 2 and 3",)),
        ("deepspeed", "pip install 'torch-memwall[deepspeed]'", (*BUILDING, "activation offload")),
    ],
)
def test_what_is_missing_is_named_where_it_is_needed(
    lose: str, words: str, parts: tuple[str, ...], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lose in ("Python.h", "libaio.h"):
        (machine / "include" / lose).unlink()
    elif lose == "deepspeed":
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


def test_an_operator_that_was_installed_with_deepspeed_needs_nothing_to_build_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    _make(machine / "deepspeed/ops/comm/deepspeed_shm_comm_op.cpython.so")
    found = lacking()
    assert found["ZeRO 1, 2 and 3"] == ()
    assert found["NVMe"]
    assert found["optimizer on the CPU"]


def test_one_that_was_used_before_needs_all_that_deepspeed_asks_for_before_each_load(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("deepspeed_shm_comm", "cpu_adam", "pin_memory", "async_io"):
        _make(machine / f"extensions/{name}/{name}.so")
    (machine / "include" / "Python.h").unlink()
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    ninja = "ninja (pip install ninja, and its folder in PATH)"
    found = lacking()
    assert found["ZeRO 1, 2 and 3"] == found["optimizer on the CPU"] == (ninja,)
    assert found["NVMe"] == (ninja, "a C compiler: gcc (apt install gcc)")


@pytest.mark.parametrize("compiler", ["ccache g++-12", "g++-12 -m64"])
def test_a_compiler_with_options_is_the_program_that_is_named_first(
    compiler: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/bin/{name}" if " " not in name else None)
    assert lacking()["ZeRO 1, 2 and 3"] == ()


@pytest.fixture
def own_libaio(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with libaio in a machine that has it nowhere else."""
    header, is_file = "libaio.h", Path.is_file
    monkeypatch.setattr(subject, "_has_header", _has_header)
    monkeypatch.setattr(Path, "is_file", lambda path: is_file(path) and path != Path("/usr/include", header))
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    _make(machine / "own" / header)
    _make(machine / "own" / "libaio.so")
    assert _names_libaio(lacking()) == ["header", "library"]
    return machine / "own"


def test_libaio_is_found_where_variables_of_the_compiler_say(own_libaio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPATH", str(own_libaio))
    assert _names_libaio(lacking()) == ["library"]
    monkeypatch.setenv("LIBRARY_PATH", str(own_libaio))
    assert lacking()["NVMe"] == ()


@pytest.mark.parametrize("space", ["", " "])
def test_flags_lead_to_libaio_once_async_io_is_compiled_and_not_before(
    space: str, machine: Path, own_libaio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's check before each load takes them, torch's `load`, which compiles what is not there yet, does not."""
    monkeypatch.setenv("CFLAGS", f"-O2 -I{space}{own_libaio}")
    monkeypatch.setenv("LDFLAGS", f"-L{space}{own_libaio}")
    assert _names_libaio(lacking()) == ["header", "library"]
    _make(machine / "extensions/async_io/async_io.so")
    assert lacking()["NVMe"] == ()


@pytest.mark.parametrize("memlock_bytes", [8 << 20, 64 << 10])
def test_a_limit_of_locked_memory_is_said(memlock_bytes: int, machine: Path) -> None:
    """Its buffers are as large as a configuration has them, hundreds of megabytes by default."""
    (missing,) = lacking(memlock_bytes)["NVMe"]
    assert f"ulimit -l allows {format_bytes(memlock_bytes)} (ulimit -l unlimited, or memlock in" in missing


def _names_libaio(found: dict[str, tuple[str, ...]]) -> list[str]:
    return [line.split()[1] for line in found["NVMe"] if "libaio" in line]


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_a_process_that_may_lock_all_has_no_limit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_may_lock_all", lambda: True)
    assert lacking(64 << 10)["NVMe"] == ()


def test_the_command_shows_it_only_where_it_is_asked_for(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject, "_may_lock_all", lambda: True)
    assert main(["doctor", "--disk", str(machine), "--deepspeed"]) == 0
    shown = capsys.readouterr().out
    assert "DeepSpeed, NVMe" in shown
    assert "available (ZeRO 3 only)" in shown
    assert main(["doctor", "--disk", str(machine), "--deepspeed", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["deepspeed"]
    assert [part["name"] for part in parts] == list(lacking())
    assert main(["doctor", "--disk", str(machine)]) == 0
    assert "DeepSpeed, " not in capsys.readouterr().out
