"""Fresh processes that prepare ahead, the time that parts share, and the programs that are recorded: without a GPU."""

import json
from pathlib import Path
from typing import Any

import allocator_programs
import gpu_child
import gpu_histories
import gpu_record_case
import pytest
import torch
from allocator_record import first_difference, load_record, load_records, save_record
from gpu_child import Budget, CaseFailed, CaseHung, Child, prepared
from torch.torch_version import TorchVersion

GOLDEN = Path(__file__).parents[1] / "golden" / "stub-torch-2.13.0"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child that says what it was told, fails or hangs, as its argument has it."""
    path = tmp_path / "child.py"
    path.write_text(
        "import json, os, sys, time\n"
        "order = json.loads(sys.stdin.readline())\n"
        "if sys.argv[1] == 'fails': raise SystemExit('no such device')\n"
        "if sys.argv[1] == 'hangs': time.sleep(600)\n"
        "settings = [os.environ[name] for name in ('PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF')]\n"
        "print(json.dumps({'name': sys.argv[1], 'settings': settings, **order}))\n"
    )
    monkeypatch.setattr(gpu_child, "__file__", str(path))
    return path.name


def test_a_child_is_told_what_to_do_and_answers(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert Child((script, "one")).answer({"used_bytes": 5}, 60) == {
        "name": "one",
        "settings": ["", ""],
        "used_bytes": 5,
    }
    assert Child((script, "two"), "max_split_size_mb:32").answer({}, 60)["settings"] == ["max_split_size_mb:32"] * 2


def test_a_child_that_fails_says_what_it_said(script: str) -> None:
    with pytest.raises(CaseFailed, match=r"child\.py fails ended with status 1:\nno such device"):
        Child((script, "fails")).answer({}, 60)


def test_a_child_that_hangs_is_ended(script: str) -> None:
    child = Child((script, "hangs"))
    with pytest.raises(CaseHung, match="had no answer after 0 s and was ended"):
        child.answer({}, 0.5)
    assert child._process.returncode == -9


def test_children_start_ahead_and_those_that_nobody_asks_for_are_ended(script: str) -> None:
    started = []

    def start(name: str) -> Child:
        started.append(Child((script, name)))
        return started[-1]

    children = prepared("abcdef", start, width=2)
    name, child = next(children)
    assert name == "a"
    assert len(started) == 3
    assert all(other._process.poll() is None for other in started)
    assert child.answer({}, 60)["name"] == "a"
    children.close()
    assert all(other._process.poll() is not None for other in started)


def test_what_a_part_leaves_over_goes_to_the_parts_after_it() -> None:
    now = [0.0]
    budget = Budget(100, {"first": 0.2, "second": 0.2, "third": 0.6}, lambda: now[0])
    budget.begin("first")
    assert budget.seconds == pytest.approx(20)
    now[0] = 4.0
    budget.begin("second")
    assert budget.seconds == pytest.approx(96 / 4)
    now[0] = 60.0  # one that overran
    assert budget.seconds == 0
    budget.begin("third")
    assert budget.seconds == pytest.approx(40)


# -- recorded programs -------------------------------------------------------------------------------------------------


class Names:
    """Marks that are only written down."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def phase(self, name: str) -> None:
        self.found.append(name)

    def empty_cache(self) -> None:
        self.found.append("empty_cache")

    def limit(self, num_bytes: int) -> None:
        self.found.append(f"limit {num_bytes}")


@pytest.mark.usefixtures("one_thread")
def test_training_programs_run_and_mark_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Names()
    for program, workload, sizes in (
        ("static-mlp", "MLP_BATCHES", (4, 4)),
        ("variable-transformer", "SENTENCE_LENGTHS", (5, 9)),
    ):
        monkeypatch.setattr(allocator_programs, workload, sizes)
        allocator_programs.PROGRAMS[program](marks, "cpu")
    assert marks.found == ["step 0", "empty_cache", "step 1"] * 2


