"""A session's plan on a CUDA device changes no bit: dropout in blocks called by keyword, and a scaler that skips."""

import hashlib
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memwall
from memwall.planning.one_recording import search_at_location
from memwall.planning.planfile import Plan
from memwall.planning.techniques.recompute import Recompute

pytestmark = [pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20), pytest.mark.timeout(300)]
WIDTH, NUM_BLOCKS, NUM_STEPS = 64, 12, 5
FIRST_SCALE = 2.0**118


class Block(nn.Module):
    """Is given its tensor by keyword, as diffusers' blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Dropout(0.2), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, *, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.down(self.drop(nn.functional.gelu(self.up(hidden_states))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(hidden_states=values)
        return values.square().sum()


def trained(budget_bytes: int | None) -> tuple[str, float, Plan | None]:
    """Returns a digest of weights and random state, the scaler's factor, and the plan of a run."""
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The first gradients overflow, times so much.
    scaler = torch.amp.GradScaler("cuda", init_scale=FIRST_SCALE)
    with nullcontext() if budget_bytes is None else memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(2048, WIDTH, device="cuda"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        plan = None if session is None else session.plan
    found = hashlib.sha256(torch.cuda.get_rng_state().numpy().tobytes())
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest(), scaler.get_scale(), plan


@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_blocks_that_run_again_draw_what_they_drew_and_skipped_steps_stay_skipped(
    default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN that tensors without a device are made on the default one THEN memwall's own are where they belong."""
    monkeypatch.setattr(search_at_location, "can_offload", lambda trace: "left out")  # it would be as good here
    torch.set_default_device(default)
    plain, scale, _ = trained(None)
    assert FIRST_SCALE / 2**NUM_STEPS < scale < FIRST_SCALE
    found, found_scale, plan = trained((32 << 20) + int(0.8 * torch.cuda.max_memory_reserved()))
    assert plan is not None
    assert any(isinstance(action, Recompute) for action in plan.actions)
    assert (found, found_scale) == (plain, scale)
