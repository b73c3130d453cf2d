"""Counts what becomes of the training scripts of tests/scenarios under each technique, and writes the table.

    python benchmarks/scenario_table.py [--seconds S] [--arm ARM ...] [NAME ...]

Each script trains plainly, under each technique alone, and under the plan that memwall makes itself from the recorded
step, its tensors said to be a thousand times as large: for 70 % of what the step adds to the process, or for the least
that has a plan. It ends with the same bits; with the same bits, a technique having been dropped for a block, with the
reason in the report; or in the one clear error that memwall has for it. What ends otherwise is named, and the status is
1 then.

Without names writes results/cpu/scenarios.json, and the table in docs/guarantees.md; with --arm those ways alone,
beside the others of the last record. Scripts take turns in an order that is drawn once, so that a share of them is of
all kinds.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memwall.errors import MemwallError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from scenarios import autograd, calls, hooks, layers, loops, modules, procedures, python_state, weights  # noqa: F401
from scenarios.arms import ARMS, Result, train
from scenarios.corpus import SCENARIOS, Scenario

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "cpu" / "scenarios.json"
PAGE = HERE.parent / "docs" / "guarantees.md"
BEGIN, END = "<!-- benchmarks/scenario_table.py writes from here -->", "<!-- to here -->"
OUTCOMES = ("equal", "equal, dropped with a reason", "one clear error", "different", "raw error")


def outcome(scenario: Scenario, arm: str, plain: Result) -> str:
    """Returns what becomes of a script under a technique."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = train(scenario, arm, Path(folder))
        except MemwallError:
            return "one clear error"
        except Exception as error:
            print(f"{scenario.name} under {arm}: {error!r}", flush=True)
            return "raw error"
    if found := result.differences(plain):
        print(f"{scenario.name} under {arm}: {found}", flush=True)
        return "different"
    return "equal, dropped with a reason" if result.lost else "equal"


def name_of(ended: str) -> str:
    """Returns the name of an outcome's count in the record."""
    return f"num_{ended.replace(',', '').replace(' ', '_')}"


def table(record: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table: how many scripts end how, by technique."""
    scripts = f"{record['num_run']} of {record['num_scripts']}"
    lines = [f"| technique | scripts run | {' | '.join(OUTCOMES)} |", f"| --- | --- |{' --- |' * len(OUTCOMES)}"]
    for arm, found in record["outcomes"].items():
        lines.append(f"| {arm} | {scripts} | {' | '.join(str(found.get(name_of(one), 0)) for one in OUTCOMES)} |")
    return lines


def write(record: Mapping[str, Any]) -> None:
    """Writes the record, and its table on the page."""
    OUTPUT.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(table(record)) + f"\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Trains every script under every technique; returns 1 where one ends otherwise than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts of the corpus; by default all of them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further script begins")
    parser.add_argument("--arm", action="append", choices=ARMS, help="a way to train; by default all of them")
    args = parser.parse_args()
    names: list[str] = args.names or random.Random(0).sample(list(SCENARIOS), len(SCENARIOS))
    begin, num_run = time.monotonic(), 0
    torch.set_num_threads(1)
    outcomes: dict[str, Counter[str]] = {arm: Counter() for arm in args.arm or ARMS}
    for scenario in map(SCENARIOS.__getitem__, names):
        if time.monotonic() - begin > args.seconds:
            break
        num_run += 1
        plain = train(scenario, None, Path())
        for arm, counts in outcomes.items():
            counts[name_of(outcome(scenario, arm, plain))] += 1
    record: dict[str, Any] = {"tag": "cpu-measured", "num_scripts": len(names), "num_run": num_run}
    record["outcomes"] = outcomes
    print("\n".join(table(record)))
    if not args.names:
        before = json.loads(OUTPUT.read_text())
        if args.arm and before["num_run"] == num_run:
            record["outcomes"] = {arm: outcomes.get(arm, before["outcomes"].get(arm, {})) for arm in ARMS}
        write(record)
    return int(any(counts["num_different"] or counts["num_raw_error"] for counts in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