class History:
    """Stands in for torch's history: what a record over the stub holds, with a snapshot for each mark."""

    def __init__(self, program: str) -> None:
        self.record = load_records(GOLDEN)[program]
        self.snapshots = 0
        self.options: dict[str, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        self.snapshots += 1
        marks = [position for position, _ in self.record.marks]
        entries = []
        for number, (action, address, size, stream, pool) in enumerate(self.record.events):
            entries += [{"action": "snapshot", "addr": 0, "size": 0, "stream": 0}] * marks.count(number)
            place = {"device_free" if action == "oom" else "addr": address}
            entries.append({"action": action, "size": size, "stream": stream, "pool_id": (0, 9 * pool), **place})
        return {"device_traces": [entries]}


def test_a_recording_keeps_what_the_simulation_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a device that answers as the stub did WHEN a program is recorded THEN its record is re-simulated: L1."""
    history = History("out-of-memory")
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (15 << 30, 16 << 30))
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: history.record)
    monkeypatch.setattr(type(history.record), "total_memory", property(lambda self: self.total_bytes), raising=False)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "memory_stats", lambda: {**history.record.statistics, "share": 0.5})
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", lambda share: None)
    monkeypatch.setattr(cuda.memory, "_record_memory_history", lambda **options: history.options.update(options))
    monkeypatch.setattr(cuda.memory, "_snapshot", history.snapshot)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cu130"))
    limits = (allocator_programs.ONE_SEGMENT_BYTES, allocator_programs.LIMIT_BYTES)
    monkeypatch.setitem(
        gpu_record_case.PROGRAMS, "out-of-memory", lambda marks, device: [marks.limit(limit) for limit in limits]
    )
    record, snapshot = gpu_record_case.recorded("out-of-memory")
    assert history.options == {"context": None}
    assert history.snapshots == 3
    assert snapshot["device_traces"]
    assert (record.tag, record.total_bytes, record.free_bytes) == ("gpu-measured", 16 << 30, 15 << 30)
    assert [text for _, text in record.marks] == [f"memory_fraction {limit / (16 << 30)!r}" for limit in limits]
    assert "share" not in record.statistics
    assert first_difference(record) is None
    assert load_record(save_record(record, tmp_path)) == record


def test_histories_are_compared_with_themselves_and_with_their_siblings() -> None:
    found = gpu_histories.compared(load_records(GOLDEN))
    assert len(found["l1"]) == len(allocator_programs.RUNS)
    assert all(row["difference"] is None and row["reserved_bytes"] > 0 for row in found["l1"])
    assert [row["under"] for row in found["l2"]] == sorted(allocator_programs.WHAT_IFS)
    assert all(row["differences"] == [] for row in found["l2"])
    json.dumps(found)


def test_a_comparison_that_breaks_is_a_difference_and_ends_nothing() -> None:
    """GIVEN a GPU that is lent for minutes WHEN the simulator breaks THEN what was measured is kept."""

    def broken(*records: object) -> None:
        raise IndexError("list index out of range")

    records = {name: record for name, record in load_records(GOLDEN).items() if record.program == "static-mlp"}
    (row,) = gpu_histories.compared(records, l1=broken)["l1"]
    assert row["difference"] == "IndexError: list index out of range"


def test_runs_that_fail_or_are_not_reached_are_named(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    budget = Budget(100, {"histories": 1.0}, lambda: now[0])
    budget.begin("histories")
    runs = (("one", ""), ("two", "expandable_segments:True"), ("three", ""))

    class Failing:
        def __init__(self, arguments: tuple[str, ...], settings: str) -> None:
            assert arguments[0] == "gpu_record_case.py"
            self.settings = settings

        def answer(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            now[0] += 60.0
            if self.settings:
                raise CaseFailed("no such option")
            return {}

        def end(self) -> None:
            pass

    monkeypatch.setattr(gpu_histories, "Child", Failing)
    folder = tmp_path / "golden"
    folder.mkdir()
    (folder / "stale.json.zst").write_bytes(b"of an earlier call")
    found = gpu_histories.record_histories(runs, folder, tmp_path, budget)
    assert found["failures"] == ["history of two expandable_segments:True failed"]
    assert found["not_reached"] == ["three"]
    assert found["l1"] == []
