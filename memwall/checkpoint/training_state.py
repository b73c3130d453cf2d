"""A training run between two steps, as named tensors and as the small rest.

Tensors are the model's parameters and buffers and the optimizer's state, under names made of the parameters' own. The
rest is what `torch.load(weights_only=True)` reads: options of parameter groups, numbers in the optimizer's state,
states of schedulers and scalers, generators of random numbers, and what the training loop gave.
"""

import hashlib
import io
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.apply.optimizer_state.low_bit_form import facts_of, is_low_bit, pieces_of
from memwall.apply.streaming.guard import GuardedParameter
from memwall.errors import ApplyError
from memwall.store.buckets import is_dense
from memwall.torch_internals.modules import without_state_dict_entry
from memwall.torch_internals.sharding import is_sharded, local_part, place_in_whole, standing_parameters

Kind = Literal["trained", "frozen", "volatile", "away"]


class Part(NamedTuple):
    """Names a tensor of the run.

    One that is trained changes in the optimizer's step, one that is volatile in a forward as well. Of one that is away,
    on disk between its uses, nothing but name, shape and type is to be asked.
    """

    name: str
    tensor: Tensor
    kind: Kind


class TensorRecord(Struct, frozen=True, kw_only=True):
    """Says where a tensor is in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_on_host: bool
    """Whether it was in CPU memory."""
    bucket: int
    offset: int
    """Within the bucket, in bytes."""


def record_of(name: str, tensor: Tensor, bucket: int, offset: int, *, is_on_host: bool) -> TensorRecord:
    """Returns the record of a tensor as it lies, or, where that has gaps, as a copy of it does."""
    stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    return TensorRecord(
        name=name,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        stride=tuple(stride),
        is_on_host=is_on_host,
        bucket=bucket,
        offset=offset,
    )


def check_records(records: Iterable[TensorRecord], bucket_bytes: Sequence[int]) -> None:
    """Checks that tensors can lie where records say: a file may be a stranger's.

    Args:
        bucket_bytes: what each bucket holds.

    Raises:
        ValueError: one cannot; the message names it.
    """
    for record in records:
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{record.name!r} is of type {record.dtype!r}, which this torch does not have")
        sizes = [*record.shape, *record.stride, record.offset]
        if len(record.shape) != len(record.stride) or any(not 0 <= size < 1 << 62 for size in sizes):
            raise ValueError(f"{record.name!r} has the shape {record.shape} and the strides {record.stride}")
        span = sum((size - 1) * step for size, step in zip(record.shape, record.stride, strict=True)) + 1
        end = record.offset + (0 if 0 in record.shape else span * dtype.itemsize)
        if not 0 <= record.bucket < len(bucket_bytes) or end > bucket_bytes[record.bucket]:
            raise ValueError(f"{record.name!r} ends at byte {end} of bucket {record.bucket}, which does not hold it")
        like = torch.empty_strided(record.shape, record.stride, dtype=dtype, device="meta")
        if 0 not in record.shape and not is_dense(like):
            raise ValueError(f"{record.name!r} has elements that overlap or lie apart, by strides {record.stride}")


def dtype_name(tensor: Tensor) -> str:
    """Returns a name such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def parts_of_model(model: nn.Module) -> list[Part]:
    """Returns parameters and buffers, each once; also buffers that the model's own state dict leaves out.

    Of a parameter that is divided among ranks it is what this rank holds.

    Raises:
        ApplyError: a tensor of the model is of a kind that cannot be written out as it lies.
    """
    parts = [
        Part(f"parameter/{name}", local_part(value), _kind_of(value))
        for name, value in standing_parameters(model).items()
    ]
    parts += [Part(f"buffer/{name}", value, "volatile") for name, value in model.named_buffers()]
    for part in parts:
        if part.kind != "away" and not is_plain(part.tensor):
            raise ApplyError(
                f"{part.name.replace('/', ' ')} is a {type(part.tensor).__name__} in {part.tensor.layout} on "
                f"{part.tensor.device}, and only plain strided tensors can be committed; run without --checkpoint"
            )
    return parts


def _kind_of(parameter: nn.Parameter) -> Kind:
    if isinstance(parameter, GuardedParameter):
        return "away"
    return "trained" if parameter.requires_grad else "frozen"


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """Returns the part that each key of the model's own state dict stands for; tied weights have several keys."""
    parts = {id(part.tensor): part.name for part in parts_of_model(model)}
    hidden = {
        f"{path}{'.' if path else ''}{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        for name in without_state_dict_entry(module)
    }
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known = set(parts.values())
    return {
        name: f"parameter/{name}" if f"parameter/{name}" in known else parts[id(local_part(tensor))]
        for name, tensor in every
        if name not in hidden
    }


def names_of_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> dict[int, str]:
    """Returns names by id; parameters that the optimizer trains beside the model's are named by their place in it.

    Args:
        number: of the optimizer, among those that train the model.
    """
    names = {id(value): name for name, value in standing_parameters(model).items()}
    of = f"optimizer {number}, " if number else ""
    for place_of_group, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), f"({of}group {place_of_group}, parameter {place})")
    return names


def is_beside_model(name: str) -> bool:
    """Returns whether a parameter's name is that of one that an optimizer trains beside the model's."""
    return name.startswith(("(group ", "(optimizer "))


def state_kind(number: int) -> str:
    """Returns how names of the tensors in an optimizer's state begin: two optimizers may step one parameter."""
    return f"state {number}" if number else "state"


