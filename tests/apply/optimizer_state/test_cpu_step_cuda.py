"""An optimizer's step on the CPU for parameters on a CUDA device: the bits of a run that is on the CPU altogether."""

from functools import partial

import pytest
import torch
from optimizer_runs import Make, same

from memwall.apply.optimizer_state.cpu_step import CpuStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
NUM_STEPS = 10
FLOAT, LOWER = (torch.float32,), (torch.bfloat16,)


@pytest.mark.parametrize("dtypes", [FLOAT, LOWER, (*LOWER, *FLOAT)], ids=["float32", "bfloat16", "both"])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        partial(torch.optim.AdamW, lr=1e-2, fused=True),
        partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    ],
    ids=["foreach", "fused", "amsgrad"],
)
def test_parameters_and_state_are_those_of_the_fused_step_on_the_cpu(
    make: Make, dtypes: tuple[torch.dtype, ...]
) -> None:
    gradients = torch.Generator().manual_seed(0)
    there = [torch.ones(256, 1024, dtype=dtypes[number % len(dtypes)], device="cuda") for number in range(6)]
    here = [parameter.cpu() for parameter in there]
    optimizer = make(there)
    settings = {**make.keywords, "foreach": None, "fused": True} if isinstance(make, partial) else {}
    reference = type(optimizer)(here, **settings)
    stepped = CpuStep(optimizer, torch.device("cuda", 0), bucket_bytes=2 << 20, limit_bytes=1 << 30)
    for _ in range(NUM_STEPS):
        for on_device, on_cpu in zip(there, here, strict=True):
            on_cpu.grad = torch.randn(on_cpu.shape, generator=gradients).to(on_cpu.dtype)
            on_device.grad = on_cpu.grad.cuda()
        for one in (optimizer, reference):
            one.step()
    assert same([parameter.cpu() for parameter in there], here)
    assert same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    stepped.undo()
    optimizer.step()
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"cuda"}
