"""A small language model with tied embeddings, trained by a loop that tests change, for steps within backward."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from plans import a_plan
from torch import Tensor, nn

import memwall
from memwall.planning.action import Action
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.trace.modules import fingerprint

VOCABULARY, WIDTH = 256, 64
WINDOW_BYTES = 100_000
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], None]
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


class Ends(Exception):
    """Ends a loop between backward and step."""


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    name: str, *actions: Action, step: Step = plain_step, device: str = "cpu", model: nn.Module | None = None
) -> list[Any]:
    """Returns what six steps make of a model, under a plan with these actions if there are any."""
    torch.manual_seed(0)
    model = (TiedModel() if model is None else model).to(device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = MAKERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def run() -> None:
        for batch in batches(6, device):
            step(model, optimizer, batch)
            scheduler.step()

    if actions:
        made = a_plan(*actions, device=device, model_fingerprint=fingerprint([model]), process_bytes=1)
        with memwall.fit(model, optimizer, plan=made) as session, suppress(Ends):
            assert session is not None
            run()
    else:
        run()
    assert all(bool((one != other).any(-1).all()) for one, other in zip(before, model.parameters(), strict=True))
    return [*state_of(model, optimizer), scheduler.get_last_lr()]


def released(**settings: Any) -> GradientRelease:
    return GradientRelease(window_bytes=WINDOW_BYTES, **settings)
