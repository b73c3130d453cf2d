"""One family of the zoo in one precision, in a process of its own: run by `prediction.py`.

    python benchmarks/prediction_case.py llama bfloat16 adamw-foreach adafactor

Prints one JSON object per optimizer.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from prediction_arms import LIBRARIES, NoAnswer, measured, memwall, two_probes
from prediction_child import own_standard_output
from prediction_zoo import FAMILIES, Precision, workload
from scratch_workspaces import ScratchWorkspaces


def case(family: str, precision: Precision, optimizer: str, workspaces: ScratchWorkspaces) -> dict[str, Any]:
    """What ran and what was predicted."""
    chosen = FAMILIES[family]
    sizes = (chosen.num_samples // 4, chosen.num_samples // 2)
    peaks = [max(measured(workload(family, optimizer, precision, size)).values()) for size in sizes]
    arms: dict[str, Any] = {"two probes": two_probes(sizes, (peaks[0], peaks[1]), chosen.num_samples)}
    reasons: dict[str, str] = {}
    for name, arm in LIBRARIES.items():
        try:
            arms[name] = arm(workload(family, optimizer, precision))
        except NoAnswer as reason:
            arms[name], reasons[name] = None, str(reason)
    return {
        "family": family,
        "precision": precision,
        "optimizer": optimizer,
        "measured": measured(workload(family, optimizer, precision)),
        "memwall": memwall(workload(family, optimizer, precision), workspaces, chosen.mask_share),
        "arms_bytes": arms,
        "no_answer": reasons,
    }


def main(arguments: Sequence[str]) -> None:
    """Runs the cases named; standard output carries nothing but the lines."""
    family, named, *optimizers = arguments
    precision = cast(Precision, named)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workspaces = ScratchWorkspaces()
    with own_standard_output() as lines:
        for optimizer in optimizers:
            print(json.dumps(case(family, precision, optimizer, workspaces)), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
