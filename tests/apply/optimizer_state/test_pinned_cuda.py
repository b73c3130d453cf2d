"""Optimizer state in pinned host memory on a CUDA device: the bits of a plain run, and less of the device's memory."""

from functools import partial
from typing import Any

import pytest
import torch
from optimizer_runs import Make, in_groups, same
from plans import a_plan
from torch import Tensor, nn

import memwall
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.trace.modules import fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MIB = 1 << 20
PLACEMENT = OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=4 * MIB, min_bytes=16 << 10)


def trained(make: Make, *actions: OptimizerPlacement) -> tuple[list[Tensor], Any, int]:
    """Parameters and state on the CPU, and the bytes that stand on the device after four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).cuda()
    optimizer = make(in_groups(model))
    plan = a_plan(*actions, device="cuda", model_fingerprint=fingerprint([model]))
    with memwall.fit(model, optimizer, plan=plan):
        for _ in range(4):
            model(torch.ones(4, 512, device="cuda")).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        standing_bytes = torch.cuda.memory_allocated()
        state = {
            number: {key: value.cpu() for key, value in tensors.items() if isinstance(value, Tensor)}
            for number, tensors in optimizer.state_dict()["state"].items()
        }
    return [parameter.detach().cpu() for parameter in model.parameters()], state, standing_bytes


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=1e-2, foreach=False),
        partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        partial(torch.optim.AdamW, lr=1e-2, fused=True),
        partial(torch.optim.AdamW, lr=1e-2, capturable=True),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    ],
    ids=["for-loop", "foreach", "fused", "capturable", "sgd"],
)
def test_training_is_bitwise_equal_and_the_device_holds_less(make: Make) -> None:
    *plain, plain_bytes = trained(make)
    *pinned, pinned_bytes = trained(make, PLACEMENT)
    assert same(plain, pinned)
    assert plain_bytes - pinned_bytes > 10 * MIB
