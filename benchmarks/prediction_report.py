"""Tables and files of `prediction.py`."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import knob_report
from prediction_claims import claims_table
from prediction_metrics import MARGINS_PERCENT
from prediction_rows import T4_CONTEXT_BYTES

from memwall.predict.device import CONVOLUTION_SHARE, MARGIN_SHARE

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "cpu" / "prediction.json"
README = FOLDER / "README.md"
BEGIN, END = "<!-- prediction: begin -->", "<!-- prediction: end -->"
HEADING = "## Predictions before the run"
SCHEMA = "memwall.benchmarks.prediction/1"
_LIBRARIES = ("accelerate", "deepspeed", "timm")
_OURS, _THREE_TERMS = "memwall, context fitted", "fake, three terms"
_MARGINS = tuple(str(margin) for margin in MARGINS_PERCENT)


def part_provenance(tag: str) -> dict[str, Any]:
    """Returns what is needed to reproduce or compare one part of a result."""
    found = knob_report.provenance() | {"schema": SCHEMA, "tag": tag}
    return found | {"versions": found["versions"] | {name: _version(name) for name in _LIBRARIES}}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# -- tables ------------------------------------------------------------------------------------------------------------


def arm_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns errors and false fits of each arm, as a Markdown table."""
    margins = " / ".join(f"+{margin}" for margin in _MARGINS)
    has_saving = any("memory_saved_share" in figures for figures in arms.values())
    saving = " memory saved |" if has_saving else ""
    lines = [
        f"| arm | rows | median | p90 | p95 | worst | too low | out of memory at {margins} % |{saving}",
        "|" + " --- |" * (9 if has_saving else 8),
    ]
    for name, figures in arms.items():
        rows = str(figures["num_rows"]) + (f" ({figures['no_answer']} without)" if figures.get("no_answer") else "")
        if "median" not in figures:
            lines.append(f"| {name} | {rows} |" + " |" * (7 if has_saving else 6))
            continue
        saved = _percent(figures["memory_saved_share"], 0) + " %" if "memory_saved_share" in figures else ""
        false_fits = " / ".join(_percent(figures["false_fits"][margin], 0) for margin in _MARGINS)
        lines.append(
            f"| {name} | {rows} | {_percent(figures['median'])} | {_percent(figures['p90'])} "
            f"| {_percent(figures['p95'])} | {figures['worst']:+.1%} | {_percent(figures['under_share'], 0)} "
            f"| {false_fits} % |" + (f" {saved} |" if has_saving else "")
        )
    return "\n".join(lines)


def _pair(figures: Mapping[str, Any]) -> str:
    return f"{_percent(figures['median'])} and {_percent(figures['p90'])}"


def _percent(share: float, digits: int = 1) -> str:
    """A share in percent, with a second digit where there is nothing but zeros before it."""
    if digits and 0 < share < 0.005:
        digits = 3
    return f"{100 * share:.{digits}f}"


def summaries(result: Mapping[str, Any]) -> str:
    """Returns the text of all parts that a result has: what the README shows."""
    parts = []
    if "cpu" in result:
        parts.append(_cpu_text(result["cpu"]))
    if "external" in result:
        parts.append(_external_text(result["external"]))
    return "\n\n".join((*parts, CLAIMS_NOTE, claims_table()))


CLAIMS_NOTE = (
    "**What others say of theirs.** [claimed] by the authors, [source] read in their code or data; on other machines "
    "and models, and measured by nobody here."
)


