"""A small language model with tied embeddings, trained by a loop that tests change, for steps within backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 256, 64
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class TiedModel(nn.Module):
    """Returns the loss of each token; its embedding is its head as well."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1) * 0.1, tokens.roll(1, 1).flatten())


def batches(num_steps: int, device: str = "cpu") -> list[Tensor]:
    """The same token numbers every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 16), generator=generator).to(device) for _ in range(num_steps)]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that training has made, to be compared bit for bit."""
    found: list[Any] = [value.detach().cpu().clone() for value in model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        found += [value.cpu().clone() if isinstance(value, Tensor) else value for value in state.values()]
    return found


def are_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two such lists have the same bits."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
