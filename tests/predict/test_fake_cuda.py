"""Why a step for a device that is not here is recorded on fake tensors of the CPU: those of `cuda` run none."""

import pytest
import torch
from warm_python import warm_python

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
    done = warm_python().run("-c", STEP, timeout_s=120)
    assert done.stdout.split() == ["made"]
    assert done.returncode != 0
