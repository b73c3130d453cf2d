"""Compares forecasts for a card with what torch's own allocator counts on the phantom one. All simulated.

    phantom/run python benchmarks/phantom_truth.py [--cards NAME ...] [--seconds 240] [CASE ...]

Cases are those of the zoo on each card: twelve families, six optimizers, three precisions. One process makes all
forecasts, so that fake tensors know the results of operations that they have met; each case is trained on the device in
a process forked from one that has all imported. CASE is a family or family/precision/optimizer.

Rows of earlier calls for the same zoo are kept, so that a second call goes on: first with cases that are missing, then
with those that other code of memwall forecast; what was counted stays. The result is
benchmarks/results/simulated/phantom_truth.json, with a table for each card: errors of allocated and reserved bytes in
each phase of a run (build, first and steady step, evaluation, save, resume), against the goals, and each row that
deviates by more than 0.1 %, with what of a step's are tensors, remainders of blocks and segments.

On the phantom torch's dispatcher, kernels' host code and caching allocator are real; cuDNN's workspaces are 0 bytes.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_truth import Case
from knob_report import provenance
from phantom_forecast import PHASES, cause, foreseen
from phantom_phases import counted_phases
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, zoo_sha256

import memwall
from memwall.machine.hardware import Hardware, hardware_named

SCHEMA = "memwall.benchmarks.phantom_truth/3"
OUTPUT = Path(__file__).parent / "results/simulated/phantom_truth.json"
GOALS = {"allocated_bytes": {"median": 0.001, "worst": 0.01}, "reserved_bytes": {"median": 0.005, "worst": 0.03}}
CARDS = ("h100-80gb", "l4")
_NOTABLE = 0.001
Row = dict[str, Any]


def forked(work: Callable[[], Any]) -> Any:
    """Returns what a forked process, before which CUDA has not been touched, made of its work, or how that failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said = json.dumps(work())
        except Exception:
            said = json.dumps({"failure": traceback.format_exc().strip().splitlines()[-1][:300]})
        with os.fdopen(writer, "w") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"failure": f"ended with status {status}"}


def forecast_of(case: Case, hardware: Hardware) -> Row:
    """Returns the forecast of a case, or how that failed."""
    try:
        return foreseen(*case, hardware)  # type: ignore[arg-type]
    except Exception:
        return {"failure": traceback.format_exc().strip().splitlines()[-1][:300]}


class Forecaster:
    """Makes forecasts in a process of its own: where autograd has run no process can be forked that runs it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        context.Process(target=self._serve, args=(theirs,), daemon=True).start()

    def forecast(self, case: Case, hardware: Hardware) -> Row:
        """Returns the forecast of a case, or how that failed."""
        self._connection.send((case, hardware))
        return self._connection.recv()  # type: ignore[no-any-return]

    @staticmethod
    def _serve(connection: Connection) -> None:
        while True:
            connection.send(forecast_of(*connection.recv()))


def counted(case: Case, card: str) -> Row:
    """Returns what torch's allocator counts in the phases of a case on this card."""
    os.environ["PHANTOM_CARD"] = card
    return counted_phases(case, forked)


def rows_of(
    missing: Sequence[tuple[Case, Hardware]], old: dict[tuple[str, str], Row], forecaster: Forecaster
) -> Iterator[Row]:
    """Yields a row for each of these cases of one family; what was counted before is not counted again."""
    for case, hardware in missing:
        name = "/".join(case)
        begin = time.monotonic()
        forecast = forecaster.forecast(case, hardware)
        forecast_seconds = round(time.monotonic() - begin, 2)
        count = old.get((hardware.name, name), {}).get("counted")
        if count is None:
            count = counted(case, hardware.name)
        seconds = round(time.monotonic() - begin, 2)
        row: Row = {"device": hardware.name, "case": name, "forecast_code": forecast_code()}
        row |= {"seconds": seconds, "forecast_seconds": forecast_seconds}
        failures = [found["failure"] for found in (forecast, count) if "failure" in found]
        if "failure" not in count:
            row["counted"] = count
        yield {**row, "failure": failures[0]} if failures else {**row, "foreseen": forecast}


def groups() -> Iterator[list[Case]]:
    """Yields every case once, in groups of one family that have each optimizer once.

    After the first twelve groups each family has met each optimizer and each precision.
    """
    for turn in range(len(PRECISIONS)):
        for offset, family in enumerate(FAMILIES):
            yield [
                (family, PRECISIONS[(turn + offset + number) % len(PRECISIONS)], optimizer)
                for number, optimizer in enumerate(OPTIMIZERS)
            ]


