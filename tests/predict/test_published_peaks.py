"""Peaks that were measured for models on fake tensors, under the fused and under the math kernel of attention.

Live bytes after forward and backward of batches of eight, MiB: a fused kernel, and softmax as tensors of its own, as
measured for vit_base_patch16_224 and deit3_base_patch16_384 of timm 1.0.12. The first agree with what GPUMemNet (doi
10.1145/3805621.3807621) published for the same models, 1,256 and 3,355. Both are written out here, so that the test
needs neither timm nor torchvision.
"""

import pytest
import torch
import torch.nn.functional as F
from fake_steps import record_fake
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memwall.predict.curve import live_peak_bytes
from memwall.trace.workload import Workload

MIB = 1 << 20
WIDTH, HEADS, PATCH = 768, 12, 16

pytestmark = pytest.mark.usefixtures("one_thread")


class Branch(nn.Module):
    """What a block adds to its input: attention or a perceptron, normalised before and, in DeiT III, scaled after."""

    def __init__(self, is_attention: bool, is_scaled: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.first = nn.Linear(WIDTH, (3 if is_attention else 4) * WIDTH)
        self.last = nn.Linear(WIDTH if is_attention else 4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if is_scaled else None
        self.is_attention = is_attention

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        inner = self.first(self.norm(x))
        if self.is_attention:
            query, key, value = inner.reshape(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value)
            inner = mixed.transpose(1, 2).reshape(batch, tokens, WIDTH)
        else:
            inner = F.gelu(inner)
        out = self.last(inner)
        return x + (out if self.scale is None else out * self.scale)


class VisionTransformer(nn.Module):
    """ViT-B/16 (Dosovitskiy and others, 2021), or DeiT III of that size (Touvron and others, 2022)."""

    def __init__(self, side: int, is_deit: bool) -> None:
        super().__init__()
        num_patches = (side // PATCH) ** 2
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, num_patches + (not is_deit), WIDTH))
        self.blocks = nn.Sequential(*(Branch(n % 2 == 0, is_deit) for n in range(24)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 1000)
        self.is_deit = is_deit

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(x), -1, -1)
        if self.is_deit:  # only patches have a position
            x = torch.cat((token, x + self.positions), dim=1)
        else:
            x = torch.cat((token, x), dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "is_deit", "kernel", "measured_mib"),
    [
        (224, False, SDPBackend.FLASH_ATTENTION, 1258),
        (224, False, SDPBackend.MATH, 1427),
        (384, True, SDPBackend.FLASH_ATTENTION, 3349),
        (384, True, SDPBackend.MATH, 4835),
    ],
    ids=["ViT, fused", "ViT, math", "DeiT III, fused", "DeiT III, math"],
)
def test_both_kernels_give_the_measured_peak(side: int, is_deit: bool, kernel: SDPBackend, measured_mib: int) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    workload = Workload(
        model=lambda: VisionTransformer(side, is_deit),
        batch=lambda: torch.empty(8, 3, side, side).normal_(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    (step,) = record_fake(workload, num_steps=1).steps
    assert live_peak_bytes(step, "cpu") / MIB == pytest.approx(measured_mib, rel=0.01)
