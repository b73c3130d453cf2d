"""What gpu_kernels.py is to show, and what of it was shown: a table of its results for the benchmarks' page.

    python benchmarks/gpu_kernels_goals.py [--check]

Writes the table into README.md; `--check` compares instead. A goal that no result answers is "not measured". What other
libraries report of themselves stands in a table of its own: none of it was measured here.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memwall.triton_kernels.linear_cross_entropy._chunks import LossCall
from memwall.triton_kernels.linear_cross_entropy._cost import rounded_bytes, scratch_bytes

README = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- gpu-kernels: begin -->", "<!-- gpu-kernels: end -->"
Rows = Sequence[Mapping[str, Any]]
_ELEMENTWISE = ("swiglu", "geglu", "rms_norm")


class Goal(NamedTuple):
    """A figure that was promised."""

    text: str
    wanted: str
    value: Callable[[Rows], float | None]
    """The worst over all shapes; None where a row is missing."""
    is_met: Callable[[float], bool]


class Claim(NamedTuple):
    """What somebody else reports."""

    what: str
    figure: str
    source: str


def _found(rows: Rows, op: str, provider: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if (row["op"], row["provider"]) == (op, provider) and "absent" not in row]


def _share(part: str, ops: Iterable[str], provider: str) -> Callable[[Rows], float | None]:
    def value(rows: Rows) -> float | None:
        found = [[row[f"{part}_share_of_floor"] for row in _found(rows, op, provider)] for op in ops]
        return min(map(min, found)) if all(found) else None

    return value


def _ratio(figure: str, op: str, provider: str, other: str) -> Callable[[Rows], float | None]:
    def value(rows: Rows) -> float | None:
        others = {tuple(row["shape"]): row[figure] for row in _found(rows, op, other)}
        found = [
            row[figure] / others[shape]
            for row in _found(rows, op, provider)
            if (shape := tuple(row["shape"])) in others
        ]
        return max(found) if found else None

    return value


def _forecast_bytes(row: Mapping[str, Any], figure: str) -> int:
    """Returns what a row should show, by arithmetic; tensors are bfloat16."""
    op, provider, shape = row["op"], row["provider"], row["shape"]
    if op == "linear_cross_entropy":
        return _forecast_of_loss(*shape, chunk_rows=int(provider.split("-")[1]), figure=figure)
    tensor_bytes = 2 * shape[0] * shape[1]
    if op in ("swiglu", "geglu"):
        return 3 * tensor_bytes
    return 2 * tensor_bytes + shape[0] * 4


def _forecast_of_loss(num_rows: int, hidden: int, vocabulary: int, *, chunk_rows: int, figure: str) -> int:
    x, w = (torch.empty(size, hidden, dtype=torch.bfloat16, device="meta") for size in (num_rows, vocabulary))
    call = LossCall(x, w, x[:, 0].long(), None, -100, 0.0, 0.0, 1.0, chunk_rows, True, True, False)
    of_head, of_head_rounded = rounded_bytes(call)
    saved_bytes = x.nbytes + of_head
    # Forward has the slab beside the gradients, backward the same gradients scaled and rounded.
    later_bytes = x.nbytes + of_head_rounded
    return saved_bytes + (max(scratch_bytes(call), later_bytes) if figure == "peak_bytes" else 0)


def _off_cost(figure: str, ops: Iterable[str]) -> Callable[[Rows], float | None]:
    def value(rows: Rows) -> float | None:
        found = []
        for op in ops:
            ours = [row for row in rows if row["op"] == op and row["provider"].startswith("memwall")]
            found += [[abs(row[figure] / _forecast_bytes(row, figure) - 1.0) for row in ours if "absent" not in row]]
        return max(map(max, found)) if all(found) else None

    return value


def _at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def _at_most(limit: float) -> Callable[[float], bool]:
    return lambda value: value <= limit


_LOSS = "linear_cross_entropy"
GOALS = (
    Goal(
        "norms and gated activations, forward: share of the measured copy bandwidth",
        ">= 85%",
        _share("forward", _ELEMENTWISE, "memwall"),
        _at_least(0.85),
    ),
    Goal("the same, backward", ">= 75%", _share("backward", _ELEMENTWISE, "memwall"), _at_least(0.75)),
    Goal(
        "linear cross entropy at 2,048 rows: share of the measured matmul rate",
        ">= 90%",
        _share("step", (_LOSS,), "memwall-2048"),
        _at_least(0.90),
    ),
    Goal(
        "the same at 256 rows: time to Liger's",
        "<= 100%",
        _ratio("step_seconds_median", _LOSS, "memwall-256", "liger"),
        _at_most(1.0),
    ),
    Goal(
        "and peak to Liger's",
        "<= 100%",
        _ratio("peak_bytes", _LOSS, "memwall-256", "liger"),
        _at_most(1.0),
    ),
    Goal(
        "linear cross entropy at any chunk: peak, away from the forecast",
        "<= 2%",
        _off_cost("peak_bytes", (_LOSS,)),
        _at_most(0.02),
    ),
    Goal(
        "saved bytes of loss, norms and activations, away from the forecast",
        "<= 2%",
        _off_cost("saved_bytes", (_LOSS, *_ELEMENTWISE)),
        _at_most(0.02),
    ),
    Goal(
        "AdamW with moments of 8 bits: share of the measured copy bandwidth",
        ">= 90%",
        _share("step", ("adamw",), "memwall-8bit"),
        _at_least(0.9),
    ),
    Goal(
        "and time to torchao's",
        "<= 100%",
        _ratio("step_seconds_median", "adamw", "memwall-8bit", "torchao-8bit"),
        _at_most(1.0),
    ),
    Goal(
        "four layers of Llama 3 8B: saved bytes to Liger's",
        "<= 100%",
        _ratio("saved_bytes", "llama_layers", "memwall", "liger"),
        _at_most(1.0),
    ),
    Goal(
        "and time to Liger's",
        "<= 100%",
        _ratio("step_seconds_median", "llama_layers", "memwall", "liger"),
        _at_most(1.0),
    ),
)

_LLAMA_HEAD = "linear cross entropy, 8192 x 4096 x 128256, H200"
CLAIMS = (
    Claim(f"Liger, {_LLAMA_HEAD}, 256 rows", "53.0 ms, +1,129 MiB", "Liger-Kernel PR 1472"),
    Claim("the same, 2,048 rows", "37.7 ms, +1,568 MiB", "Liger-Kernel PR 1472"),
    Claim("the same, 4,096 rows", "35.1 ms, +2,068 MiB", "Liger-Kernel PR 1472"),
    Claim("Liger's CuTe back end, the same at 4,096 tokens", "18.34 ms, 704 TFLOP/s", "Liger-Kernel PR 1369, PR 1356"),
    Claim(
        "Cut Cross-Entropy, 16384 x 2048 x 248320, H100 (Liger beside it: 321 ms, 6.05 GB)",
        "92.6 ms, 3.09 GB",
        "TRL PR 6858",
    ),
    Claim("QuACK, norms of 4,096 columns and more, H100", "3.0 TB/s, 90%", "quack, media/2025-07-10-membound-sol.md"),
    Claim("Liger, norms forward, H100", "84 to 87% of peak", "Liger-Kernel's benchmark CSV, bandwidth computed"),
    Claim("Liger, norms backward, H100", "26 to 53% of peak", "Liger-Kernel's benchmark CSV, bandwidth computed"),
)


def section(documents: Sequence[Mapping[str, Any]]) -> str:
    """Both tables; a column for each device that was measured."""
    devices = [f"{document['device']}, commit {document['commit'][:12]}" for document in documents] or ["measured"]
    lines = [f"| goal | wanted | {' | '.join(devices)} |", "|" + " --- |" * (2 + len(devices))]
    for goal in GOALS:
        cells = [_cell(goal, document["rows"]) for document in documents] or ["not measured"]
        lines.append(f"| {goal.text} | {goal.wanted} | {' | '.join(cells)} |")
    lines += ["", "What others report, none of it measured here (external, [claimed] by their authors):", ""]
    lines += ["| what | figure | source |", "| --- | --- | --- |"]
    lines += [f"| {claim.what} | {claim.figure} [claimed] | {claim.source} |" for claim in CLAIMS]
    return "\n".join(lines)


def _cell(goal: Goal, rows: Rows) -> str:
    value = goal.value(rows)
    return "not measured" if value is None else f"{value:.1%}, {'met' if goal.is_met(value) else '**missed**'}"


def with_section(page: str, text: str) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def measured() -> list[Mapping[str, Any]]:
    """What gpu_kernels.py wrote, by device."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/gpu_kernels.json"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="whether README.md says what the results say")
    options = parser.parse_args()
    page = README.read_text()
    wanted = with_section(page, section(measured()))
    if not options.check:
        README.write_text(wanted)
        return 0
    if page != wanted:
        print("README.md is not what the results say: python benchmarks/gpu_kernels_goals.py", file=sys.stderr)
    return int(page != wanted)


if __name__ == "__main__":
    sys.exit(main())
