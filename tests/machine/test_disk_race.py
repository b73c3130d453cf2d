"""io_uring is used where it wins a race, and nowhere else; a start-up asks only where the answer comes at once."""

import time
from pathlib import Path

import pytest

from memwall.errors import StoreError
from memwall.machine import disk_race as race
from memwall.machine.disk_probe import DiskSpeed, probe_disk
from memwall.machine.disk_race import EngineRace, adopt_faster, probe_faster, race_engines, race_seconds
from memwall.store import engines
from memwall.store.backend import SystemBackend
from memwall.store.data_file import DataFile
from memwall.store.engines import EngineName, adopt, backend_of, engine_of
from memwall.store.journal import Journal
from memwall.store.scratch import ScratchFile
from memwall.store.uring import UringBackend

FAST = DiskSpeed(write_bytes_per_second=1e10, read_bytes_per_second=1e10)


class Slow(SystemBackend):
    """A call takes 5 ms longer."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        time.sleep(0.005)
        return super().pwrite(fd, data, offset)


def won_by(winner: EngineName) -> EngineRace:
    quick, slow = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (1.6, 1.7, 1.8, 1.9, 2.0, 2.1)
    system, uring = (quick, slow) if winner == "system calls" else (slow, quick)
    return EngineRace(turn_bytes=1, system_seconds=system, uring_seconds=uring)


@pytest.mark.parametrize(
    ("system_seconds", "uring_seconds", "faster"),
    [
        ((2.0, 2.1, 2.2, 2.3, 2.4, 2.5), (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), "io_uring"),
        ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (2.0, 2.1, 2.2, 2.3, 2.4, 2.5), "system calls"),
        ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), "system calls"),
        ((1.0, 1.2, 1.4, 1.6, 1.8, 2.0), (0.9, 1.0, 1.1, 1.2, 1.3, 1.4), "system calls"),  # the median alone is less
        ((1.0, 2.0, 2.0, 2.0, 2.0, 2.0), (1.0, 1.0, 1.0, 1.0, 1.0, 9.0), "system calls"),  # a turn that was disturbed
    ],
)
def test_faster_means_by_more_than_the_turns_of_one_differ(
    system_seconds: tuple[float, ...], uring_seconds: tuple[float, ...], faster: str
) -> None:
    assert EngineRace(turn_bytes=1, system_seconds=system_seconds, uring_seconds=uring_seconds).faster == faster


def test_a_race_finds_the_slower_one_on_either_side(tmp_path: Path) -> None:
    assert race_engines(tmp_path, system=Slow(), uring=SystemBackend()).faster == "io_uring"
    found = race_engines(tmp_path, system=SystemBackend(), uring=Slow())
    assert found.faster == "system calls"
    assert len(found.system_seconds) == len(found.uring_seconds) == 6
    assert found.turn_bytes == 16 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_race_checks_the_directory_first(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        race_engines(tmp_path / "none", system=SystemBackend(), uring=SystemBackend())


def test_what_is_opened_on_a_disk_is_moved_by_its_engine(tmp_path: Path, engine: EngineName) -> None:
    kind = type(backend_of(tmp_path))
    assert kind is {"system calls": SystemBackend, "io_uring": UringBackend}[engine]
    assert engine_of(tmp_path) == probe_disk(tmp_path, 4 << 20).engine == engine
    with ScratchFile(tmp_path) as scratch, Journal(tmp_path / "run") as journal:
        assert {type(scratch._backend), type(journal._backend), type(journal.data._backend)} == {kind}
    data = DataFile(str(tmp_path / "data"))
    assert type(data._backend) is kind
    data.close()


def test_other_disks_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_adopted", {-1: object()})
    assert engine_of(tmp_path) == engine_of(tmp_path / "none") == "system calls"


@pytest.mark.parametrize("engine", ["io_uring"], indirect=True)
@pytest.mark.parametrize("winner", ["system calls", "io_uring"])
def test_a_fast_disk_gets_the_winner(
    winner: EngineName, engine: EngineName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt(tmp_path, "system calls")
    monkeypatch.setattr(race, "race_engines", lambda directory, *, uring: won_by(winner))
    assert adopt_faster(tmp_path, FAST) == engine_of(tmp_path) == winner


@pytest.mark.parametrize("engine", ["io_uring"], indirect=True)
def test_a_speed_is_that_of_the_engine_that_won(
    engine: EngineName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt(tmp_path, "system calls")
    monkeypatch.setattr(race, "race_engines", lambda directory, *, uring: won_by("io_uring"))
    monkeypatch.setattr(race, "_MAX_SECONDS", 1e6)
    assert probe_faster(tmp_path, 4 << 20).engine == "io_uring"


def test_a_disk_that_would_take_long_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(race, "race_engines")
    slow = DiskSpeed(write_bytes_per_second=2e9, read_bytes_per_second=2e9)
    assert race_seconds(slow) == pytest.approx(12 * 32 * (1 << 20) / 2e9)
    assert adopt_faster(tmp_path, slow) == "system calls"


def test_where_io_uring_is_refused_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> UringBackend:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(race, "UringBackend", refuse)
    monkeypatch.delattr(race, "race_engines")
    assert adopt_faster(tmp_path, FAST) == "system calls"
