"""Figures of steps are written where other tools read them, as those tools read them."""

import errno
import logging
import os
from pathlib import Path

import msgspec
import pytest

from memwall.errors import UsageError
from memwall.observe.last_steps import last_steps
from memwall.observe.step_metrics_files import open_metrics
from memwall.session.watch.step_metrics import StepMetrics

MIB = 1 << 20


def a_step(step: int = 1, **changes: object) -> StepMetrics:
    made = StepMetrics(
        step=step,
        unix_seconds=1.0e9 + step,
        is_planned=True,
        step_seconds=0.25,
        peak_bytes=90 * MIB + step,
        budget_bytes=100 * MIB,
        forecast_bytes=91 * MIB,
        bytes_to_tier=3,
        bytes_from_tier=2,
        num_actions=4,
        num_replans=0,
        oom_recoveries=1,
    )
    return msgspec.structs.replace(made, **changes)


def test_json_lines_are_read_back_while_they_are_written(tmp_path: Path) -> None:
    """GIVEN a file that is open WHEN the last line is not whole yet THEN the steps before it are read, as written."""
    path = tmp_path / "steps.jsonl"
    file = open_metrics(path)
    assert last_steps(path) == []
    file.write(a_step(1))
    file.write(a_step(2, step_seconds=None, forecast_bytes=None))
    with path.open("a") as also:
        also.write('{"schema":"memwall.step/1","st')
    assert last_steps(path) == [a_step(1), a_step(2, step_seconds=None, forecast_bytes=None)]
    file.close()


def test_a_run_that_continues_keeps_the_steps_before_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for step in (1, 2):
        file = open_metrics(path, appends=step > 1)
        file.write(a_step(step))
        file.close()
    assert last_steps(path) == [a_step(1), a_step(2)]


def test_each_rank_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "board").mkdir()
    for name in ("steps.jsonl", "board"):
        file = open_metrics(tmp_path / name)
        file.write(a_step(1))
        file.close()
    assert last_steps(tmp_path / "rank1-steps.jsonl") == [a_step(1)]
    assert [path.name.split(".")[0] for path in (tmp_path / "board" / "rank1").iterdir()] == ["events"]


def test_of_a_long_run_the_last_steps_are_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = open_metrics(path)
    for step in range(1, 1001):
        file.write(a_step(step))
    file.close()
    found = last_steps(path)
    assert found == [a_step(step) for step in range(found[0].step, 1001)]
    assert 100 < len(found) < 1000


@pytest.mark.parametrize("text", ["hello\n", '{"schema": "memwall.run/1"}\n', "[" * 100_000 + "\n", '"\xff"\n'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"steps\.jsonl holds no steps of a run: expected the file of memwall run"):
        last_steps(path)


def test_prometheus_reads_the_last_step_in_base_units(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = tmp_path / "memwall.prom"
    file = open_metrics(path)
    file.write(a_step(1))
    file.write(a_step(2, step_seconds=None, forecast_by_category={"parameter": 5, "gradient": 4}))
    file.close()
    families = {family.name: family for family in parser.text_string_to_metric_families(path.read_text())}
    found = {name: family.samples[0].value for name, family in families.items()}
    assert found["memwall_memory_peak_bytes"] == 90 * MIB + 2
    assert found["memwall_memory_budget_bytes"] == 100 * MIB
    assert found["memwall_prediction_error_ratio"] == pytest.approx(1 / 90, abs=1e-6)
    assert found["memwall_step_seconds"] == 0.25  # of the last step that was timed
    categories = families["memwall_memory_predicted_bytes"].samples
    assert [(one.labels["category"], one.value) for one in categories] == [("parameter", 5), ("gradient", 4)]
    assert os.listdir(tmp_path) == ["memwall.prom"]


def test_what_prometheus_counts_is_named_so_and_adds_up(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = tmp_path / "memwall.prom"
    file = open_metrics(path)
    for step in (1, 2, 3):
        file.write(a_step(step, num_replans=step))
    families = list(parser.text_string_to_metric_families(path.read_text()))
    counted = {one.name: one.value for family in families if family.type == "counter" for one in family.samples}
    assert counted["memwall_steps_total"] == counted["memwall_replans_total"] == 3
    assert counted["memwall_oom_recoveries_total"] == 1
    (moved,) = [family for family in families if family.name == "memwall_offload_bytes"]
    assert {one.labels["direction"]: one.value for one in moved.samples} == {"out": 9, "in": 6}
    units = ("_bytes", "_seconds", "_ratio", "_total", "_actions")
    assert all(one.name.endswith(units) for family in families for one in family.samples)


def test_tensorboard_reads_every_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = open_metrics(tmp_path)
    for step in (1, 2):
        file.write(a_step(step, forecast_by_category={"parameter": 5}))
    file.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    found = events.Scalars("memwall/peak_bytes")
    assert [(one.step, one.wall_time) for one in found] == [(1, 1.0e9 + 1), (2, 1.0e9 + 2)]
    assert events.Scalars("memwall/budget_bytes")[0].value == 100 * MIB
    assert events.Scalars("memwall/forecast/parameter_bytes")[0].value == 5
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("memory/")]


def test_of_a_cuda_device_tensorboard_has_torchtitan_s_tags_too(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    figures = {"active_bytes": 1 << 30, "reserved_bytes": 2 << 30, "num_alloc_retries": 3, "device_bytes": 8 << 30}
    file = open_metrics(tmp_path)
    file.write(a_step(1, device="cuda", **figures))
    file.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("memory/")]
    assert {tag: events.Scalars(tag)[0].value for tag in tags} == {
        "memory/max_active(GiB)": 1.0,
        "memory/max_active(%)": 12.5,
        "memory/max_reserved(GiB)": 2.0,
        "memory/max_reserved(%)": 25.0,
        "memory/num_alloc_retries": 3.0,
        "memory/num_ooms": 1.0,
    }


def test_a_file_that_cannot_be_opened_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--metrics .*/none/steps\.jsonl: cannot be written: No such file"):
        open_metrics(tmp_path / "none" / "steps.jsonl")


def test_a_full_disk_ends_the_figures_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    file = open_metrics(Path("/dev/full"))
    for step in (1, 2):
        file.write(a_step(step))
    file.close()
    assert caplog.messages == [f"--metrics /dev/full: {os.strerror(errno.ENOSPC)}; it gets no further steps"]
