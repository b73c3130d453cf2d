"""Measures what a plan for ranks saves by setting single units of FSDP2: kept gathered, or gathered further ahead.

    python benchmarks/ranks_units.py      # four situations of eight devices; about three minutes

Each is planned as by `memwall plan --ranks 8`; beside the fastest plan stands the fastest of those that treat all units
alike and gather the next one only, as torch does by itself. No device is there: seconds are peaks of data sheets.
Writes results/cpu/ranks_units.json and the table of docs/ranks.md.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from revision import commit

from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.machine.node_links import link_named
from memwall.planning.ranks.search import plan_ranks
from memwall.planning.settings import Settings
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from hf_configurations import LLAMA_3_8B  # noqa: E402
from zoo import UNet  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cpu" / "ranks_units.json", ROOT / "docs" / "ranks.md"
NUM_RANKS, GIB = 8, 1 << 30


def llama(device: str) -> Trace:
    return _of_configuration(LLAMA_3_8B, device, batch=1, dtype="float32", autocast="bfloat16")


def unet(device: str) -> Trace:
    """Returns a step of a U-Net, whose inner blocks have most parameters and whose outer ones compute most."""
    workload = Workload(
        model=lambda: UNet(192, 4),
        batch=lambda: torch.zeros(4, 3, 256, 256),
        loss=lambda model, images: (model(images) - images).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
    return _traced(workload, device)


def _of_configuration(configuration: dict[str, Any], device: str, **options: Any) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(configuration))
        return _traced(str(path), device, sequence=4096, **options)


def _traced(spec: Any, device: str, **options: Any) -> Trace:
    return device_run_of_spec(spec, hardware_named(device), is_evaluated=False, **options).training


class Case(NamedTuple):
    """Describes a situation: one device on each node, or all on one without a link."""

    model: str
    made: Callable[[str], Trace]
    device: str
    link: str | None
    budget_gib: int


CASES = (
    Case("U-Net", unet, "l40s", None, 9),
    Case("U-Net", unet, "l40s", None, 10),
    Case("U-Net", unet, "l40s", None, 12),
    Case("Llama 3 8B", llama, "h100-80gb", "ethernet-100g", 44),
)


def planned(case: Case) -> dict[str, Any]:
    """Returns what was chosen, and its seconds beside those of the fastest plan without settings of units."""
    hardware = hardware_named(case.device)
    per_node = NUM_RANKS if case.link is None else 1
    link = None if case.link is None else link_named(case.link)
    settings = Settings(budget_bytes=case.budget_gib * GIB, hardware=hardware)
    made, ranks = plan_ranks(
        case.made(case.device), settings, num_ranks=NUM_RANKS, num_ranks_per_node=per_node, link=link
    )
    if made is None:
        raise SystemExit(f"nothing fits: {case}")
    fitting = [one for one in ranks.choices if one.fits and not one.reason.startswith("changes numerics")]
    alike = [one for one in fitting if one.step_seconds and _is_alike(one.sharding)]
    best = min(alike, key=lambda one: one.step_seconds or 0.0)
    chosen = next(one for one in ranks.choices if one.sharding == ranks.chosen)
    return {
        "model": case.model,
        "device": case.device,
        "link": case.link,
        "budget_bytes": settings.budget_bytes,
        "chosen": {"words": chosen.words, "step_seconds": chosen.step_seconds, "process_bytes": chosen.process_bytes},
        "alike": {"words": best.words, "step_seconds": best.step_seconds, "process_bytes": best.process_bytes},
    }


def _is_alike(sharding: Any) -> bool:
    return not isinstance(sharding, Fsdp2) or sharding == replace(sharding, num_kept=0, num_ahead=1)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows of docs/ranks.md."""
    lines = ["| model | devices, link, budget | chosen | a step | all units alike | a step | shorter by |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        where = f"{row['device']}, {row['link'] or 'one node'}, {row['budget_bytes'] // GIB} GiB"
        seconds, alike = row["chosen"]["step_seconds"], row["alike"]["step_seconds"]
        figures = f"{row['chosen']['words']} | {seconds:.3f} s | {row['alike']['words']} | {alike:.3f} s"
        lines.append(f"| {row['model']} | {where} | {figures} | {100 * (1 - seconds / alike):.1f} % |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for case in CASES:
        rows.append(planned(case))
        print(table(rows).splitlines()[-1], flush=True)
        about = {"tag": "simulated", "torch": torch.__version__, "commit": commit(), "num_ranks": NUM_RANKS}
        RESULTS.write_text(json.dumps(about | {"rows": rows}, indent=2, sort_keys=True) + "\n")
        head, _, rest = PAGE.read_text().partition("<!-- units: begin -->\n")
        _, _, tail = rest.partition("<!-- units: end -->")
        PAGE.write_text(f"{head}<!-- units: begin -->\n{table(rows)}\n<!-- units: end -->{tail}")


if __name__ == "__main__":
    main()
