"""Exports that torch's own viewer reads: checked with torch.cuda._memory_viz, and by importing them again."""

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cuda_history import MIB
from torch.cuda import _memory_viz

from memwall.errors import UsageError
from memwall.predict.curve import peak_of
from memwall.predict.snapshot.analysis import analyse_device
from memwall.report.memory_viz import save_memory_viz, trace_as_viz
from memwall.trace.records import Step, Trace
from memwall.trace.snapshot.read import load_snapshot


def lines_of(viz: dict[str, Any]) -> list[str]:
    """What torch makes of the blocks: one line for each stack and state, with its bytes."""
    found: str = _memory_viz.memory(viz, format_flamegraph=lambda lines: lines)
    return found.splitlines()


def test_a_trace_is_one_segment_with_what_outlives_the_step(trace: Trace) -> None:
    viz = trace_as_viz(trace)
    assert lines_of(viz) == [
        f"stream_0;active_allocated;GPT:0:GPT;before the step:0:parameter {100 * MIB}",
        "stream_0;inactive;<non-python> 0",
        f"stream_0;inactive;<gaps> {402 * MIB}",
    ]
    assert "total_reserved: 502.0MiB" in _memory_viz.segsum(viz)


def test_a_trace_s_peak_survives_the_way_out_and_back(trace: Trace, step: Step, tmp_path: Path) -> None:
    save_memory_viz(trace, tmp_path / "out.pickle")
    analysis, timeline = analyse_device(load_snapshot(tmp_path / "out.pickle"), 0)
    peak = peak_of(trace, step)
    assert analysis.peak.fragmentation.active_bytes == peak.live_bytes == 500 * MIB + 32 * 1024
    assert {share.name: share.num_bytes for share in analysis.by_category} == {
        share.name: share.num_bytes for share in peak.by_category
    }
    assert [(share.name, share.num_bytes // MIB) for share in analysis.by_line[:3]] == [
        ("blocks[bold].1:3 aten.mm.default", 200),
        ("blocks[bold].1:1 aten.mm.default", 160),
        ("before the step:0 parameter", 100),
    ]
    assert timeline.num_unmatched == 0
    assert int(timeline.active_bytes[-1]) == 100 * MIB


def test_a_stack_names_the_modules_around_an_operation_and_no_others(trace: Trace) -> None:
    (events,) = trace_as_viz(trace)["device_traces"]
    stacks = {event["size"] // MIB: [at["name"] for at in event["frames"]] for event in events if event["frames"]}
    assert stacks[160] == ["aten.mm.default", "Block", "GPT"]
    assert stacks[8] == ["aten.add.Tensor"]  # outside of all modules, after some of them


def test_events_are_in_the_order_of_operations(trace: Trace) -> None:
    (events,) = trace_as_viz(trace)["device_traces"]
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)
    assert events[-1]["time_us"] == 1_750_500
    text = _memory_viz.trace(trace_as_viz(trace))
    assert text.count(" = MEM[") + text.count(" = seg_0[") == 7
    assert text.count("# free completed for") == 6


def test_storages_share_a_place_only_one_after_another(trace: Trace) -> None:
    (events,) = trace_as_viz(trace)["device_traces"]
    held: dict[int, int] = {}
    for event in events[1:]:
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert not [start for start, stop in held.items() if start < end and begin < stop]
            held[begin] = end
        elif event["action"] == "free_completed":
            assert held.pop(begin) == end


def test_a_viewer_that_colours_by_category_finds_unknown_among_them(trace: Trace) -> None:
    # torch/utils/viz/MemoryViz.js stops with an error where there are categories, but none of this name.
    (events,) = trace_as_viz(trace)["device_traces"]
    assert {event["category"] for event in events} >= {"unknown", "parameter", "activation"}


def test_a_trace_without_operations_has_nothing_to_show(trace: Trace, tmp_path: Path) -> None:
    empty = msgspec.structs.replace(trace, steps=())
    with pytest.raises(UsageError, match="the trace has no operations, so there is nothing to show over time; record"):
        save_memory_viz(empty, tmp_path / "out.pickle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("plot", ["trace_plot", "segment_plot"])
def test_torch_s_page_takes_the_export(plot: str, trace: Trace) -> None:
    page = getattr(_memory_viz, plot)(trace_as_viz(trace))
    (line,) = [line for line in page.splitlines() if line.startswith("const local_files")]
    (file,) = json.loads(line.removeprefix("const local_files = "))
    assert pickle.loads(base64.b64decode(file["base64"]))["segments"][0]["total_size"] == 502 * MIB
