"""The page of a GPU day: what each part found, its failures and missed goals, and every table, in one offline file."""

from collections.abc import Callable, Sequence
from typing import Any

from memwall.report.grid import DASH, Grid
from memwall.report.html import Card, Page
from memwall.report.text import Verdict
from memwall.units import format_bytes, format_seconds

__all__ = ["day_page"]

_MOST_LINES = 40
Result = dict[str, Any]


def day_page(day: Result) -> Page:
    """Returns the page of a day, whole or so far."""
    parts: dict[str, Result] = day["parts"]
    wrong = [f"{each['title']}: {line}" for each in parts.values() for line in each["failures"]]
    missed = [f"{each['title']}: {line}" for each in parts.values() for line in each["missed"]]
    notes = [f"{day['device']}, commit {day['commit'][:12]}, torch {day['versions']['torch']}; tag: {day['tag']}."]
    if day["tag"] == "simulated":
        notes.insert(0, "Every figure on this page is simulated: the device is a phantom, and none is one of a GPU.")
    if day["is_tiny"]:
        notes.append("A tiny run: a little of each part, to see that nothing breaks. No goal is judged.")
    for each in parts.values():
        if each["not_reached"]:
            notes.append(f"{each['title']}, not reached ({len(each['not_reached'])}): {_some(each['not_reached'])}.")
    grids = [_overview(parts)]
    grids += [_lines("Failures", wrong)] if wrong else []
    grids += [_lines("Missed goals", missed)] if missed else []
    for name, each in parts.items():
        grids += GRIDS[name](each["result"]) if each["result"] else []
    head = "simulated: " if day["tag"] == "simulated" else ""
    return Page(
        title=f"A GPU day on {day['device']}",
        verdict=_verdict(head, parts, wrong, missed, is_tiny=day["is_tiny"]),
        cards=tuple(_cards(parts)),
        grids=tuple(grid for grid in grids if grid.rows),
        notes=tuple(notes),
    )


def _verdict(
    head: str, parts: dict[str, Result], wrong: Sequence[str], missed: Sequence[str], *, is_tiny: bool
) -> Verdict:
    if wrong:
        return "does-not-fit", f"{head}{len(wrong)} failures, {len(missed)} missed goals"
    if missed:
        return "inside-margin", f"{head}nothing failed, {len(missed)} missed goals"
    goals = "no goal is judged" if is_tiny else "every goal is met"
    return "fits", f"{head}all {len(parts)} parts are done, {goals}"


def _cards(parts: dict[str, Result]) -> list[Card]:
    found = []
    results = {name: each["result"] for name, each in parts.items() if each["result"]}
    if reserved := results.get("truth", {}).get("tables", {}).get("reserved"):
        # Of a handful of rows there is no median.
        error = reserved.get("median")
        remark = f"of reserved bytes, from {reserved.get('num_rows', 0)} of the zoo's runs"
        found.append(Card("forecast's median error", DASH if error is None else f"{abs(error):.2%}", remark))
    if rows := [row for row in results.get("budgets", {}).get("rows", []) if "counted_bytes" in row]:
        kept = sum(not row["exceeded_bytes"] for row in rows)
        found.append(Card("budgets kept", f"{kept} of {len(rows)}", "live runs, as the driver counts"))
    if rows := results.get("link", {}).get("rows", []):
        best = max(row["bytes_per_second"] for row in rows if row["way"] == "to host")
        found.append(Card("to host memory", f"{best / 1e9:.1f} GB/s", "one way, pinned"))
    if rows := results.get("phantom", {}).get("histories", []):
        same = sum(row["difference"] is None for row in rows)
        found.append(Card("phantom's histories", f"{same} of {len(rows)}", "the device's, byte by byte"))
    return found


def _overview(parts: dict[str, Result]) -> Grid:
    return Grid(
        title="Parts, in order of value",
        columns=("part", "outcome", "took", "failures", "missed goals", "not reached"),
        rows=tuple(
            (
                each["title"],
                each["outcome"],
                format_seconds(each["seconds"]),
                *(str(len(each[key])) for key in ("failures", "missed", "not_reached")),
            )
            for each in parts.values()
        ),
        text_columns=(0, 1),
    )


def _lines(title: str, lines: Sequence[str]) -> Grid:
    rows = [(line,) for line in lines[:_MOST_LINES]]
    rows += [(f"and {len(lines) - _MOST_LINES} more, in the result file",)] if len(lines) > _MOST_LINES else []
    return Grid(title=title, columns=("what",), rows=tuple(rows))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _truth_grids(result: Result) -> list[Grid]:
    rows = [
        (
            f"{row['family']}, {row['precision']}, {row['optimizer']}",
            *(
                text
                for quantity in ("allocated_bytes", "reserved_bytes", "process_bytes")
                for text in _pair(row["predicted"][quantity], row["measured"][quantity])
            ),
        )
        for row in result["rows"]
    ]
    columns = ("case", "allocated", "error", "reserved", "error", "process", "error")
    grids = [Grid(title="Forecast against the device: peaks of a run", columns=columns, rows=tuple(rows))]
    caps = [
        (
            f"{row['family']}, {row['precision']}, {row['optimizer']}",
            format_bytes(row["unlimited"]["reserved_bytes"]),
            format_bytes(row["cap_bytes"]),
            f"{row['slowdown']:.2f}x",
            "yes" if row["is_resolved"] else "no: time was over",
        )
        for row in result["caps"]["rows"]
    ]
    columns = ("case", "reserves freely", "finishes with", "step at the cap", "within 1 %")
    grids.append(Grid(title="The least that may be reserved", columns=columns, rows=tuple(caps)))
    histories = [
        (row["name"], f"{row['num_events']:,}", row["difference"] or "none") for row in result["histories"]["l1"]
    ]
    title = "The simulated allocator against recorded histories"
    grids.append(
        Grid(title=title, columns=("program", "events", "difference"), rows=tuple(histories), text_columns=(0, 2))
    )
    return grids


