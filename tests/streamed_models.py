"""A small language model with tied weights, trained plainly or with its parameters on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.apply.streaming.guard import GuardedParameter
from memwall.apply.streaming.open_streaming import open_parameter_streaming
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import DiskPlace
from memwall.store.buckets import DiskSpace
from memwall.store.transfer import TransferPool

__all__ = [
    "KIB",
    "VOCABULARY",
    "GPT",
    "Stream",
    "everything",
    "large",
    "loss_of",
    "on_disk",
    "put_on_disk",
    "streamed",
    "train_gpt",
]

KIB = 1 << 10
VOCABULARY, WIDTH = 64, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class GPT(nn.Module):
    """Its head is its embedding."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """The loss of the batch with this number."""
    tokens = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


Stream = Callable[..., ParameterStreaming]


@contextmanager
def streamed(
    model: nn.Module,
    pool: TransferPool,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    window_bytes: int = 64 * KIB,
    min_bytes: int = 4 * KIB,
    blocks: tuple[str, ...] | None = None,
) -> Iterator[ParameterStreaming]:
    """Has parameters on disk inside, and the optimizer's state with them if it is given."""
    streaming = ParameterStreaming(
        model, ParameterTier(DiskPlace(pool), window_bytes=window_bytes, min_bytes=min_bytes), blocks=blocks
    )
    state = None
    if optimizer is not None:
        state = OptimizerState(
            optimizer,
            DiskSpace(pool),
            resident_bytes=0,
            bucket_bytes=window_bytes,
            min_bytes=min_bytes,
            around_step=streaming.around_step,
        )
    try:
        yield streaming
    finally:
        if state is not None:
            state.undo()
        streaming.undo()


def put_on_disk(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[ParameterStreaming, Callable[[], None]]:
    """Parameters, gradients and state, where a run has them: in its checkpoint, if it has one.

    Returns:
        What streams the parameters, and what brings everything back.
    """
    streaming, close_parameters = open_parameter_streaming(
        model, disk=None, capacity_bytes=None, window_bytes=1 << 16, min_bytes=1024
    )
    _, close_state = open_optimizer_state(
        optimizer,
        disk=None,
        capacity_bytes=None,
        resident_bytes=0,
        bucket_bytes=1 << 15,
        min_bytes=1024,
        around_step=streaming.around_step,
    )

    def close() -> None:
        close_state()
        close_parameters()

    return streaming, close


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies of parameters, gradients and state, by name."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for number, values in (optimizer.state_dict()["state"] if optimizer is not None else {}).items():
        found |= {f"{number}.{key}": torch.as_tensor(value).clone() for key, value in values.items()}
    return found


def train_gpt(
    pool: TransferPool | None,
    *,
    num_steps: int = 4,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    has_state: bool = True,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains with accumulation, clipping, parameter groups and a scheduler; losses and norms, and what is left.

    Args:
        pool: where parameters go; None trains plainly.
        prepare: what else is done to the model, after its parameters have gone.
        has_state: whether the optimizer's state goes to disk too.
    """
    torch.manual_seed(0)
    model = GPT()
    matrices, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    numbers: list[float] = []

    def run() -> None:
        prepare(model)
        for step in range(num_steps):
            for micro in range(3):
                loss = loss_of(model, 10 * step + micro)
                (loss / 3).backward()
                numbers.append(loss.item())
            numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    if pool is None:
        run()
    else:
        with streamed(model, pool, optimizer if has_state else None, **settings):
            run()
    return numbers, everything(model, optimizer)


def on_disk(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if type(parameter) is GuardedParameter}


def large(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.nbytes >= 4 * KIB}
