"""A small language model with a norm, a gated MLP and a head of its own, and a loop that trains it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.trace.workload import Workload

VOCABULARY, WIDTH = 4096, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down_proj, self.act_fn = nn.Linear(3 * WIDTH, WIDTH), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class LanguageModel(nn.Module):
    """Returns the loss of the next token; with weights of its own for each token, for which logits must be there."""

    def __init__(self, num_layers: int = 2, *, is_weighted: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm, self.lm_head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_weighted = is_weighted

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        logits = logits[:, :-1].float().contiguous()
        weight = torch.ones(VOCABULARY) if self.is_weighted else None
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].reshape(-1), weight)


# What of it runs a fused kernel.
PATHS = tuple(sorted(("norm", *(f"layers.{i}.{part}" for i in range(2) for part in ("norm", "mlp")))))


def language_model(*, is_weighted: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(is_weighted=is_weighted)


def tokens(rows: int = 8) -> Tensor:
    return torch.randint(VOCABULARY, (rows, 65), generator=torch.Generator().manual_seed(1))


def workload(rows: int = 8) -> Workload:
    return Workload(
        model=language_model,
        batch=lambda: tokens(rows),
        loss=lambda model, batch: model(batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
