"""The page of a CUDA snapshot, and its curve: by category where the events say one, the free parts on top."""

import pickle
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_history import MIB, History, frame, simulated_snapshot, varying_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from memwall.predict.snapshot.analysis import analyse_device
from memwall.predict.snapshot.compared_settings import with_settings
from memwall.predict.snapshot.device_history import recording_of
from memwall.predict.snapshot.timeline import timeline_of
from memwall.report.chart import chart_of, legend_of, scale_of
from memwall.report.curves import Curve
from memwall.report.html import page_html
from memwall.report.snapshots.snapshot_page import snapshot_curve, snapshot_page
from memwall.trace.snapshot.read import load_snapshot
from memwall.trace.snapshot.records import Event, Frame, Snapshot, SnapshotBlock, SnapshotSegment

MODEL = frame("/home/me/model.py", 7, "forward")
needs_extra = pytest.mark.requires("plotly", "jinja2")


def loaded(folder: Path, value: dict[str, Any]) -> Snapshot:
    (folder / "s.pickle").write_bytes(pickle.dumps(value))
    return load_snapshot(folder / "s.pickle")


def curve_of_device(snapshot: Snapshot) -> Curve:
    curve = snapshot_curve(timeline_of(recording_of(snapshot, 0)), "GPU 0")
    assert curve is not None
    return curve


def with_categories(history: History, *categories: str) -> dict[str, Any]:
    """The history, its allocations of these categories in turn; "" for none."""
    value = history.snapshot()
    allocations = [event for event in value["device_traces"][0] if event["action"] == "alloc"]
    for event, category in zip(allocations, categories, strict=True):
        if category:
            event["category"] = category
    return value


@pytest.fixture
def history() -> History:
    """20 MiB held; an activation of 8, a gradient of 4 and a block of 2 MiB of which nothing is known; 8 freed."""
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB, [MODEL])
    history.alloc(8 * MIB, 4 * MIB, 4 * MIB, [MODEL])
    history.alloc(12 * MIB, 2 * MIB, 2 * MIB, [MODEL])
    history.free(0)
    return history


def _segment(block: SnapshotBlock) -> SnapshotSegment:
    return SnapshotSegment(
        device=0,
        address=block.address,
        num_bytes=block.num_bytes,
        stream=0,
        kind="large",
        pool=(0, 0),
        is_expandable=False,
        blocks=(block,),
    )


