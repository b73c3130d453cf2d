"""Gives a model that a configuration describes LoRA adapters as PEFT's: the base is frozen, only they are trained.

Which layers get one is not PEFT's default, a table by architecture, but its "all-linear" or what is named.

Source: peft 0.21.2, tuners/lora/layer.py (`Linear.forward`), tuners/lora/bnb.py (`Linear4bit.forward`),
tuners_utils.py (`_maybe_include_all_linear_layers`, `cast_adapter_dtype`).
"""

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from memwall.errors import UsageError
from memwall.integrations.hugging_face.hf_packed import packed, packed_names

if TYPE_CHECKING:
    from torch import nn

_FORM = "expected r=N, with targets=NAME,NAME,..., dropout=X, base=nf4 where wanted, as r=16,targets=q_proj,v_proj"
_NAMES = ("r", "targets", "dropout", "base")
_MOST_RANK = 1 << 16


class Lora(Struct, frozen=True, kw_only=True):
    """Holds what decides the bytes of LoRA adapters."""

    rank: int
    """The inner size of an adapter, PEFT's `r`."""
    targets: tuple[str, ...] = ()
    """Names the layers that get one, or ends their paths; () for every linear layer but the output's."""
    dropout: float = 0.0
    """The share of inputs that an adapter leaves out; 0 keeps no mask."""
    is_packed: bool = False
    """Whether the base's linear layers are in 4 bits, as bitsandbytes' NF4 with double quantisation: `base=nf4`."""


def parse_lora(text: str) -> Lora:
    """Returns the adapters that `--lora` asks for.

    >>> parse_lora("r=16,targets=q_proj,v_proj")
    Lora(rank=16, targets=('q_proj', 'v_proj'), dropout=0.0, is_packed=False)

    Raises:
        UsageError: the text has another form, or a number out of range.
    """
    given: dict[str, list[str]] = {}
    name = ""
    for part in text.split(","):
        before, separator, value = part.partition("=")
        if separator:
            name, part = before.strip(), value
        if name not in _NAMES or (separator and name in given) or not part.strip():
            raise UsageError(f"--lora {text}: '{(before if separator else part).strip()}' is not understood; {_FORM}")
        given.setdefault(name, []).append(part.strip())
    try:
        (rank,), (dropout,) = map(int, given.get("r", ())), map(float, given.get("dropout", ("0",)))
    except ValueError:
        raise UsageError(f"--lora {text}: {_FORM}") from None
    if not 1 <= rank <= _MOST_RANK or not 0 <= dropout < 1:
        raise UsageError(
            f"--lora {text}: r is {rank}, expected 1 to {_MOST_RANK}; dropout is {dropout:g}, expected 0 to below 1"
        )
    base = given.get("base", [])
    if base not in ([], ["nf4"]):
        raise UsageError(
            f"--lora {text}: base={','.join(base)} is not known; expected nf4, or none: as the weights are"
        )
    targets = tuple(given.get("targets", ()))
    targets = () if targets == ("all-linear",) else targets
    return Lora(rank=rank, targets=targets, dropout=dropout, is_packed=bool(base))


def with_adapters(path: str, model: Any, lora: Lora) -> Any:
    """Returns the model of transformers with every parameter frozen, packed if asked, and adapters in float32.

    Args:
        path: what an error calls the model.

    Raises:
        UsageError: a target names no linear layer.
    """
    linear = {name: size for name, module in model.named_modules() if (size := _sizes_of(module)) is not None}
    chosen = _chosen(path, model, linear, lora)
    model.requires_grad_(False)
    in_4_bits = packed_names(model, linear) if lora.is_packed else []
    for name in in_4_bits:
        _put(model, name, packed(model.get_submodule(name), *linear[name]))
    for name in chosen:
        _put(model, name, _adapted(model.get_submodule(name), *linear[name], lora, is_packed=name in in_4_bits))
    return model


def _put(model: Any, name: str, layer: "nn.Module") -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _sizes_of(module: "nn.Module") -> tuple[int, int] | None:
    """Returns how many features a linear layer takes and gives; None for other modules."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):  # GPT-2's linear layers, whose weight is transposed
        return module.nx, module.nf
    return None


def _chosen(path: str, model: Any, linear: dict[str, tuple[int, int]], lora: Lora) -> list[str]:
    if not lora.targets:
        output = model.get_output_embeddings()
        return [name for name in linear if model.get_submodule(name) is not output]
    for target in lora.targets:
        if not any(_is_named(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UsageError(f"{path}: --lora targets={target}: no linear layer has that name; there are {known}")
    return [name for name in linear if any(_is_named(name, target) for target in lora.targets)]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _adapted(layer: "nn.Module", num_in: int, num_out: int, lora: Lora, *, is_packed: bool) -> "nn.Module":
    """Returns a linear layer with its adapter."""
    import torch
    from torch import Tensor, nn

    class Adapted(nn.Module):
        """Adds what two small matrices make of an input to what the frozen layer makes of it."""

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = layer
            device = next(layer.parameters()).device
            # Whatever the base has: PEFT casts adapters to float32 unless it is told not to.
            self.lora_A = nn.Linear(num_in, lora.rank, bias=False, device=device, dtype=torch.float32)
            self.lora_B = nn.Linear(lora.rank, num_out, bias=False, device=device, dtype=torch.float32)
            self.dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base_layer(x)
            dtype = result.dtype
            scale = 1 / math.sqrt(lora.rank)
            if is_packed:
                result = result.clone()  # PEFT does, in 4 bits alone, and adds in the base's dtype there
            added: Tensor = self.lora_B(self.lora_A(self.dropout(x.to(torch.float32)))) * scale
            result = result + (added.to(dtype) if is_packed else added)
            return result.to(dtype)

    return Adapted()