def parts_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> list[Part]:
    """Returns tensors of the optimizer's state, and parameters that it trains beside the model's."""
    names = names_of_parameters(model, optimizer, number)
    of_model = {id(parameter) for parameter in standing_parameters(model).values()}
    parts = [
        Part(f"parameter/{names[id(parameter)]}", local_part(parameter), "trained")
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in of_model
    ]
    for parameter, state in optimizer.state.items():
        if not isinstance(state, dict) or id(parameter) not in names:
            continue
        for key, value in state.items():
            pieces = pieces_of(key, value) if is_low_bit(value) else {key: value}
            for piece, tensor in pieces.items():
                if is_plain(_local(tensor)):
                    name = f"{state_kind(number)}/{piece}/{names[id(parameter)]}"
                    parts.append(Part(name, _local(tensor), "trained"))
    return parts


def optimizer_objects(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> dict[str, Any]:
    """Returns what is no tensor: options of its groups, the rest of its state, and which of that is in 8 bits."""
    names = names_of_parameters(model, optimizer, number)
    rest: dict[Any, Any] = {}
    low_bit: dict[str, dict[Any, Any]] = {}
    sharded: dict[str, list[Any]] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(state, dict) or id(parameter) not in names:
            raise ApplyError(
                f"{type(optimizer).__name__} keeps state under a key of type {type(parameter).__name__}, which no name "
                "is known for; run without --checkpoint"
            )
        name = names[id(parameter)]
        sharded[name] = [key for key, value in state.items() if isinstance(value, Tensor) and is_sharded(value)]
        low_bit[name] = {key: facts_of(value) for key, value in state.items() if is_low_bit(value)}
        rest[name] = {
            key: value
            for key, value in state.items()
            if not (is_plain(_local(value)) or _is_away(value) or key in low_bit[name])
        }
    groups = [
        {
            "parameters": [names[id(parameter)] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    found = {"class": type(optimizer).__qualname__, "groups": groups, "state": rest, "low_bit": low_bit}
    return found | ({"sharded": sharded} if any(sharded.values()) else {})


def divided_parameters(model: nn.Module) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the whole shape of each parameter that is divided among ranks, and where this rank's part begins."""
    found = standing_parameters(model).items()
    return {name: place_in_whole(parameter) for name, parameter in found if is_sharded(parameter)}


def state_name(record: TensorRecord) -> tuple[int, str, str] | None:
    """Returns optimizer, key and parameter of a tensor of an optimizer's state; None of another tensor."""
    kind, _, rest = record.name.partition("/")
    if kind.partition(" ")[0] != "state":
        return None
    key, _, name = rest.partition("/")
    return int(kind.partition(" ")[2] or 0), key, name


def state_records(records: Iterable[TensorRecord], number: int = 0) -> Iterator[tuple[str, str, TensorRecord]]:
    """Yields the tensors of an optimizer's state: of which parameter, under which key, and where."""
    for record in records:
        found = state_name(record)
        if found is not None and found[0] == number:
            yield found[2], found[1], record


def low_bit_of(objects: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns which moments of a parameter were committed in 8 bits; none by a memwall that did not know of them."""
    found: Mapping[str, Any] = objects.get("low_bit", {}).get(name, {})
    return found


def fingerprint_of(parts: Iterable[Part]) -> bytes:
    """Returns 16 bytes that depend on names, shapes and types."""
    text = "\n".join(sorted(f"{part.name} {dtype_name(part.tensor)} {list(part.tensor.shape)}" for part in parts))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


# -- random numbers --------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Returns the states of the generators that scripts share: torch's, Python's, and numpy's where it is loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, [int(key) for key in keys], *rest]
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Sets the generators whose states these are to what they were."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        import numpy as np

        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


# -- the rest as bytes -----------------------------------------------------------------------------------------------


def encode_objects(objects: Mapping[str, Any]) -> bytes:
    """Returns what is no tensor of the model or the optimizer as bytes.

    Raises:
        ApplyError: it holds an object that cannot be written; the message names it.
    """
    file = io.BytesIO()
    try:
        torch.save(dict(objects), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # of a class within a function; of a lock
        raise _not_committed(str(error)) from error
    return file.getvalue()


def decode_objects(data: bytes) -> dict[str, Any]:
    """Returns what `encode_objects` was given; code in it is not run.

    Raises:
        ApplyError: it holds an object of a class that is not loaded from a checkpoint; the message names it.
    """
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # whatever torch makes of a damaged archive
        line = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), str(error))
        raise _not_committed(line.strip()) from error
    return found


def _not_committed(reason: str) -> ApplyError:
    return ApplyError(
        f"the state of a scheduler, scaler, parameter group or of what the loop gave cannot be committed: {reason}; "
        "keep numbers, text, lists, dictionaries and tensors in it"
    )


def is_plain(value: object) -> bool:
    """Returns whether a value is a tensor that can be written out as it lies."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and value.layout is torch.strided
        and (value.numel() == 0 or value.untyped_storage().nbytes() > 0)
        and not (value.is_meta or value.is_quantized or value.is_conj() or value.is_neg())
    )


def _local(value: Any) -> Any:
    """Returns what this rank holds of a tensor that is divided among ranks, and anything else as it is."""
    return local_part(value) if isinstance(value, Tensor) else value


def _is_away(value: object) -> bool:
    """Whether a tensor's place is taken while it is on disk."""
    return isinstance(value, Tensor) and value.is_meta
