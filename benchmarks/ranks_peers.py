"""The scripts by which Accelerate tests itself on several processes, on two gloo ranks: alone, and with memwall.

    python benchmarks/ranks_peers.py                            # all; 15 minutes on two cores
    python benchmarks/ranks_peers.py --scripts test_sync.py test_ops.py

Each script that accelerate installs (accelerate/test_utils/scripts) runs three times by torchrun: as it is, through
`memwall run` with a budget that is never reached, and so with `--report`, for which memwall records the first step. A
script is as without memwall if it ends with the same status and each rank prints the same lines in the same order;
seconds, folders and ports in them, and what memwall says itself, are not compared. One that ends with an error alone is
not run again.
Writes results/cpu/ranks_peers.json and the table of docs/ranks.md.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import accelerate
from revision import commit

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cpu" / "ranks_peers.json", ROOT / "docs" / "ranks.md"
FORMS = ("alone", "budget", "report")
TIMEOUT_SECONDS = 180
NO_STEP = "finished without a whole training step"
VARIES = re.compile(r"\d+(\.\d+)?s\b|/tmp/\S+|:\d{4,5}\b")


def arguments(form: str, folder: Path) -> list[str]:
    """Returns what stands between torchrun's options and the script."""
    if form == "alone":
        return []
    report = ["--report", str(folder / "run.json")] if form == "report" else []
    return ["-m", "memwall", "run", "--budget", "8GiB", *report]


def ended(script: Path, form: str) -> dict[str, Any]:
    """Runs a script on two ranks; returns its status, each rank's lines, and what it said where it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch += ["--redirects", "3", "--log-dir", str(folder / "logs")]
        with subprocess.Popen(
            [*launch, *arguments(form, folder), str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            start_new_session=True,
        ) as process:
            try:
                status = process.wait(timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                return {"status": None, "error": f"does not end within {TIMEOUT_SECONDS} s"}
        printed = [compared(path.read_text()) for path in sorted((folder / "logs").rglob("*/[01]/stdout.log"))]
        said = "".join(path.read_text() for path in sorted((folder / "logs").rglob("*/[01]/stderr.log")))
        found: dict[str, Any] = {"status": status, "lines": printed, "has_report": (folder / "run.json").exists()}
        if status:
            errors = re.findall(r"^(?:\[rank\d\]: *)?((?:\w+\.)*\w*Error: .*|memwall: .*)$", said, re.MULTILINE)
            found["error"] = (errors or said.splitlines()[-1:] or ["no message"])[0]
        return found


def compared(printed: str) -> list[str]:
    """Returns the lines that a rank of the script prints, without what differs between any two runs."""
    lines = (VARIES.sub("", line).strip() for line in printed.splitlines() if not line.startswith("memwall"))
    return [line for line in lines if line]


def verdict(alone: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns how a run with memwall compares with the one alone."""
    if other.get("lines") != alone["lines"]:
        return other.get("error", "other lines")
    if NO_STEP in other.get("error", ""):
        return "as without; then status 2, since it has trained nothing"
    return "as without" if other["status"] == 0 else other["error"]


def of_script(name: str) -> dict[str, Any]:
    began = time.monotonic()
    alone = ended(SCRIPTS / name, "alone")
    row: dict[str, Any] = {"commit": commit(), "alone_status": alone["status"]}
    if alone["status"] != 0:
        return row | {"verdict": "does not run here", "why": alone["error"]}
    row["num_lines"] = sum(len(lines) for lines in alone["lines"])
    for form in FORMS[1:]:
        other = ended(SCRIPTS / name, form)
        row[form] = verdict(alone, other)
        row[f"{form}_is_reported"] = other.get("has_report", False)
    row["seconds"] = round(time.monotonic() - began)
    return row | {"verdict": "; ".join(sorted({row[form] for form in FORMS[1:]}))}


def table(about: dict[str, Any]) -> str:
    """Returns the rows of docs/ranks.md."""
    ran = {name: row for name, row in about["scripts"].items() if row["alone_status"] == 0}
    others = {name: row for name, row in about["scripts"].items() if row["alone_status"] != 0}
    lines = [
        f"With torch {about['torch']} and accelerate {about['accelerate']}:",
        "",
        "| script | lines compared | with a budget | recorded, with a report |",
        "| --- | --- | --- | --- |",
        *(f"| {name} | {row['num_lines']} | {row['budget']} | {row['report']} |" for name, row in ran.items()),
        "",
        "| script | why it does not run on two gloo ranks, without memwall |",
        "| --- | --- |",
        *(f"| {name} | {short(row['why'])} |" for name, row in others.items()),
    ]
    return "\n".join(lines)


def short(why: str) -> str:
    return why.replace("|", "/").partition(". ")[0].partition(", but got")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    found = [str(path.relative_to(SCRIPTS)) for path in sorted(SCRIPTS.rglob("test_*.py"))]
    parser.add_argument("--scripts", nargs="*", default=found)
    for name in parser.parse_args().scripts:
        row = of_script(name)
        print(name, row["verdict"], row.get("why", ""), flush=True)
        known = json.loads(RESULTS.read_text())["scripts"] if RESULTS.exists() else {}
        about = {"tag": "cpu-measured", "scripts": known | {name: row}}
        about |= {package: importlib.metadata.version(package) for package in ("torch", "accelerate")}
        RESULTS.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        before, _, rest = PAGE.read_text().partition("<!-- peers: begin -->\n")
        _, _, after = rest.partition("<!-- peers: end -->")
        PAGE.write_text(f"{before}<!-- peers: begin -->\n{table(about)}\n<!-- peers: end -->{after}")


if __name__ == "__main__":
    main()
