"""What memwall predicts for this machine's GPU against what a training run holds there; without a GPU it refuses.

    python benchmarks/gpu_truth.py [--seconds 540] [--part NAME ...] [--device NAME] [--output FILE]

Three parts share the time; what a part leaves over goes to the next, and what is not reached is listed.

histories: the programs of `allocator_programs.py` with every allocation recorded, one of them under other settings,
too. L1: the simulated allocator repeats each event and all statistics. L2: from the history under default settings it
gives the peaks that were measured under the others. Records go to tests/golden/, snapshots beside the result.

caps: the least that three cases of the zoo may reserve and still finish, by bisection.

zoo: the cases of `prediction.py`, each in a fresh process: predicted before CUDA starts, then trained. Three quantities
are compared: allocated and reserved bytes as torch counts them, and the process as the driver does (with nothing else
on the device). Cases come in an order that has every family, optimizer and precision early; those of an earlier result
for the same device, zoo and commit are kept, so that a second call goes on. Whatever fails is named, and the rest runs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from allocator_programs import RUNS
from gpu_caps import CAP_CASES, measure_caps
from gpu_child import Budget, CaseFailed, Child, prepared
from gpu_device import device_name, hardware_here, has_device, is_phantom, slug_of, tag, used_bytes
from gpu_histories import record_histories
from knob_report import provenance
from msgspec.structs import replace
from prediction_metrics import against_margin, summary
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, zoo_sha256

from memwall.machine.hardware import Hardware, hardware_named
from memwall.predict.cuda.context import with_measured_context

ROOT = Path(__file__).parents[1]
QUANTITIES = ("allocated", "reserved", "process")
TARGETS = {"allocated": {"median": 0.01}, "reserved": {"median": 0.02, "p95": 0.08}}
MOST_FALSE_FITS = 0.01
"""Share of runs that a forecast with its default margin says fit where they do not."""
SHARES = {"histories": 0.2, "caps": 0.2, "zoo": 0.6}
"""Of the time, by part."""
_MOST_CASE_SECONDS = 60.0
_NUM_TINY = 1
Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """Every case once; a twelfth of the way through, each family has been there, then each in another combination."""
    combinations = list(product(PRECISIONS, OPTIMIZERS))
    for number in range(len(combinations)):
        for offset, family in enumerate(FAMILIES):
            # 7 has no factor in common with the number of combinations, so that each is met once by each family.
            precision, optimizer = combinations[(number + 7 * offset) % len(combinations)]
            yield family, precision, optimizer


def tables(rows: Sequence[dict[str, Any]], device_bytes: int | None = None) -> dict[str, Any]:
    """Errors of each quantity, and how often a forecast said "fits" on a device that is too small by a byte.

    Args:
        device_bytes: the device's memory, for the share of it that caps at the predictions would leave to others.
    """
    found: dict[str, Any] = {}
    families = [row["family"] for row in rows]
    for quantity in QUANTITIES:
        key = f"{quantity}_bytes"
        predicted, true = [r["predicted"][key] for r in rows], [r["measured"][key] for r in rows]
        found[quantity] = summary(predicted, true)
        if device_bytes is not None:
            found[quantity] |= against_margin(predicted, true, families, device_bytes)
    false_fits = [
        r["predicted"]["process_bytes"] + r["predicted"]["margin_bytes"] < r["measured"]["process_bytes"] for r in rows
    ]
    return {**found, "false_fits_share": sum(false_fits) / len(false_fits)}


def missed(table: dict[str, Any]) -> list[str]:
    """Targets that the figures do not meet, in words."""
    few = [f"{q}: {table[q]['num_rows']} rows are too few" for q in TARGETS if "median" not in table[q]]
    found = few + [
        f"{quantity} {name} {table[quantity][name]:.1%} > {most:.0%}"
        for quantity, targets in TARGETS.items()
        for name, most in targets.items()
        if name in table[quantity] and table[quantity][name] > most
    ]
    if table["false_fits_share"] > MOST_FALSE_FITS:
        found.append(f"false fits {table['false_fits_share']:.1%} > {MOST_FALSE_FITS:.0%}")
    return found


def with_context(hardware: Hardware) -> Hardware:
    """Gives a device what a process takes of it beside torch's allocator: as measured, or as a phantom is set."""
    if not is_phantom():
        return with_measured_context(hardware)
    context_bytes = int(os.environ.get("PHANTOM_CONTEXT_BYTES", 500 << 20))
    return replace(hardware, context_bytes=(context_bytes, context_bytes))


def has_changed_code() -> bool:
    """Whether anything differs from the commit but what a call writes: the second one is to go on from the first's."""
    command = ["git", "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!tests/golden"]
    return bool(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout)


