"""Blocks that are called, and answer, in other ways than with a tensor."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.corpus import NUM_CLASSES, WIDTH, Mlp, Net, Script, scenario, supervised


class Called(nn.Module):
    """A model whose blocks are called in a way of their own."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([kind(), kind()]), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.called(block, x)
        out: Tensor = self.head(x)
        return out

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError


@scenario()
def arguments_by_keyword() -> Script:
    class Block(Mlp):
        def forward(self, *, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if mask is None else x * mask) * scale

    class Model(Called):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = block(x=x, scale=0.5, mask=torch.ones_like(x))
            return out

    return supervised(Model(Block))


@scenario()
def a_tuple_out() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None, [x.detach().sum(), 3]

    class Model(Called):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = block(x)[0]
            return out

    return supervised(Model(Block))


@scenario()
def a_dictionary_in_and_out() -> Script:
    class Block(Mlp):
        def forward(self, given: Any) -> Any:
            return {"x": super().forward(given["x"]), "depth": given["depth"] + 1}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            given: Any = {"x": x, "depth": 0}
            for block in self.blocks:
                given = block(given)
            out: Tensor = self.head(given["x"]) * given["depth"]
            return out

    return supervised(Model())


class _Pair(NamedTuple):
    x: Tensor
    scale: float


@dataclass
class _State:
    x: Tensor
    scale: float = 1.0


@scenario()
def a_named_tuple_in_and_out() -> Script:
    class Block(Mlp):
        def forward(self, pair: Any) -> Any:
            return _Pair(super().forward(pair.x), pair.scale * 0.5)

    class Model(Called):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            out = block(_Pair(x, 2.0))
            return out.x * out.scale  # type: ignore[no-any-return]

    return supervised(Model(Block))


# torch 2.11's own checkpoint offers what is in it to hooks of saved tensors.
_NOT_OFFERED = {"offload-inputs": "none of the tensors that it saves was offered"}


@scenario(refused={} if torch.__version__.startswith("2.11") else _NOT_OFFERED)
def a_dataclass_in_and_out() -> Script:
    class Block(Mlp):
        def forward(self, state: Any) -> Any:
            return _State(super().forward(state.x), state.scale * 0.5)

    class Model(Called):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            out = block(_State(x, 2.0))
            return out.x * out.scale  # type: ignore[no-any-return]

    return supervised(Model(Block))


@scenario()
def a_function_as_argument() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor, activation: Any = torch.tanh) -> Tensor:
            return x + self.down(activation(self.up(x)))

    class Model(Called):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = block(x, F.gelu)
            return out

    return supervised(Model(Block))


@scenario()
def returns_its_input() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Any:
            return x, super().forward(x)

    class Model(Called):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            same, out = block(x)
            return same * 0.5 + out  # type: ignore[no-any-return]

    return supervised(Model(Block))


@scenario()
def returns_a_view() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 2, WIDTH // 2).transpose(1, 2).transpose(1, 2).reshape(-1, WIDTH)

    return supervised(Net(Block(), Block()))