def _cpu_text(part: Mapping[str, Any]) -> str:
    tables = part["tables"]
    ours, margin = tables["arms"]["memwall"], tables["arms"]["memwall"]["margin"]
    worst = max(tables["worst"]["family"].items(), key=lambda item: abs(item[1]))
    silent = {name: figures.get("reasons") for name, figures in tables["arms"].items() if figures["num_rows"] == 0}
    notes = "".join(f" {name}: {'; '.join(reasons)}." for name, reasons in silent.items() if reasons)
    return "\n\n".join(
        (
            "**Against real CPU execution** (cpu-measured). Live bytes at the highest point of the first two steps, on "
            f"{tables['num_cases']} cases: 12 families x 6 optimizers x 3 precisions, predicted on fake tensors, "
            "measured by torch's profiler. Nothing is fitted in memwall's row; nothing of this says how CUDA behaves. "
            "Memory is saved on a device as large as the largest case needs. "
            f"Worst family: {worst[0]}, {worst[1]:+.2%}. A margin of {margin['margin']:.2%}, calibrated on the other "
            f"families, covers {margin['measured_coverage']:.1%} of a family left out. {_origin(part)}{notes}"
            if "median" in ours
            else f"{ours['num_rows']} cases: errors {', '.join(f'{error:+.3%}' for error in ours['errors'])}",
            arm_table(tables["arms"] | {f"memwall, {name} step alone": row for name, row in tables["phases"].items()}),
        )
    )


def _external_text(part: Mapping[str, Any]) -> str:
    tables = part["tables"]
    ours = tables["ok"][_OURS]
    if "median" not in ours:
        return f"{ours['num_rows']} measured runs: errors {', '.join(f'{error:+.1%}' for error in ours['errors'])}"
    margin, shipped = ours["margin"], tables["margins"]
    failed = f" {len(tables['failures'])} could not be recorded." if tables["failures"] else ""
    kinds = ", ".join(
        f"{kind} {_pair(arms[_OURS])} (three terms {_pair(arms[_THREE_TERMS])})"
        for kind, arms in tables["kinds"].items()
        if "median" in arms[_OURS]
    )
    by_kind = ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(shipped["fitted_coverage_by_kind"].items()))
    text = [
        "**Against others' A100** (external). What nvidia-smi showed for the card while timm models trained, "
        f"{ours['num_rows']} of {tables['num_runs']} runs of GPUMemNet (those not flagged as spikes).{failed} memwall: "
        "fake recording, translation, allocator simulation; the constant beside it, context and kernels, is fitted on "
        "the other families, as is everything in the other rows. Optimizer, precision and versions were not recorded; "
        f"SGD with momentum in float32 is assumed. {_origin(part)}",
        arm_table(tables["ok"]),
        f"A margin of {margin['margin']:.1%}, calibrated on the other families for {margin['wanted_coverage']:.0%}, "
        f"covers {margin['measured_coverage']:.1%} of the runs of families left out, in the worst family "
        f"{margin['lowest_family_coverage']:.0%}. The margin that `memwall estimate` adds is the published range of "
        f"the context, {MARGIN_SHARE:.0%} of reserved bytes and {CONVOLUTION_SHARE} times the tensors of the largest "
        f"convolution: the least that covers {shipped['wanted_coverage']:.0%} of these runs, rounded up. It is "
        f"{shipped['shipped_median_waste']:.0%} above the need in the median. Fitted on the other families it covers "
        f"{shipped['fitted_coverage']:.1%} of the runs of families left out ({by_kind}); what it does not cover are "
        "convolutions whose runs needed up to three times the memory at one batch size and not at the next, as "
        f"`cudnn.benchmark` does. {_false_fits_text(shipped['fitted_verdicts'])} "
        f"Median and p90 by kind, in percent: {kinds}.",
        "All runs, with those flagged as spikes:",
        arm_table({name: tables["all"][name] for name in (_THREE_TERMS, _OURS)}),
        "Where smaller batches of the same model were measured, the larger ones:",
    ]
    for probes, arms in tables["probes"].items():
        text.append(f"Known: batch {probes}.\n\n{arm_table(arms)}")
    for probe, arms in tables["one_probe"].items():
        text.append(f"Known: batch {probe} alone.\n\n{arm_table(arms)}")
    if part["known_runs"]:
        text += [KNOWN_NOTE, known_table(part["known_runs"], tables["context_bytes"])]
    return "\n\n".join(text)