def _kernel_grids(result: Result) -> list[Grid]:
    rows = [
        (
            row["op"],
            "x".join(map(str, row["shape"])),
            row["provider"],
            *(
                (DASH, DASH, DASH, f"absent: {row['absent']}")
                if "absent" in row
                else (
                    format_seconds(row["step_seconds_median"]),
                    f"{row['step_share_of_floor']:.0%}",
                    format_bytes(row["peak_bytes"]),
                    f"{row.get('error_ratio', 0):.2f}x eager's",
                )
            ),
        )
        for row in result["rows"]
    ]
    columns = ("operation", "shape", "by", "forward and backward", "of the floor", "peak", "error")
    return [Grid(title="Fused kernels", columns=columns, rows=tuple(rows), text_columns=(0, 1, 2, 6))]


def _budget_grids(result: Result) -> list[Grid]:
    rows = []
    for row in result["rows"]:
        head = (f"{row['share_percent']} %", format_bytes(row["budget_bytes"]))
        if "counted_bytes" not in row:
            rows.append((*head, DASH, DASH, DASH, DASH, f"status {row['status']}"))
            continue
        over = row["exceeded_bytes"]
        rows.append(
            (
                *head,
                *_pair(row["predicted_bytes"], row["counted_bytes"]),
                f"{format_bytes(over)} over" if over else "kept",
                f"{row['slowdown']:.2f}x",
                "the plain run's" if row["is_digest_equal"] else "OTHERS",
            )
        )
    peak = format_bytes(result["plain_peak_bytes"]) if "plain_peak_bytes" in result else DASH
    columns = ("of the plain peak", "budget", "counted", "forecast's error", "the budget is", "step", "weights")
    title = f"memwall run under budgets; the plain run's peak is {peak}"
    return [Grid(title=title, columns=columns, rows=tuple(rows), text_columns=(4, 6))]


def _link_grids(result: Result) -> list[Grid]:
    ways = list(dict.fromkeys((row["kind_of_memory"], row["way"]) for row in result["rows"]))
    sizes = sorted({row["size_bytes"] for row in result["rows"]})
    rates = {(row["kind_of_memory"], row["way"], row["size_bytes"]): row["bytes_per_second"] for row in result["rows"]}
    rows = [
        (
            f"{kind}, {way}",
            *(f"{rates[kind, way, size] / 1e9:.1f}" if (kind, way, size) in rates else DASH for size in sizes),
        )
        for kind, way in ways
    ]
    columns = ("GB/s", *(format_bytes(size) for size in sizes))
    offload = result["offload"]
    hidden = (
        ("plain", format_seconds(offload["plain_step_seconds"]), format_bytes(offload["plain_peak_bytes"])),
        ("saved tensors in host memory", format_seconds(offload["step_seconds"]), format_bytes(offload["peak_bytes"])),
    )
    title = f"A chain of {offload['layers']} layers whose saved tensors leave"
    return [
        Grid(title="Copies between device and host", columns=columns, rows=tuple(rows)),
        Grid(title=title, columns=("step", "takes", "peak"), rows=hidden),
    ]


def _phantom_grids(result: Result) -> list[Grid]:
    rows = [
        (f"{row['program']} {row['settings']}".strip(), f"{row['num_events']:,}", row["difference"] or "none")
        for row in result["histories"]
    ]
    columns = ("program", "events", "first difference")
    title = "The phantom's allocator histories against the device's"
    grids = [Grid(title=title, columns=columns, rows=tuple(rows), text_columns=(0, 2))]
    cases = [
        (
            row["case"],
            *(
                text
                for name in ("allocated_bytes", "reserved_bytes")
                for text in _pair(row["phantom_counts"]["steady"][name], row["device_counts"]["steady"][name])
            ),
            f"{row['worst_error']:+.2%}",
        )
        for row in result["zoo"]
    ]
    columns = ("case", "allocated", "error", "reserved", "error", "worst, first step too")
    grids.append(Grid(title="The phantom's steady peaks against the device's", columns=columns, rows=tuple(cases)))
    return grids


def _pair(predicted_bytes: int, counted_bytes: int) -> tuple[str, str]:
    return format_bytes(counted_bytes), f"{predicted_bytes / counted_bytes - 1:+.2%}"


GRIDS: dict[str, Callable[[Result], list[Grid]]] = {
    "truth": _truth_grids,
    "kernels": _kernel_grids,
    "budgets": _budget_grids,
    "link": _link_grids,
    "phantom": _phantom_grids,
}
