"""Batches that grow longer on a CUDA device are planned for before they fail, where no loop hands its steps over."""

import hashlib
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memwall

pytestmark = [pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20), pytest.mark.timeout(300)]
MIB = 1 << 20


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def trained(budget_bytes: int | None) -> tuple[str, int, int]:
    """Returns a digest of the weights, how many steps were recorded, and the most that was held."""
    torch.manual_seed(0)
    model = Classifier().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    num_recorded = peak_bytes = 0
    with nullcontext() if budget_bytes is None else memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for length in (64, 48, 64, 96, 160, 64, 192, 192):
            loss = nn.functional.cross_entropy(
                model(torch.randint(1000, (16, length), device="cuda")), torch.randint(2, (16,), device="cuda")
            )
            num_recorded += session is not None and session.state == "recording"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        peak_bytes = session.measured.overall_peak_bytes
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest(), num_recorded, peak_bytes


def test_a_backward_that_would_have_no_room_is_planned_for() -> None:
    """GIVEN a budget with room for the first batches alone WHEN longer ones come THEN each that has no room is recorded
    and planned for, within the budget, to the bits of a run without memwall.
    """
    plain, _, _ = trained(None)
    found, num_recorded, peak_bytes = trained(220 * MIB)
    assert found == plain
    assert 2 <= num_recorded <= 4
    assert peak_bytes <= 220 * MIB
