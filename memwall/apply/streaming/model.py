"""Models larger than memory: built parameter by parameter onto disk, loaded from a file and saved to one.

tier = ...
with streamed_init(tier):
    model = GPT(...)                      # the same numbers as without, a window of them in memory
load_safetensors(model, path, tier)       # also fills a model that was built on the meta device
streaming = ParameterStreaming(model, tier)
...
save_safetensors(model, path, tier)
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.streaming.building import Building
from memwall.apply.streaming.tier import ParameterTier
from memwall.errors import ApplyError
from memwall.store.transfer import memory_at
from memwall.torch_internals.modules import own_buffers, own_parameters, without_state_dict_entry

__all__ = ["load_safetensors", "save_safetensors", "streamed_init"]

# Names of element types in the format (huggingface/safetensors, "Format").
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Written pages are given back to the system in such pieces: they count against a memory cap until they are on disk.
_SYNC_BYTES = 32 << 20


@contextmanager
def streamed_init(tier: ParameterTier) -> Iterator[None]:
    """Inside, the parameters of modules go to disk as they are made, the oldest first, when the window is full.

    Later uses, as by `reset_parameters`, `nn.init` or tying, fetch them. Random numbers are drawn as without.

    Raises:
        StoreError: no room on disk, or a transfer failed.
    """
    with Building(lambda _: True, lambda: tier):
        yield


@torch.no_grad()
def load_safetensors(model: nn.Module, path: str | os.PathLike[str], tier: ParameterTier) -> None:
    """Fills a model from a file, one tensor in memory at a time.

    Parameters on the meta device are replaced by new ones, tied ones by one; the others keep their identity.

    Args:
        model: has a place for every tensor in the file, and nothing else but tied tensors.
        path: as `save_safetensors` or safetensors itself writes it.
        tier: takes the parameters.

    Raises:
        ApplyError: names or shapes differ; the message says which.
        StoreError: no room on disk, or a transfer failed.
    """
    from safetensors import safe_open

    places = _places(model)
    with safe_open(path, framework="pt") as file:
        _check_names(set(file.keys()), places, path)
        for name in file.keys():  # noqa: SIM118 (it is no dictionary)
            tensor: Tensor = file.get_tensor(name)
            module, key = places[name][0]
            present: Tensor = _own(module, key)
            if present.shape != tensor.shape:
                raise ApplyError(
                    f"{os.fspath(path)}: '{name}' has the shape {list(tensor.shape)}, but the model's is "
                    f"{list(present.shape)}; load the file that belongs to this model"
                )
            _fill(places[name], present, tensor, name, tier)
    tier.writes.drain()
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ApplyError(
            f"'{left[0]}' is not in the file {os.fspath(path)} and has no numbers on the meta device ({len(left)} such "
            "tensors in all); build the model under streamed_init in place of the meta device"
        )


def _fill(places: list[tuple[nn.Module, str]], present: Tensor, tensor: Tensor, name: str, tier: ParameterTier) -> None:
    member = tier.get(present)
    if member is not None:
        member.values.overwrite()
        member.values.tensor.copy_(tensor)
        tier.put_away([member])
    elif not present.is_meta:
        present.copy_(tensor)
    else:
        # A copy, because the tier takes only what nobody else refers to.
        loaded: Tensor = tensor.to(present.dtype, copy=True)
        if isinstance(present, nn.Parameter):
            loaded = nn.Parameter(loaded, requires_grad=present.requires_grad)
        for module, key in places:
            (own_parameters(module) if key in own_parameters(module) else own_buffers(module))[key] = loaded  # type: ignore[assignment]
        if isinstance(loaded, nn.Parameter):
            member = tier.adopt(loaded, name)
            if member is not None:
                tier.put_away([member])


def save_safetensors(model: nn.Module, path: str | os.PathLike[str], tier: ParameterTier) -> None:
    """Writes a model's parameters and persistent buffers to a file, one tensor in memory at a time.

    Tied tensors are written once, under their first name, as safetensors' own `save_model` does.

    Raises:
        ApplyError: a tensor has a type that the format does not know.
        StoreError: a tensor cannot be had from its place on disk.
        OSError: the file cannot be written; `path` is then as it was before.
    """
    first: dict[int, str] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors: list[Tensor] = []
    offset = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            header["__metadata__"][name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        if tensor.dtype not in _DTYPES:
            raise ApplyError(f"'{name}' has the type {tensor.dtype}, which safetensors files cannot hold")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        tensors.append(tensor)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    try:
        with open(partial, "wb", buffering=0) as file:
            _write(file, memoryview(len(text).to_bytes(8, "little") + text))
            for tensor in tensors:
                _write_tensor(file, tensor, tier)
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write_tensor(file: Any, tensor: Tensor, tier: ParameterTier) -> None:
    member = tier.get(tensor)
    if member is None:
        _write_elements(file, tensor.detach())
        return
    member.values.want()
    try:
        _write_elements(file, member.values.tensor)
    finally:
        tier.put_away([member])


def _write_elements(file: Any, tensor: Tensor) -> None:
    whole = tensor.contiguous()
    if whole.numel():
        _write(file, memory_at(whole.data_ptr(), whole.numel() * whole.element_size()))


def _write(file: Any, data: memoryview) -> None:
    for start in range(0, len(data), _SYNC_BYTES):
        piece = data[start : start + _SYNC_BYTES]
        while piece:
            piece = piece[file.write(piece) :]
        if len(data) >= _SYNC_BYTES:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """By each name of a state dict, all places of its tensor."""
    names: dict[int, list[str]] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = {**own_parameters(module), **own_buffers(module)}
        for key, tensor in own.items():
            if tensor is not None and key not in without_state_dict_entry(module):
                names.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
                places.setdefault(id(tensor), []).append((module, key))
    return {name: places[key] for key, every in names.items() for name in every}


def _own(module: nn.Module, key: str) -> Tensor:
    found = own_parameters(module)[key] if key in own_parameters(module) else own_buffers(module)[key]
    assert found is not None
    return found


def _check_names(found: set[str], places: dict[str, list[tuple[nn.Module, str]]], path: Any) -> None:
    unknown = sorted(found - set(places))
    filled = {(id(module), key) for name in found & set(places) for module, key in places[name]}
    missing = sorted(
        name for name, where in places.items() if not any((id(module), key) in filled for module, key in where)
    )
    if unknown or missing:
        words = [f"the model has no '{name}'" for name in unknown[:3]]
        words += [f"the file has no '{name}'" for name in missing[:3]]
        raise ApplyError(
            f"{os.fspath(path)} does not belong to this model: {'; '.join(words)} ({len(unknown) + len(missing)} such "
            "names in all); load the file that was saved from it"
        )
