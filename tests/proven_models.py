"""Models of blocks whose actions prove themselves, and a loop that returns every gradient."""

import torch
from block_models import WIDTH, Block, Model
from torch import Tensor, nn

from memwall.session.session import Session


class WritesPastAutograd(Block):
    """Changes a result that autograd has saved already; in plain PyTorch backward reads what was written."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.inner(x))
        y.data.mul_(0.5)
        return x + self.outer(y)


def model_with(kind: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    model = Model()
    model.blocks[1] = kind()
    return model


def trained(model: nn.Module, session: Session | None = None, *, num_steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())
    if session is not None:
        session.attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num_steps):
        model(torch.randn(16, WIDTH, generator=generator)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