def layers_of(curve: Curve) -> dict[str, list[int]]:
    return {layer.category: [num_bytes // MIB for num_bytes in layer.live_bytes] for layer in curve.layers}


def test_categories_survive_where_the_events_say_them(history: History, tmp_path: Path) -> None:
    curve = curve_of_device(loaded(tmp_path, with_categories(history, "activation", "gradient", "")))
    # From the bottom up, in the order of the legend.
    assert list(layers_of(curve)) == ["gradient", "activation", "unknown", "stranded", "idle segments"]
    assert layers_of(curve) == {
        "gradient": [0, 0, 0, 4, 4, 4, 4],
        "activation": [0, 0, 8, 8, 8, 8, 0],
        "unknown": [0, 0, 0, 0, 2, 2, 2],
        "stranded": [0, 0, 12, 8, 6, 6, 14],
        "idle segments": [0, 20, 0, 0, 0, 0, 0],
    }


def test_where_the_events_say_none_all_is_unknown(history: History, tmp_path: Path) -> None:
    curve = curve_of_device(loaded(tmp_path, history.snapshot()))
    assert layers_of(curve)["unknown"] == [0, 0, 8, 12, 14, 14, 6]
    assert curve.summary == "most held 20.0 MiB, after event 4 of 6"


def test_blocks_of_before_the_recording_are_unknown(history: History, tmp_path: Path) -> None:
    value = with_categories(history, "activation", "gradient", "")
    del value["device_traces"][0][:3]
    layers = layers_of(curve_of_device(loaded(tmp_path, value)))
    assert layers["unknown"] == [12, 14, 14, 6]
    assert set(layers) == {"unknown", "stranded"}


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_the_layers_add_up_to_what_was_held(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    draw = random.Random(seed)
    value, _ = simulated_snapshot(varying_requests(1))
    for event in value["device_traces"][0]:
        event["category"] = draw.choice(["", "activation", "gradient"])
    del value["device_traces"][0][: draw.randrange(len(value["device_traces"][0]))]
    curve = curve_of_device(loaded(tmp_path_factory.mktemp("s"), value))
    assert tuple(np.sum([layer.live_bytes for layer in curve.layers], axis=0)) == curve.total_bytes


@needs_extra
class TestPage:
    def page(self, snapshot: Snapshot) -> str:
        analysis, timeline = analyse_device(snapshot, 0)
        analysis = with_settings(analysis, snapshot, "2.13.0")
        return page_html(snapshot_page(((analysis, timeline),), "memwall snapshot: s.pickle"))

    @pytest.mark.slow
    def test_what_a_reader_finds(self, tmp_path: Path) -> None:
        """GIVEN steps whose sizes vary THEN the page says who held what, what was stranded, what settings save."""
        text = re.sub(r"<[^>]+>|\s+", " ", self.page(loaded(tmp_path, simulated_snapshot(varying_requests())[0])))
        for expected in (
            r"· peak 1\.\d\d GiB in use on GPU 0, after event \d+ of \d+; \d\.\d\d GiB held, of which",
            r"most held +\d\.\d\d GiB +reserved; ",
            r"stranded then +\d+\.\d MiB ",
            r"settings would save +\d\.\d\d GiB +simulated, by the best found",
            "In the peak, by line",
            "expandable_segments:True",
            "Not in it: the CUDA context",
        ):
            assert re.search(expected, text), expected

    def test_without_a_history_there_are_tables_and_no_curve(self, history: History, tmp_path: Path) -> None:
        html = self.page(loaded(tmp_path, history.snapshot() | {"device_traces": []}))
        assert '<div class="chart"' not in html
        assert "no history was recorded" in html
        assert "In the peak, by line" in html

    def test_an_empty_snapshot_says_so(self) -> None:
        assert "was CUDA used before it was taken?" in page_html(snapshot_page((), "empty"))

    @pytest.mark.slow
    def test_100_000_events_stay_below_5_mb(self) -> None:
        """GIVEN 100,000 events of 500 lines in ten categories THEN the page, all of it, is smaller than 5 MB."""
        stacks = ((), *((Frame(f"/home/me/part{k}.py", k, "forward"),) for k in range(500)))
        blocks = [(k % 499 * MIB, (1 + k % 97) * 512, 1 + k % 500, f"category {k % 10}") for k in range(33_333)]
        events = [Event("segment_alloc", 0, 1 << 30, 0, 1, 0, (0, 0), "", 0)]
        for address, size, stack, category in blocks:
            events += [
                Event(action, address, size, 0, len(events), stack, (0, 0), category, 0)
                for action in ("alloc", "free_requested", "free_completed")
            ]
        free = SnapshotBlock(0, 1 << 30, 0, "inactive", 0)
        snapshot = Snapshot(
            segments=(_segment(free),),
            traces=(tuple(events),),
            stacks=stacks,
            settings={},
            annotations=(),
            unknown_actions=(),
        )
        devices = (analyse_device(snapshot, 0),)
        assert devices[0][0].num_events == 100_000
        assert len(page_html(snapshot_page(devices, "large")).encode()) < 5_000_000

    def test_plotly_knows_every_attribute(self, history: History, tmp_path: Path) -> None:
        import plotly.graph_objects as go

        curve = curve_of_device(loaded(tmp_path, history.snapshot()))
        figure = go.Figure(chart_of(curve, scale_of((curve,))))
        assert [trace.name for trace in figure.data] == [*(x.name for x in legend_of((curve,))), "peak"]