@cache
def forecast_code() -> str:
    """Returns a hash of the code that forecasts are made by: a row of another one is forecast again."""
    folder = Path(memwall.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(file for part in ("predict", "trace") for file in (folder / part).rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def error(row: Row, step: str, quantity: str) -> float:
    return float(row["foreseen"][step][quantity] / row["counted"][step][quantity] - 1)


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """Median and worst errors of a card's rows, what of them misses its goal, and rows to be explained."""
    good = [row for row in rows if "failure" not in row]
    found: dict[str, Any] = {"num_rows": len(good), "failed": {r["case"]: r["failure"] for r in rows if "failure" in r}}
    missed = []
    for step in PHASES if good else ():
        for quantity, goals in GOALS.items():
            errors = [error(row, step, quantity) for row in good]
            figures = {"median": median(map(abs, errors)), "worst": max(errors, key=abs)}
            found[f"{step} {quantity}"] = figures
            missed += [f"{step} {quantity} {name}" for name, most in goals.items() if not abs(figures[name]) <= most]
    found["missed"] = missed if good else ["every case failed"]
    found["deviating"] = {
        row["case"]: {
            f"{s} {q}": [round(error(row, s, q), 5), cause(row["foreseen"][s], row["counted"][s], q)]
            for s in PHASES
            for q in GOALS
            if abs(error(row, s, q)) > _NOTABLE
        }
        for row in good
        if any(abs(error(row, s, q)) > _NOTABLE for s in PHASES for q in GOALS)
    }
    return found


def line(device: str, figures: dict[str, Any], quantity: str) -> str:
    """Returns a card's row of the published table of a quantity, in Markdown: median and worst errors by phase."""
    found = (figures[f"{phase} {quantity}"] for phase in PHASES)
    cells = " | ".join(f"{100 * each['median']:.3f}, {100 * abs(each['worst']):.2f} %" for each in found)
    return f"| {device} | {cells} |"


def result_of(rows: Sequence[Row]) -> dict[str, Any]:
    devices = sorted({row["device"] for row in rows})
    chosen = {device: [row for row in rows if row["device"] == device] for device in devices}
    return {
        **provenance(),
        "schema": SCHEMA,
        "tag": "simulated",
        "zoo_sha256": zoo_sha256(),
        "num_cases": len(CARDS) * len(FAMILIES) * len(OPTIMIZERS) * len(PRECISIONS),
        "tables": {name: table(of_name) for name, of_name in sorted(chosen.items())},
        "rows": sorted(rows, key=lambda row: (row["device"], row["case"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", type=hardware_named, default=[hardware_named(card) for card in CARDS])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--stale", action="store_true", help="forecast rows of other code again, which come last else")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("cases", nargs="*", help="FAMILY, or FAMILY/PRECISION/OPTIMIZER; done again if named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    same = before.get("zoo_sha256") == zoo_sha256() and before.get("schema") == SCHEMA
    rows: dict[tuple[str, str], Row] = {(r["device"], r["case"]): r for r in before.get("rows", []) if same}
    asked = [
        [case for case in group if not options.cases or {case[0], "/".join(case)} & set(options.cases)]
        for group in groups()
    ]

    def is_stale(case: Case, card: Hardware, *, is_missing: bool) -> bool:
        row = rows.get((card.name, "/".join(case)))
        if options.cases:
            return is_missing
        return row is None if is_missing else row is not None and row.get("forecast_code") != forecast_code()

    for family in FAMILIES.values():
        family.model()  # what it imports, forked processes have
    for make in OPTIMIZERS.values():
        make([torch.nn.Parameter(torch.zeros(1))])
    forecaster = Forecaster()
    for is_missing in (False, True) if options.stale else (True, False):
        # A turn of all families on one card, and then on the next.
        turns = [asked[at : at + len(FAMILIES)] for at in range(0, len(asked), len(FAMILIES))]
        for group, card in ((group, card) for turn in turns for card in options.cards for group in turn):
            pairs = [(case, card) for case in group if is_stale(case, card, is_missing=is_missing)]
            if not pairs or time.monotonic() - begin > options.seconds:
                continue
            for row in rows_of(pairs, rows, forecaster):
                rows[row["device"], row["case"]] = row
                print(json.dumps(row), file=sys.stderr, flush=True)
            options.output.write_text(json.dumps(result_of(list(rows.values())), indent=1) + "\n")
    print(json.dumps(result_of(list(rows.values()))["tables"], indent=1))


if __name__ == "__main__":
    main()
