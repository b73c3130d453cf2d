"""What memwall predicts for this machine's GPU against what a training run holds there; without a GPU it refuses.

    python benchmarks/gpu_truth.py [--seconds 540] [--device NAME] [--output FILE]

The zoo of `prediction.py`, each case in a fresh process: predicted before CUDA starts, then trained. Three quantities
are compared: allocated and reserved bytes as torch counts them, and the process as the driver does (with nothing else
on the device). Cases come in an order that has every family, optimizer and precision early; those of an earlier result
for the same device and zoo are kept, so that a second call goes on. Some runs also record their allocations: the
simulated allocator must hold what the recording did, to the byte, and the histories are kept under tests/golden/.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import zstandard
from knob_report import provenance
from prediction_metrics import summary
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS, zoo_sha256

from memwall.errors import UsageError
from memwall.predict.hardware import Hardware, hardware_named, hardware_names
from memwall.predict.snapshot_analysis import analyse_device
from memwall.predict.snapshot_settings import with_settings
from memwall.trace.snapshot import load_snapshot

ROOT = Path(__file__).parents[1]
QUANTITIES = ("allocated", "reserved", "process")
TARGETS = {"allocated": {"median": 0.01}, "reserved": {"median": 0.02, "p95": 0.08}}
MOST_FALSE_FITS = 0.01
"""Share of runs that a forecast with its default margin says fit where they do not."""
_SETTINGS = ("", "expandable_segments:True")
_HISTORY_FAMILIES = ("llama", "resnet", "t5")
Case = tuple[str, str, str]


def hardware_here(name: str) -> Hardware:
    """The entry of hardware.toml for a device as CUDA names it, "NVIDIA A100-SXM4-80GB".

    Raises:
        UsageError: there is none.
    """
    words = name.lower().replace("-", " ").split()
    fitting = [known for known in hardware_names() if all(part in words for part in known.split("-"))]
    if not fitting:
        raise UsageError(f"'{name}' is in no entry of hardware.toml; name the nearest one with --device")
    return hardware_named(max(fitting, key=len))


def cases() -> Iterator[Case]:
    """Every case once; a twelfth of the way through, each family has been there, then each in another combination."""
    combinations = list(product(PRECISIONS, OPTIMIZERS))
    for number in range(len(combinations)):
        for offset, family in enumerate(FAMILIES):
            # 7 has no factor in common with the number of combinations, so that each is met once by each family.
            precision, optimizer = combinations[(number + 7 * offset) % len(combinations)]
            yield family, precision, optimizer


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of each quantity, and how often a forecast said "fits" on a device that is too small by a byte."""
    found: dict[str, Any] = {}
    for quantity in QUANTITIES:
        key = f"{quantity}_bytes"
        found[quantity] = summary([r["predicted"][key] for r in rows], [r["measured"][key] for r in rows])
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


def _used_bytes() -> int:
    """What the device holds while no process of ours is on it, by nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]) << 20


def _run(case: Case, hardware: Hardware, *, history: Path | None = None, settings: str = "") -> dict[str, Any]:
    options = ["--used-bytes", str(_used_bytes()), "--device", hardware.name]
    if history is not None:
        options += ["--history", str(history)]
    # torch reads them when it is loaded.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, str(Path(__file__).parent / "gpu_truth_case.py"), *case, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _histories(hardware: Hardware, folder: Path) -> list[dict[str, Any]]:
    """Recorded runs, kept in `folder`, and whether the simulated allocator holds the same."""
    found = []
    folder.mkdir(parents=True, exist_ok=True)
    for family, settings in product(_HISTORY_FAMILIES, _SETTINGS):
        case = (family, "autocast-bfloat16", "adamw-foreach")
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "history.pickle"
            row = _run(case, hardware, history=path, settings=settings)
            snapshot = load_snapshot(path)
            analysis = with_settings(analyse_device(snapshot, 0)[0], snapshot, torch.__version__)
            name = f"{family}-{'expandable' if settings else 'default'}.pickle.zst"
            (folder / name).write_bytes(zstandard.compress(path.read_bytes(), 19))
        searched = analysis.settings
        found.append(
            {
                "file": name,
                "settings": settings,
                "measured_reserved_bytes": row["measured"]["reserved_bytes"],
                "simulated_reserved_bytes": searched.replayed_bytes if searched else None,
                "notes": list(analysis.notes),
            }
        )
        print(f"{name}: {found[-1]['simulated_reserved_bytes']} simulated, {found[-1]['measured_reserved_bytes']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no further case after so long")
    parser.add_argument("--device", type=hardware_named, metavar="NAME", help="entry of hardware.toml")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"gpu_truth: needs a CUDA device, and torch {torch.__version__} finds none here; nothing was measured, "
            "nothing written. Run it on a GPU machine, with torch's CUDA build.",
            file=sys.stderr,
        )
        return 2
    begin = time.monotonic()
    name = torch.cuda.get_device_name()
    hardware = options.device or hardware_here(name)
    slug = name.lower().replace(" ", "-")
    output = options.output or ROOT / "benchmarks" / "results" / slug / "prediction.json"
    document: dict[str, Any] = {
        **provenance(),
        "schema": "memwall.gpu-truth/1",
        "tag": "gpu-measured",
        "device": name,
        "hardware": hardware.name,
        "zoo_sha256": zoo_sha256(),
    }
    rows = _earlier_rows(output, document)
    done = {(row["family"], row["precision"], row["optimizer"]) for row in rows}
    document["histories"] = _histories(hardware, ROOT / "tests" / "golden" / slug)
    for case in cases():
        if time.monotonic() - begin > options.seconds:
            break
        if case not in done:
            rows.append(_run(case, hardware))
            print(_line(rows[-1]), flush=True)
    document |= {"rows": rows, "tables": tables(rows)}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    failures = missed(document["tables"])
    failures += [
        f"{h['file']}: the simulated allocator differs"
        for h in document["histories"]
        if h["simulated_reserved_bytes"] != h["measured_reserved_bytes"]
    ]
    print(f"wrote {output}: {len(rows)} of {len(list(cases()))} cases; {'; '.join(failures) or 'every target is met'}")
    return 1 if failures else 0


def _earlier_rows(path: Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier result that still stand: same commit, device, zoo and versions."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    same = all(earlier.get(key) == document[key] for key in ("commit", "device", "zoo_sha256", "versions"))
    return list(earlier["rows"]) if same and not document["has_uncommitted_changes"] else []


def _line(row: dict[str, Any]) -> str:
    errors = [
        f"{quantity} {row['predicted'][f'{quantity}_bytes'] / row['measured'][f'{quantity}_bytes'] - 1:+.1%}"
        for quantity in QUANTITIES
    ]
    return f"{row['family']:>10} {row['precision']:<17} {row['optimizer']:<14} {', '.join(errors)}"


if __name__ == "__main__":
    sys.exit(main())
