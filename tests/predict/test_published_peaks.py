"""Peaks that others published for models on fake tensors, under the fused and under the math kernel of attention.

Live bytes after forward and backward of batches of eight, MiB: a fused kernel, and softmax as tensors of its own, as
measured for volo_d1_384 and deit3_base_patch16_384 of timm 1.0.12. The first agree with the estimates published by
GPUMemNet (doi 10.1145/3805621.3807621) for the same models, 2,773 and 3,355.
"""

import pytest
import torch
import torch.nn.functional as F
from prediction_runs import import_timm
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memwall.errors import UsageError
from memwall.predict.curve import live_peak_bytes
from memwall.trace.fake import record_fake
from memwall.trace.workload import Workload

MIB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    ("name", "kernel", "published_mib"),
    [
        ("volo_d1_384", SDPBackend.FLASH_ATTENTION, 2763),
        ("volo_d1_384", SDPBackend.MATH, 4558),
        ("deit3_base_patch16_384", SDPBackend.FLASH_ATTENTION, 3349),
        ("deit3_base_patch16_384", SDPBackend.MATH, 4835),
    ],
)
def test_both_kernels_give_the_published_peak(name: str, kernel: SDPBackend, published_mib: int) -> None:
    try:
        import_timm()
    except UsageError as error:
        pytest.skip(str(error))
    from timm import create_model

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    workload = Workload(
        model=lambda: create_model(name, pretrained=False).train(),
        batch=lambda: torch.empty(8, 3, 384, 384).normal_(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    (step,) = record_fake(workload, num_steps=1).steps
    assert live_peak_bytes(step, "cpu") / MIB == pytest.approx(published_mib, rel=0.01)
