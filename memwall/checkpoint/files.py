"""A checkpoint as files that other programs read, and what other programs saved as a checkpoint.

Weights go to a safetensors file a bucket at a time, so that the model never is in memory as a whole. A file of torch
holds everything that a training run goes on with, and is made in memory.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.apply.optimizer_state.low_bit_form import put_together
from memwall.checkpoint.committed import Region, Wanted, read_regions
from memwall.checkpoint.rank_folders import RankFolders, last_folders
from memwall.checkpoint.resumption import Stateful
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.training_state import TensorRecord, low_bit_of, state_name, state_records
from memwall.errors import StoreError, UsageError
from memwall.trace.records import Tag
from memwall.versioned_files import whole_file

# https://github.com/huggingface/safetensors#format
_SAFETENSORS_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class CheckpointSummary(Struct, frozen=True, kw_only=True):
    """Says for scripts what a directory holds."""

    schema: str = "memwall.checkpoint/1"
    tag: Tag = "cpu-measured"
    directory: str
    step: int
    optimizer: str
    num_ranks: int = 1
    """How many ranks committed the step; tensors count once."""
    num_parameters: int
    weight_bytes: int
    state_bytes: int
    disk_bytes: int


class _LastStep:
    """Opens the last step of a directory for reading: of a process alone, of all ranks of a run, or of one of them."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = os.fspath(directory)
        if not os.path.isdir(self.path):
            raise UsageError(f"there is no folder {self.path}; expected one written by memwall run --checkpoint")
        self._folders = last_folders(directory) or RankFolders(directory, 1)
        self._folders.open()
        self.committed, self.num_ranks = self._folders.committed, self._folders.num_ranks
        first = self.committed[0]
        self.step, self.objects, self.records = first.step, first.objects, first.records
        self.optimizers = first.optimizers

    def __enter__(self) -> "_LastStep":
        return self

    def __exit__(self, *_: object) -> None:
        self._folders.close()

    @property
    def disk_bytes(self) -> int:
        """Returns the length of all data files."""
        return sum(committed.journal.data.length_bytes for committed in self.committed)

    def shape(self, record: TensorRecord) -> tuple[int, ...]:
        """Returns the shape of the whole tensor that a record is, or is a part of."""
        return self.committed[0].whole_shape(record)

    def num_bytes(self, records: Iterable[TensorRecord]) -> int:
        """Returns how many bytes whole tensors have."""
        return sum(torch.Size(self.shape(one)).numel() * getattr(torch, one.dtype).itemsize for one in records)

    def read(self, records: Mapping[Any, TensorRecord]) -> dict[Any, Tensor]:
        """Returns whole tensors of their own, in CPU memory."""
        first = self.committed[0]
        tensors: dict[Any, Tensor] = {}
        targets: list[Wanted] = []
        for key, record in records.items():
            dtype, region = getattr(torch, record.dtype), first.region_of(record)
            if region is None:
                tensors[key] = torch.empty_strided(record.shape, record.stride, dtype=dtype)
            else:
                self._check_whole(region, record)
                tensors[key] = torch.empty(region.whole, dtype=dtype)
                region = Region(region.whole, (0,) * len(region.whole))
            targets.append(Wanted(record.name, tensors[key], region))
        read_regions(self.committed, targets)
        return tensors

    def _check_whole(self, region: Region, record: TensorRecord) -> None:
        if self.num_ranks == 1 and region.whole != record.shape:
            raise UsageError(
                f"{self.path} holds one rank's part of a model that FSDP2 divided; give the folder that has those of "
                f"all ranks: {os.path.dirname(os.path.abspath(self.path))}"
            )


def read_summary(directory: str | os.PathLike[str]) -> CheckpointSummary:
    """Returns what is in a directory, after every byte of it has been verified.

    Raises:
        UsageError: it holds no committed step.
        StoreError: it is damaged, or a run is using it.
    """
    with _LastStep(directory) as found:
        weights = [record for record in found.records.values() if record.name.startswith("parameter/")]
        state = [record for record in found.records.values() if state_name(record) is not None]
        return CheckpointSummary(
            directory=os.fspath(directory),
            step=found.step,
            optimizer=" + ".join(saved["class"] for saved in found.optimizers),
            num_ranks=found.num_ranks,
            num_parameters=sum(torch.Size(found.shape(record)).numel() for record in weights),
            weight_bytes=found.num_bytes(weights),
            state_bytes=found.num_bytes(state),
            disk_bytes=found.disk_bytes,
        )