def measure_zoo(
    hardware: Hardware, budget: Budget, left: Iterable[Case]
) -> Iterator[tuple[Case, dict[str, Any] | CaseFailed]]:
    """Rows of these cases, as long as there is time, or how one failed."""
    context = [str(num_bytes) for num_bytes in hardware.context_bytes]
    device = ("--device", hardware.name, "--context-bytes", *context)
    children = prepared(left, lambda case: Child(("gpu_truth_case.py", *case, *device)))
    try:
        for case, child in children:
            if not budget.seconds:
                child.end()
                return
            try:
                yield case, child.answer({"used_bytes": used_bytes()}, min(_MOST_CASE_SECONDS, budget.seconds + 20))
            except CaseFailed as error:
                yield case, error
    finally:
        children.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing further after so long")
    parser.add_argument("--part", action="append", choices=tuple(SHARES), help="default: all three")
    parser.add_argument("--device", type=hardware_named, metavar="NAME", help="entry of hardware.toml")
    parser.add_argument("--tiny", action="store_true", help="a few of each part, to see that nothing breaks")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not has_device("gpu_truth"):
        return 2
    parts = [part for part in SHARES if part in (options.part or SHARES)]
    budget = Budget(options.seconds, {part: SHARES[part] for part in parts})
    name = device_name()
    hardware = with_context(options.device or hardware_here())
    slug = slug_of(name)
    output = options.output or ROOT / "benchmarks" / "results" / slug / "prediction.json"
    golden = output.parent / "golden" if is_phantom() else ROOT / "tests" / "golden" / slug
    document: dict[str, Any] = {
        **provenance(),
        "has_uncommitted_changes": has_changed_code(),
        "schema": "memwall.gpu-truth/2",
        "tag": tag(),
        "device": name,
        "hardware": hardware.name,
        "context_bytes": list(hardware.context_bytes),
        "device_bytes": hardware.usable_bytes,
        "zoo_sha256": zoo_sha256(),
    }
    rows = _earlier_rows(output, document)
    output.parent.mkdir(parents=True, exist_ok=True)

    def begun(part: str) -> bool:
        """Gives a part its time; returns whether it was asked for."""
        if part in parts:
            budget.begin(part)
        return part in parts

    runs = () if not begun("histories") else RUNS[:1] + RUNS[3:4] if options.tiny else RUNS
    document["histories"] = record_histories(runs, golden, output.parent / "snapshots", budget)
    chosen = () if not begun("caps") else CAP_CASES[:1] if options.tiny else CAP_CASES
    document["caps"] = measure_caps(chosen, used_bytes, budget, is_tiny=options.tiny)
    broken = []
    done = {_case_of(row) for row in rows}
    num_most = 0 if not begun("zoo") else _NUM_TINY if options.tiny else None
    left = [case for case in cases() if case not in done][:num_most]
    for case, found in measure_zoo(hardware, budget, left):
        if isinstance(found, CaseFailed):
            broken.append(f"{' '.join(case)} failed")
            print(found, file=sys.stderr, flush=True)
            continue
        rows.append(found)
        print(_line(found), flush=True)
        _write(output, document, rows)
    document["tables"] = tables(rows, document["device_bytes"]) if rows else {}
    document["failures"] = failed(document["histories"], document["caps"]) + broken
    document["failures"] += [] if rows or "zoo" not in parts else ["no case of the zoo ran"]
    # A handful of cases is there to show that nothing breaks.
    document["missed"] = missed(document["tables"]) if rows and not options.tiny else []
    _write(output, document, rows)
    wrong = document["failures"] + document["missed"]
    print(f"wrote {output}: {len(rows)} of {len(list(cases()))} cases; {'; '.join(wrong) or 'every target is met'}")
    return 1 if wrong else 0


def failed(histories: dict[str, Any], caps: dict[str, Any]) -> list[str]:
    """What went wrong in the first two parts, or was not exact, in words."""
    return [
        *histories["failures"],
        *caps["failures"],
        *(f"{row['name']}: no L1 re-simulation: {row['difference']}" for row in histories["l1"] if row["difference"]),
        *(
            f"{row['name']} under {row['under']}: no L2 equality: {'; '.join(row['differences'])}"
            for row in histories["l2"]
            if row["differences"]
        ),
    ]


def _write(output: Path, document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """The result so far, and what it does not have."""
    reached = {_case_of(row) for row in rows}
    document["not_reached"] = [" ".join(case) for case in cases() if case not in reached]
    output.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n")


def _case_of(row: dict[str, Any]) -> Case:
    return row["family"], row["precision"], row["optimizer"]


def _earlier_rows(path: Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier result that still stand: same commit, device, zoo and versions, no changes then or now."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    same = all(earlier.get(key) == document[key] for key in ("schema", "commit", "device", "zoo_sha256", "versions"))
    is_changed = document["has_uncommitted_changes"] or earlier.get("has_uncommitted_changes")
    return list(earlier["rows"]) if same and not is_changed else []


def _line(row: dict[str, Any]) -> str:
    errors = [
        f"{quantity} {row['predicted'][f'{quantity}_bytes'] / row['measured'][f'{quantity}_bytes'] - 1:+.1%}"
        for quantity in QUANTITIES
    ]
    return f"{row['family']:>10} {row['precision']:<17} {row['optimizer']:<14} {', '.join(errors)}"


if __name__ == "__main__":
    sys.exit(main())
