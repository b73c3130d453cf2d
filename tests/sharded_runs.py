"""A model with an embedding, blocks, a norm at the root and a head; ranks for it; and a meter of what a rank holds."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from plans import a_plan
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memwall.planning.planfile import Plan
from memwall.planning.ranks.forecast import AnySharding, RanksForecast
from memwall.predict.sharding.network import Network
from memwall.trace.workload import Workload

__all__ = [
    "LiveBytes",
    "Model",
    "TiedModel",
    "batch",
    "let_go",
    "loss_of",
    "network_for",
    "ranked_plan",
    "trained",
    "workload",
]

VOCABULARY, _WIDTH, _BLOCKS, _TOKENS = 2048, 64, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 8 * _WIDTH)
        self.down = nn.Linear(8 * _WIDTH, _WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(torch.nn.functional.gelu(self.up(self.norm(values))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, _TOKENS), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class TiedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


def workload(model: type[Model] = Model) -> Workload:
    return Workload(
        model=model,
        batch=batch,
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )


def trained(model: nn.Module, tokens: Tensor) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Returns an optimizer that has stepped once, and what makes the next step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return optimizer, step


def network_for(num_ranks: int, num_ranks_per_node: int = 8) -> Network:
    return Network(
        num_ranks=num_ranks,
        num_ranks_per_node=num_ranks_per_node,
        peer_bytes_per_second=100e9,
        peer_hop_seconds=0.0,
        device_bytes_per_second=3e12,
        host_bytes_per_second=50e9,
        node_bytes_per_second=40e9,
    )


def ranked_plan(chosen: AnySharding, network: Network, *, units: tuple[str, ...] = ()) -> Plan:
    """A plan without actions that divides the model as chosen."""
    ranks = RanksForecast(network=network, link=None, chosen=chosen, units=units, choices=(), curve=())
    plan = a_plan()
    return replace(plan, forecast=replace(plan.forecast, ranks=ranks))


def let_go() -> None:
    """Waits until no other thread of this process is about to run.

    One of gloo's holds a collective's buffers until it has told that the collective is over, and a moment longer: on a
    busy machine they would be counted beside those of the next one.
    """
    own = str(threading.get_native_id())
    others = [path / "stat" for path in Path("/proc/self/task").iterdir() if path.name != own]
    while any(path.read_text().rpartition(")")[2].split()[0] == "R" for path in others):
        time.sleep(0.001)


class LiveBytes(TorchDispatchMode):
    """Looks after each operation; storages that FSDP2 empties count nothing until they are filled again."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, Any] = {}
        self.peak_bytes = 0
        for tensor in standing:
            self._add(tensor)

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in (ref() for ref in self._known.values()) if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, whose own operations on what the rank holds of it come next
        let_go()
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return found

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":  # what DeepSpeed keeps of parameters' shapes holds nothing
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known or self._known[key]() is None:
            self._known[key] = weakref.ref(storage)
