"""Blocks that operators allocate for themselves on a CUDA device, beside those that torch's allocator saw there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.cuda_device import cuda_device_of
from memwall.predict.cuda.workspaces import FORMULAS
from memwall.trace.workspaces import AheadOfResults

ROWS = json.loads((Path(__file__).parents[1] / "golden/cuda_operator_blocks.json").read_text())["rows"]
OPERATORS = sorted({row["operator"] for row in ROWS})


def made(value: Any) -> Any:
    """Returns an argument without bytes."""
    if not isinstance(value, dict):
        return value
    last = sum((size - 1) * stride for size, stride in zip(value["shape"], value["strides"], strict=True))
    base = torch.empty(last + 1 + value["offset"], dtype=getattr(torch, value["dtype"]), device="meta")
    return base.as_strided(value["shape"], value["strides"], value["offset"])


@pytest.mark.parametrize("name", OPERATORS)
def test_blocks_are_those_that_torch_allocates(name: str) -> None:
    """Each block is right to the byte, and comes before the results or after them as there.

    The devices have different numbers of multiprocessors and of threads on each.
    """
    packet, _, overload = name.partition(".")
    formula = FORMULAS[getattr(getattr(torch.ops.aten, packet), overload)]
    wrong = []
    for row in ROWS:
        if row["operator"] == name:
            device = cuda_device_of(hardware_named(row["device"]))
            found = formula(device, tuple(map(made, row["args"])), {})
            if sorted(filter(None, found)) != sorted(row["blocks"]):
                wrong.append((row, found))
            if [int(block) for block in found if isinstance(block, AheadOfResults)] != row["ahead"]:
                wrong.append((row, found))
    assert not wrong
    assert any(row["blocks"] for row in ROWS if row["operator"] == name)


def test_devices_of_three_kinds_were_seen() -> None:
    devices = {cuda_device_of(hardware_named(row["device"])) for row in ROWS}
    assert len({device.multiprocessors for device in devices}) >= 3
