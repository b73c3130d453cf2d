"""`torch.compile` of a step on the phantom: Triton's kernels are compiled for the card, and its bytes are read."""

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.phantom(numbers=False), pytest.mark.slow, pytest.mark.timeout(300)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 1024), nn.LayerNorm(1024), nn.Linear(1024, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(self.norm(nn.functional.gelu(self.up(values))))


def peak_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    """Returns what torch's allocator hands out at once in the third step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def test_a_compiled_step_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN blocks whose activation and norm are one kernel WHEN they are compiled THEN less is saved for backward."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    model = nn.Sequential(*(Block() for _ in range(4))).cuda()
    batch = torch.zeros(4096, 64, device="cuda")
    eager_bytes = peak_bytes(model, batch)
    for block in model:
        block.compile()
    assert peak_bytes(model, batch) < 0.8 * eager_bytes