def export_safetensors(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes the weights under the names of the model's state dict, of tied ones the first; returns their step.

    Raises:
        UsageError: the directory holds no committed step, or only one rank's part of a divided model.
        StoreError: the checkpoint is damaged, the file cannot be written, or safetensors does not know a tensor's type.
    """
    with _LastStep(directory) as found:
        chosen: dict[str, TensorRecord] = {}
        for key, name in found.objects["state_dict"].items():
            if name not in {record.name for record in chosen.values()}:
                chosen[key] = found.records[name]
        # In the order in which they lie, so that each bucket is read once.
        order = sorted(chosen, key=lambda key: (chosen[key].bucket, chosen[key].offset))
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(found.step)}}
        end = 0
        for key in order:
            record = chosen[key]
            if record.dtype not in _SAFETENSORS_TYPES:
                raise StoreError(f"'{key}' is in {record.dtype}, which safetensors has no name for; export to torch")
            begin, end = end, end + found.num_bytes([record])
            kind = _SAFETENSORS_TYPES[record.dtype]
            header[key] = {"dtype": kind, "shape": list(found.shape(record)), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        buckets: dict[int, dict[str, TensorRecord]] = {}
        for key in order:
            buckets.setdefault(chosen[key].bucket, {})[key] = chosen[key]
        with whole_file(Path(path), noun="checkpoint", error=StoreError) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for members in buckets.values():
                for tensor in found.read(members).values():
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.step


def export_torch(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes `{"model": ..., "optimizer": ..., "helpers": ..., "step": ...}` with torch.save; returns its step.

    `model` and `optimizer` are what `load_state_dict` of the model and of the optimizer take; of several optimizers
    there is a list, `optimizers`. `helpers` is a list of the class and the state dict of each scheduler and scaler.
    torch.load(weights_only=True) reads the file.

    Raises:
        UsageError: the directory holds no committed step, or only one rank's part of a divided model.
        StoreError: the checkpoint is damaged, or the file cannot be written.
    """
    with _LastStep(directory) as found:
        content = _content(found, by_name=False)
        with whole_file(Path(path), noun="checkpoint", error=StoreError) as file:
            torch.save(content, file)
        return found.step


def export_distributed(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes a folder that torch.distributed.checkpoint.load reads, on any number of ranks; returns its step.

    It has what `export_torch` writes, with `model` and `optimizer`, of one or of several together, as `get_state_dict`
    of torch.distributed.checkpoint.state_dict gives them, and `set_state_dict` takes them.

    Args:
        path: of a folder that is not there yet, or is empty.

    Raises:
        UsageError: the directory holds no committed step, or only one rank's part of a divided model; or there is
            something at `path`.
        StoreError: the checkpoint is damaged, or the folder cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise UsageError(f"{os.fspath(path)} is there already; give the name of a new folder")
    with _LastStep(directory) as found:
        content = _content(found, by_name=True)
        try:
            save(content, checkpoint_id=path, no_dist=True)
        except (OSError, CheckpointException) as error:
            raise StoreError(f"{os.fspath(path)} cannot be written: {error}") from error
        return found.step


def import_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    **stateful: Stateful,
) -> None:
    """Commits a model and an optimizer as they are now, into which a state dict has been loaded, say.

    A run with `--checkpoint DIR --resume` then goes on from there; its loop over `memwall.steps` begins at `step`.

    Args:
        directory: a new one.
        step: how many steps have been done.
        stateful: as for `memwall.steps`.

    Raises:
        UsageError: the directory holds a run.
        StoreError: it cannot be written to.
    """
    checkpoint = StepCheckpoint(directory)
    try:
        checkpoint.commit_as(step, model, optimizer, dict(stateful))
    except BaseException:
        checkpoint.close(completed=False)
        raise
    checkpoint.close(completed=True)
    if checkpoint.failure is not None:
        raise checkpoint.failure


def _content(found: _LastStep, *, by_name: bool) -> dict[str, Any]:
    """Returns the whole step; state of the optimizer by the names of parameters, or by their numbers."""
    keys: dict[str, str] = found.objects["state_dict"]
    tensors = found.read({name: found.records[name] for name in dict.fromkeys(keys.values())})
    # As torch names them: without DistributedDataParallel around the model.
    is_wrapped = by_name and all(key.startswith("module.") for key in keys)

    def plain(key: str) -> str:
        return key.removeprefix("module.") if is_wrapped else key

    states = [_optimizer_state_dict(found, number, by_name=by_name) for number in range(len(found.optimizers))]
    if by_name:  # as torch has them: the states of all, by names, and all groups
        states = [
            {
                "state": {plain(name): state for one in states for name, state in one["state"].items()},
                "param_groups": [
                    {**group, "params": [plain(name) for name in group["params"]]}
                    for one in states
                    for group in one["param_groups"]
                ],
            }
        ]
    return {
        "model": {plain(key): tensors[name] for key, name in keys.items()},
        **({"optimizer": states[0]} if len(states) == 1 else {"optimizers": states}),
        "helpers": found.objects["helpers"],
        "step": found.step,
    }


def _optimizer_state_dict(found: _LastStep, place: int, *, by_name: bool) -> dict[str, Any]:
    saved = found.optimizers[place]
    order = [name for group in saved["groups"] for name in group["parameters"]]
    keys: dict[str, Any] = {name: name if by_name else number for number, name in enumerate(order)}
    states: dict[str, dict[Any, Any]] = {name: dict(rest) for name, rest in saved["state"].items()}
    chosen = {(name, key): record for name, key, record in state_records(found.records.values(), place)}
    for (name, key), tensor in found.read(chosen).items():
        states.setdefault(name, {})[key] = tensor
    for name in order:
        put_together(states.get(name, {}), low_bit_of(saved, name), is_kept=False)
    groups = [{**group["options"], "params": [keys[name] for name in group["parameters"]]} for group in saved["groups"]]
    return {"state": {keys[name]: states[name] for name in order if name in states}, "param_groups": groups}
