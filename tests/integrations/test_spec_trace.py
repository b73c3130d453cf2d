"""Any SPEC: a configuration or a factory, and what neither is."""

from pathlib import Path

import pytest

from memwall.errors import TraceError, UsageError
from memwall.integrations.spec_trace import device_trace_of_spec, workload_of_spec
from memwall.predict.hardware import hardware_named

A100 = hardware_named("a100-80gb")
FACTORY = """
import torch
from memwall import Workload

def small():
    return Workload(
        model=lambda: torch.nn.Linear(8, 8),
        batch=lambda: torch.ones(4, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )

def broken():
    workload = small()
    return Workload(
        model=workload.model, batch=lambda: torch.ones(4, 9), loss=workload.loss, optimizer=workload.optimizer
    )
"""


def test_a_spec_may_be_a_factory_which_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    assert device_trace_of_spec(f"{path}:small", A100).source == "fake"
    refused = (
        r"^--batch, --dtype: '.*training\.py:small' is a factory, which decides that itself; leave it out, or give a "
        r"Hugging Face config\.json$"
    )
    with pytest.raises(UsageError, match=refused):
        workload_of_spec(f"{path}:small", batch=2, dtype="bfloat16")
    failed = r"broken': a step on fake tensors failed: RuntimeError: a and b must have same .*training\.py, line \d+\)$"
    with pytest.raises(TraceError, match=failed):
        device_trace_of_spec(f"{path}:broken", A100)


def test_a_spec_that_names_nothing_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^'meta-llama/Llama-3-8B' names no workload; expected package\.module:factory"
    ):
        workload_of_spec("meta-llama/Llama-3-8B")