def _false_fits_text(by_device: Mapping[str, Mapping[str, int]]) -> str:
    """How many of the verdicts "fits" on devices of these sizes were false."""
    said = {size: found["fits_said_fits"] + found["not_said_fits"] for size, found in by_device.items()}
    false = {size: found["not_said_fits"] for size, found in by_device.items()}
    *sizes, last = by_device
    counts = ", ".join(f"{false[size]} of {said[size]}" for size in by_device)
    share = sum(false.values()) / sum(said.values())
    return (
        f'Asked so whether each run fits on a device of {", ".join(sizes)} and {last} GB, the verdict "fits" is false '
        f"in {share:.1%}: {counts}."
    )


KNOWN_NOTE = (
    "Runs with known settings (`prediction_rows.py`), row by row. T4: reserved bytes and 135 MiB, as it was measured; "
    "which half precision was on is not recorded, and decides the attention kernel. A100: reserved bytes and the "
    "context fitted above; the device is a guess."
)


def known_table(rows: Sequence[Mapping[str, Any]], context_bytes: int) -> str:
    """Returns measured and predicted GiB of single runs, as a Markdown table."""
    lines = [
        "| device | model | batch | autocast | measured GiB [external] | memwall GiB [simulated] | error "
        "| error of the published estimate [claimed] |",
        "|" + " --- |" * 8,
    ]
    for row in rows:
        is_t4 = row["source"] == "T4"
        predicted = row["reserved_bytes"] + (T4_CONTEXT_BYTES if is_t4 else context_bytes)
        device, shape = "T4" if is_t4 else "A100?", f"{row['batch_size']} x {row['size']}"
        error, theirs = (size / row["measured_bytes"] - 1 for size in (predicted, row["theirs_bytes"]))
        lines.append(
            f"| {device} | {row['model']} | {shape} | {row['autocast']} "
            f"| {row['measured_bytes'] / 2**30:.2f} | {predicted / 2**30:.2f} | {error:+.1%} | {theirs:+.1%} |"
        )
    return "\n".join(lines)


def _origin(part: Mapping[str, Any]) -> str:
    versions = part["versions"]
    return (
        f"{part['wall_seconds'] / 60:.0f} minutes on one core, torch {versions['torch']}, {part['cpu']}, "
        f"commit {part['commit'][:12]}."
    )


# -- files -------------------------------------------------------------------------------------------------------------


def write_result(result: Mapping[str, Any], output: Path) -> None:
    """Writes the JSON, and if it is the published one its section of the README."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = as_json(result)
    output.write_text(text)
    if output == RESULT:
        README.write_text(with_section(README.read_text(), section(json.loads(text))))


def section(result: Mapping[str, Any]) -> str:
    """Returns what stands in the README about a result."""
    return f"{NOTE}\n\n{summaries(result)}"


NOTE = (
    "`python benchmarks/prediction.py --runs CSV`; rows and all other figures are in `results/cpu/prediction.json`. "
    'Errors are relative and in percent, quantiles of their magnitude; "out of memory" is the share of runs that need '
    'more than the prediction and a margin of so much; "memory saved" is what a cap at the prediction and the arm\'s '
    "own 95 % margin leaves of the device to others, in the mean, nothing for a run that it kills. With the median and "
    "the share out of memory at the prediction itself (+0) it is what the literature compares. "
    "The file of measured runs is not in this repository, since its licence is not settled: it is a selection of "
    "GPUMemNet's published sheet (itu-rad/GPUMemNet, doi 10.1145/3805621.3807621) with the columns that "
    "`prediction_runs.py` names."
)


def as_json(result: Mapping[str, Any]) -> str:
    """Returns the result as JSON with one line per row."""
    parts = []
    for name, part in result.items():
        head = json.dumps(rounded({key: value for key, value in part.items() if key != "rows"}), indent=1)
        rows = ",\n".join(json.dumps(rounded(row)) for row in part["rows"])
        parts.append(f'"{name}": {head[:-2]},\n "rows": [\n{rows}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(value: Any) -> Any:
    """Returns a result as it is written: shares to nine digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


def with_section(page: str, text: str) -> str:
    """Returns the page with this benchmark's section replaced, or added at its end; all else as it was."""
    if BEGIN not in page or END not in page:
        page = f"{page.rstrip()}\n\n{HEADING}\n\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}"
