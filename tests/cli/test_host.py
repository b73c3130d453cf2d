"""`--host`: what may be taken of host memory below a device, by a run there and by a plan of what it recorded."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from memwall.cli.app import main
from memwall.errors import UsageError
from memwall.machine.disk_probe import probe_disk
from memwall.machine.tiers import Machine, Tier
from memwall.planning import search
from memwall.session import session
from memwall.trace.file import save_trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

MIB, GIB = 1 << 20, 1 << 30


class Told:
    """Takes the place of what a command hands its options to, and ends it there."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __call__(self, *_: Any, **options: Any) -> None:
        self.options = options
        raise UsageError("told")


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_run_takes_no_more_of_it(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "Session", told)
    (tmp_path / "train.py").touch()
    common = ("run", "--budget", "1GiB", "--disk", f"{tmp_path}:3GiB", "--json")
    assert main([*common, "--host", "2GiB", str(tmp_path / "train.py")]) == 2
    assert (told.options["host_capacity_bytes"], told.options["disk_capacity_bytes"]) == (2 * GIB, 3 * GIB)
    main([*common, str(tmp_path / "train.py")])
    assert told.options["host_capacity_bytes"] is None


_FACTORY = """
import torch
from memwall import Workload

def workload():
    return Workload(
        model=lambda: torch.nn.Linear(8, 8),
        batch=lambda: torch.ones(2, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
"""


def test_a_plan_for_a_device_knows_the_disk_below_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers: list[Tier] = []

    def planned(trace: Any, **_: Any) -> None:
        tiers.extend(trace.machine.tiers)
        raise UsageError("told")

    monkeypatch.setattr(search, "plan", planned)
    (tmp_path / "small.py").write_text(_FACTORY)
    asked = ("plan", f"{tmp_path / 'small.py'}:workload", "--device", "l4", "--budget", "1GiB")
    disk = ("--disk", f"{tmp_path}:128MiB")
    assert main([*asked, *disk]) == 2
    assert "give --host SIZE as well" in capsys.readouterr().err
    assert main([*asked, *disk, "--host", "64MiB"]) == 2
    assert [(tier.name, tier.free_bytes) for tier in tiers] == [("host", 64 * MIB), ("disk", 128 * MIB)]


def test_ranks_of_one_host_share_the_disk(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(session, "Session", told)
    (tmp_path / "train.py").touch()
    main(["run", "--budget", "1GiB", "--disk", f"{tmp_path}:2GiB", str(tmp_path / "train.py")])
    assert told.options["disk_capacity_bytes"] == GIB // 2


def test_ranks_of_one_host_share_the_room_of_a_disk_without_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10 * GIB, free=8 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert probe_disk(tmp_path, MIB).free_bytes == 8 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert probe_disk(tmp_path, MIB).free_bytes == 2 * GIB


@pytest.mark.parametrize(("device", "expected"), [("cuda", 2 * GIB), ("cpu", 3 * GIB)])
def test_a_plan_of_a_trace_that_was_recorded_on_cuda_takes_no_more_of_it(
    device: str, expected: int, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = record(
        Workload(
            model=torch.nn.Linear(8, 8),
            batch=torch.ones(4, 8),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=torch.optim.AdamW,
        )
    )
    disk = Tier(
        name="disk",
        directory=str(tmp_path),
        write_bytes_per_second=1e9,
        read_bytes_per_second=1e9,
        free_bytes=8 * GIB,
    )
    trace = msgspec.structs.replace(trace, device=device, machine=Machine(tiers=(disk,)))
    save_trace(trace, tmp_path / "t.trace")
    monkeypatch.setattr(search, "plan", told)
    command = ("plan", str(tmp_path / "t.trace"), "--budget", "1GiB")
    assert main([*command, "--host", "2GiB", "--disk", f"{tmp_path}:3GiB"]) == 2
    assert told.options["tier_capacity_bytes"] == expected
