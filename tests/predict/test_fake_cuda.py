"""Why a step for a device that is not here is recorded on fake tensors of the CPU: those of `cuda` run none."""

import subprocess
import sys

import pytest
import torch

STEP = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode(allow_non_fake_inputs=True):
    weight = torch.empty(8, 8, device="cuda", requires_grad=True)
    print("made", flush=True)
    (torch.empty(4, 8, device="cuda") @ weight).sum().backward()
    print("stepped", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_fake_tensors_on_cuda_run_no_step_where_there_is_no_device() -> None:
    """In a process of its own, which torch may abort. One that gets to the end has found another way to record."""
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["made"]
    assert done.returncode != 0
