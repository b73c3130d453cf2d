"""The page: one file, nothing loaded from elsewhere, nothing of the user's run as markup or script."""

import base64
import gzip
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memwall.errors import UsageError
from memwall.observe.run_report import RankSpread, RunReport
from memwall.planning.planfile import Plan
from memwall.report.chart import chart_of, legend_of, scale_of
from memwall.report.curves import curve_of
from memwall.report.html import Page, page_html, save_page
from memwall.report.run_grids import Outcome
from memwall.trace.records import Step, Trace

MIB = 1 << 20
HOSTILE = "</script><script>alert(1)</script>"
needs_extra = pytest.mark.requires("plotly", "jinja2")


class _Content(HTMLParser):
    """Tags with their attributes, text outside scripts, and scripts by type."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text: list[str] = []
        self._script: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("type") or "javascript"

    def handle_endtag(self, tag: str) -> None:
        self._script = None if tag == "script" else self._script

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif data.strip():
            self.text.append(data.strip())

    def charts(self) -> list[dict[str, Any]]:
        """What is handed to plotly."""
        found = re.search(r"const charts = (\[.*?\]);\nconst places", self.scripts["javascript"], re.DOTALL)
        assert found is not None
        return list(json.loads(found.group(1)))


@pytest.fixture
def page(trace: Trace, step: Step, plan: Plan, run: RunReport, outcomes: tuple[Outcome, ...]) -> Page:
    curves = (
        curve_of(trace, step, "free run", "cpu-measured", budget_bytes=480 * MIB, process_peak_bytes=810 * MIB),
        curve_of(trace, trace.steps[0], "under the plan", "simulated", budget_bytes=480 * MIB),
    )
    return Page(title="small GPT", curves=curves, outcomes=outcomes, plan=plan, run=run, notes=("A note.",))


@needs_extra
class TestPage:
    def test_nothing_is_loaded_from_anywhere(self, page: Page) -> None:
        html = page_html(page)
        content = _Content(html)
        assert [tag for tag, _ in content.tags if tag in {"link", "img", "iframe", "object", "base"}] == []
        sources = [
            value for _, attributes in content.tags for name, value in attributes.items() if name in {"src", "href"}
        ]
        assert sources == []
        assert re.findall(r"url\(|@import|https?:", html) == []

    def test_the_browser_is_told_to_load_nothing(self, page: Page) -> None:
        policies = [a["content"] for tag, a in _Content(page_html(page)).tags if tag == "meta" and "http-equiv" in a]
        assert len(policies) == 1
        assert str(policies[0]).startswith("default-src 'none';")

    def test_plotly_is_inside_and_whole(self, page: Page) -> None:
        from plotly.offline import get_plotlyjs

        packed = _Content(page_html(page)).scripts["text/plain"]
        assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()

    def test_what_a_reader_finds(self, page: Page) -> None:
        text = _Content(page_html(page)).text
        for expected in (
            "small GPT",
            "~ within the budget of 480.0 MiB, but 3.0 MiB above the forecast: 458.0 MiB measured",
            "simulated",
            "cpu-measured",
            "Before and after",
            "458.0 MiB (0.22x)",
            "0, bit for bit, over 3 steps",
            "Prediction and measurement",
            "recompute, keep 2 of 27 ops",
            "the peak in backward of blocks.3",
            "500.0 MiB of live tensors, in backward of blocks[bold].1 (operation 3)",
            "by line",
            "models/gpt[bold].py:23 forward",
            "A note.",
        ):
            assert expected in text, expected
        assert any("margin of 12.0 MiB. Not modelled: data loading between steps" in line for line in text)

    def test_the_measured_step_is_that_of_the_table_of_both_runs(self, page: Page) -> None:
        slower = msgspec.structs.replace(page.outcomes[1], step_seconds=1.8)
        text = _Content(page_html(msgspec.structs.replace(page, outcomes=(page.outcomes[0], slower)))).text
        at = text.index("measured step")
        assert text[at + 1 : at + 3] == ["1.80 s", "1.50x the free run"]
        assert "1.80 s (1.50x)" in text

    def test_what_a_run_dropped_and_how_far_its_ranks_lie_apart_is_said(self, page: Page) -> None:
        assert page.run is not None
        measured = msgspec.structs.replace(
            page.run.measured, lost={"recompute of 'blocks.1'": "its second run differs"}
        )
        ranks = RankSpread(
            num_ranks=2, least_peak_bytes=1 << 20, median_peak_bytes=2 << 20, most_peak_bytes=3 << 20, least_rank=1,
            most_rank=0, least_step_seconds=None, most_step_seconds=None, over_budget=(), without_report=(),
        )  # fmt: skip
        run = msgspec.structs.replace(page.run, measured=measured, ranks=ranks)
        text = "\n".join(_Content(page_html(msgspec.structs.replace(page, run=run))).text)
        assert "Dropped: recompute of 'blocks.1': its second run differs." in text
        assert "Ranks: 2; peak from 1.0 MiB (rank 1) over 2.0 MiB (median) to 3.0 MiB (rank 0" in text

    def test_sizes_are_in_binary_units(self, page: Page) -> None:
        text = "\n".join(_Content(page_html(page)).text)
        assert re.search(r"\d MiB", text)
        assert re.findall(r"\d\s*[kKMGT]B\b", text) == []

    def test_a_hostile_module_path_is_text(self, page: Page, trace: Trace, step: Step) -> None:
        modules = (*trace.modules[:2], msgspec.structs.replace(trace.modules[2], path=HOSTILE))
        curve = curve_of(msgspec.structs.replace(trace, modules=modules), step, HOSTILE, "simulated")
        html = page_html(msgspec.structs.replace(page, title=HOSTILE, curves=(curve,), notes=(HOSTILE,)))
        content = _Content(html)
        assert sum(tag == "script" for tag, _ in content.tags) == 2
        assert "alert" not in content.scripts["javascript"]
        assert HOSTILE in content.text

    def test_the_same_page_is_the_same_text(self, page: Page) -> None:
        assert page_html(page) == page_html(page)

    def test_without_curves_there_is_no_script(self, page: Page) -> None:
        content = _Content(page_html(msgspec.structs.replace(page, curves=())))
        assert content.scripts == {}
        assert "Actions" in content.text

    def test_a_title_is_enough(self) -> None:
        assert "empty" in _Content(page_html(Page(title="empty"))).text

    @pytest.mark.slow
    def test_100_000_operations_stay_below_5_mb(self, page: Page, trace: Trace, step: Step) -> None:
        num_ops = 100_000
        ops = tuple(msgspec.structs.replace(step.ops[k * 7 // num_ops], seconds=1e-5) for k in range(num_ops))
        storages = tuple(
            msgspec.structs.replace(
                step.storages[k % 7], nbytes=(k * 7919) % (64 * MIB), birth=k, death=k + 100 + k * 31 % 977
            )
            for k in range(num_ops)
        )
        long_step = msgspec.structs.replace(step, ops=ops, storages=storages)
        curve = curve_of(trace, long_step, "long", "simulated")
        html = page_html(msgspec.structs.replace(page, curves=(curve, curve)))
        assert len(html.encode()) < 5_000_000

    @pytest.mark.slow
    def test_a_file_is_written_whole(self, page: Page, tmp_path: Path) -> None:
        save_page(page, tmp_path / "page.html")
        assert (tmp_path / "page.html").read_text(encoding="utf-8") == page_html(page)
        assert [path.name for path in tmp_path.iterdir()] == ["page.html"]

    def test_a_folder_that_is_missing_is_named(self, page: Page, tmp_path: Path) -> None:
        target = tmp_path / "missing" / "page.html"
        with pytest.raises(UsageError, match=re.escape(f"cannot write the page to {target}: No such file")):
            save_page(page, target)


@needs_extra
class TestChart:
    def test_the_page_hands_plotly_what_the_chart_says(self, page: Page) -> None:
        scale = scale_of(page.curves)
        expected = json.loads(json.dumps([chart_of(curve, scale) for curve in page.curves]))
        assert _Content(page_html(page)).charts() == expected

    def test_plotly_knows_every_attribute(self, page: Page) -> None:
        import plotly.graph_objects as go

        scale = scale_of(page.curves)
        for curve in page.curves:
            figure = go.Figure(chart_of(curve, scale))
            assert [trace.name for trace in figure.data] == [*(x.name for x in legend_of((curve,))), "peak"]


class TestScales:
    def test_curves_share_their_axes(self, page: Page) -> None:
        scale = scale_of(page.curves)
        axes = [chart_of(curve, scale)["layout"] for curve in page.curves]
        assert axes[0]["xaxis"]["range"] == axes[1]["xaxis"]["range"] == pytest.approx([0, 1.7505])
        assert axes[0]["yaxis"]["range"] == axes[1]["yaxis"]["range"]
        assert axes[0]["yaxis"]["title"]["text"] == "MiB"

    def test_budget_and_measured_peak_are_lines_and_phases_are_bands(self, page: Page) -> None:
        layout = chart_of(page.curves[0], scale_of(page.curves))["layout"]
        levels = {shape["name"]: shape for shape in layout["shapes"] if shape["type"] == "line"}
        assert levels["budget"]["y0"] == levels["budget"]["y1"] == 480
        assert levels["budget"]["line"]["dash"] == "dash"
        assert levels["process peak"]["y0"] == 810
        bands = [(shape["x0"], shape["x1"]) for shape in layout["shapes"] if shape["type"] == "rect"]
        assert bands == [pytest.approx(b) for b in ((0, 0.5), (0.5, 0.5005), (0.5005, 1.5005), (1.5005, 1.7505))]
        notes = [note["text"] for note in layout["annotations"]]
        assert notes == ["forward", "loss", "backward", "optimizer", "budget 480.0 MiB", "process peak 810.0 MiB"]

    def test_a_budget_is_rounded_down_and_a_peak_up_as_in_the_tables(self, page: Page) -> None:
        levels = {"budget_bytes": 480 * MIB + MIB // 16, "process_peak_bytes": 480 * MIB + MIB // 64}
        curve = msgspec.structs.replace(page.curves[0], **levels)
        notes = [note["text"] for note in chart_of(curve, scale_of([curve]))["layout"]["annotations"]]
        assert notes[-2:] == ["budget 480.0 MiB", "process peak 480.1 MiB"]

    def test_the_peak_is_marked_where_it_is(self, page: Page) -> None:
        mark = chart_of(page.curves[0], scale_of(page.curves))["data"][-1]
        assert (mark["x"], mark["text"]) == ([pytest.approx(0.5005)], ["800.0 MiB"])
        assert mark["y"] == [pytest.approx(800.03125)]

    def test_large_curves_are_in_gib(self, page: Page) -> None:
        big = msgspec.structs.replace(page.curves[0], budget_bytes=8 << 30)
        scale = scale_of((big,))
        assert scale.unit == "GiB"
        assert chart_of(big, scale)["layout"]["annotations"][-2]["text"] == "budget 8.00 GiB"


@needs_extra
@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_a_missing_extra_is_named(page: Page, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError) as raised:
        page_html(page)
    assert str(raised.value) == (
        f"the HTML report needs {missing}, which is not installed; "
        "install the extra with: pip install 'torch-memwall[report]'"
    )
