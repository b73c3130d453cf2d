"""The math kernel of attention in half precision: computed in float32, dropped out by a mask of bools."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_steps import record_fake
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, HEADS, TOKENS, SIZE = 2, 4, 80, 16
SCORES = BATCH * HEADS * TOKENS * TOKENS
"""Elements of the matrix of scores, more than any other tensor here has."""


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.layer = dropout, nn.Linear(SIZE, 3 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)


def saved_score_bytes(dropout: float, dtype: torch.dtype) -> list[int]:
    """Bytes of what autograd keeps of the scores of one call, under autocast on a device without other kernels."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype), sdpa_kernel(SDPBackend.MATH):
            return model(batch).float().sum()

    workload = Workload(
        model=lambda: Attention(dropout),
        batch=lambda: torch.ones(BATCH, HEADS, TOKENS, SIZE),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    recording = recording_for(hardware_named("t4"))
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    step: Any = trace.steps[1]
    kept = {saved.storage: saved.nbytes for saved in step.saved if saved.nbytes >= SCORES}
    return sorted(kept.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probabilities_are_float32_whatever_autocast_casts_to(dtype: torch.dtype) -> None:
    """Source: aten/src/ATen/native/transformers/attention.cpp, `_scaled_dot_product_attention_math`, query_acc."""
    assert saved_score_bytes(0.0, dtype) == [4 * SCORES]


def test_dropout_keeps_probabilities_before_and_after_and_a_mask_of_bools() -> None:
    assert saved_score_bytes(0.1, torch.float16) == [SCORES, 4 * SCORES, 4 * SCORES]
