"""Everything that a GPU is needed for, in one command, in order of value: one result file, one page, in 40 minutes.

    python benchmarks/gpu_day.py [--minutes 38] [--part NAME ...] [--again] [--tiny] [--output FOLDER]

Parts are programs of this folder, each in processes of its own and with a time limit: a part that fails, or is not done
in its time, is named and stops no other. FOLDER gets gpu_day.json and gpu_day.html, anew after each part. A second call
on the same device and commit does what failed or was not reached; time that is left goes to what was not reached, too.

Exit status 1: something failed, a goal is missed, or a part was not begun; 2: there is no CUDA device. `--tiny` shows
that nothing breaks, in two minutes on a phantom device (`make gpu-day-phantom`), where all figures are simulated.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_day_page import day_page
from gpu_device import device_name_by_child, has_device, is_phantom, slug_of, tag
from knob_report import provenance

from memwall.report.html import save_page

HERE = Path(__file__).parent
SCHEMA = "memwall.gpu-day/1"
# A part is told to begin nothing after most of its time; what it is doing then has the rest.
_SHARE_TO_BEGIN_IN = 0.85
_LEAST_MINUTES = 1.0
_TINY_SECONDS = 600.0
_SAYS = 400
Day = dict[str, Any]


class Part(NamedTuple):
    """One program and its place in the day."""

    name: str
    title: str
    program: str
    minutes: float
    environment: tuple[tuple[str, str], ...] = ()
    """Settings of a phantom on which it is tried."""
    reads: tuple[str, str] | None = None
    """An option that takes another part's file, and that part."""


VALUES = (("PHANTOM_NUMBERS", "1"),)
PARTS = (
    Part("truth", "Forecast against the device", "gpu_truth.py", 14),
    Part("kernels", "Fused kernels", "gpu_kernels.py", 9, (*VALUES, ("TRITON_INTERPRET", "1"))),
    Part(
        "budgets", "Live runs under budgets", "gpu_budgets.py", 8, (*VALUES, ("PHANTOM_CONTEXT_BYTES", str(32 << 20)))
    ),
    Part("link", "Between device and host", "gpu_link.py", 2, VALUES),
    Part("phantom", "The phantom against the device", "gpu_against_phantom.py", 5, reads=("--truth", "truth")),
)


def run_part(part: Part, folder: Path, minutes: float, *, is_tiny: bool) -> dict[str, Any]:
    """Runs a part to its end or for so long; returns what came of it, with whatever it wrote.

    `outcome` is "done", "failed" (it said what went wrong), "out of time" or "broken" (it ended without a result).
    """
    output = folder / f"{part.name}.json"
    command = [sys.executable, str(HERE / part.program), "--output", str(output)]
    seconds = _TINY_SECONDS if is_tiny else 60 * minutes * _SHARE_TO_BEGIN_IN
    command += ["--seconds", str(seconds), *(["--tiny"] if is_tiny else [])]
    if part.reads is not None:
        command += [part.reads[0], str(folder / f"{part.reads[1]}.json")]
    began, before = time.monotonic(), output.stat().st_mtime_ns if output.exists() else 0
    environment = {**os.environ, **(dict(part.environment) if is_phantom() else {})}
    with (folder / f"{part.name}.log").open("w+", errors="replace") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status: int | None = process.wait(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_all(process)
        log.seek(0)
        said = log.read().strip()[-_SAYS:]
    is_written = output.exists() and output.stat().st_mtime_ns > before
    result: dict[str, Any] = json.loads(output.read_text()) if is_written else {}
    failures = [*result.get("failures", [])]
    if status is None:
        failures.append(f"was not done after {minutes:.1f} minutes and was ended")
    elif status not in (0, 1) or not is_written:
        failures.append(f"ended with status {status}: {said}")
    outcome = "out of time" if status is None else "broken" if not is_written else "failed" if failures else "done"
    return {
        "title": part.title,
        "outcome": outcome,
        "seconds": time.monotonic() - began,
        "failures": failures,
        "missed": result.get("missed", []),
        "not_reached": result.get("not_reached", []),
        "result": result,
    }


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends a part and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_complete(found: dict[str, Any] | None) -> bool:
    """Returns whether a part has nothing left to do."""
    return found is not None and found["outcome"] == "done" and not found["not_reached"]


def spend_day(day: Day, parts: Sequence[Part], folder: Path, minutes: float, *, is_tiny: bool) -> None:
    """Runs parts in order as long as there is time; once more what did not reach all, while time is left."""
    stop = time.monotonic() + 60 * minutes
    for is_second in (False, True):
        for part in parts:
            found, left = day["parts"].get(part.name), (stop - time.monotonic()) / 60
            if is_complete(found) or (is_second and (is_tiny or found is None or not found["not_reached"])):
                continue
            if left < _LEAST_MINUTES:
                day["parts"].setdefault(part.name, _not_begun(part))
                continue
            print(f"{part.title}: at most {min(part.minutes, left):.1f} minutes", flush=True)
            day["parts"][part.name] = found = run_part(part, folder, min(part.minutes, left), is_tiny=is_tiny)
            for line in (*found["failures"], *found["missed"]):
                print(f"  {line}", flush=True)
            print(f"  {found['outcome']} after {found['seconds']:.0f} s", flush=True)
            _write(day, folder.parent)


def _not_begun(part: Part) -> dict[str, Any]:
    failures = ["was not begun: there was no time left"]
    return {
        "title": part.title,
        "outcome": "not begun",
        "seconds": 0.0,
        "failures": failures,
        "missed": [],
        "not_reached": [],
        "result": {},
    }


def _write(day: Day, output: Path) -> None:
    (output / "gpu_day.json").write_text(json.dumps(day, indent=1) + "\n")
    try:
        save_page(day_page(day), output / "gpu_day.html")
    except Exception:
        # A device is there for minutes: what was measured is kept, and the day goes on.
        traceback.print_exc()
        day["page_failures"] = [traceback.format_exc().strip().splitlines()[-1]]


def earlier_parts(path: Path, day: Day) -> dict[str, Any]:
    """Returns what an earlier call found that still stands: same device, size, commit and versions, nothing changed."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    same = all(earlier.get(key) == day[key] for key in ("schema", "commit", "device", "is_tiny", "versions"))
    is_changed = day["has_uncommitted_changes"] or earlier.get("has_uncommitted_changes")
    return dict(earlier["parts"]) if same and not is_changed else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=38.0, help="for all parts together")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="default: all")
    parser.add_argument("--again", action="store_true", help="keep nothing of an earlier call")
    parser.add_argument("--tiny", action="store_true", help="a little of each part")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/DEVICE")
    options = parser.parse_args()
    if not has_device("gpu_day"):
        return 2
    name = device_name_by_child()
    output = options.output or HERE / "results" / slug_of(name)
    folder = output / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    day: Day = {
        **provenance(),
        "schema": SCHEMA,
        "tag": tag(),
        "device": name,
        "is_tiny": options.tiny,
        "parts": {},
    }
    day["parts"] = {} if options.again else earlier_parts(output / "gpu_day.json", day)
    chosen = [part for part in PARTS if options.part is None or part.name in options.part]
    spend_day(day, chosen, folder, options.minutes, is_tiny=options.tiny)
    _write(day, output)
    wrong = day.get("page_failures", [])
    wrong += [f"{name}: {line}" for name, each in day["parts"].items() for line in (*each["failures"], *each["missed"])]
    print(f"wrote {output / 'gpu_day.json'} and gpu_day.html; {len(wrong)} failures and missed goals")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
