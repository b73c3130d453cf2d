"""A checkpoint as files that other programs read, and what other programs saved as a checkpoint.

Weights go to a safetensors file a bucket at a time, so that the model never is in memory as a whole. A file of torch
holds everything that a training run goes on with, and is made in memory.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.apply.optimizer_state.low_bit_form import put_together
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.resumption import Stateful
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.training_state import TensorRecord, low_bit_of, state_records
from memwall.errors import StoreError, UsageError
from memwall.store.journal import Journal, is_begun
from memwall.trace.tags import Tag
from memwall.versioned_files import whole_file

__all__ = ["CheckpointSummary", "export_safetensors", "export_torch", "import_checkpoint", "read_summary"]

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
    num_parameters: int
    weight_bytes: int
    state_bytes: int
    disk_bytes: int


class _Committed:
    """Opens the last step of a directory for reading."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = os.fspath(directory)
        if not os.path.isdir(path):
            raise UsageError(f"there is no folder {path}; expected one written by memwall run --checkpoint")
        ranks = sorted(folder.name for folder in Path(path).glob("rank-*-of-*"))
        if ranks:
            raise UsageError(f"{path} holds a folder for each rank of a run; give one of them: {path}/{ranks[0]}")
        nothing = UsageError(f"{path} holds no committed step; expected one written by memwall run --checkpoint")
        if not is_begun(path):
            raise nothing
        self.journal = Journal(path, is_read_only=True)
        try:
            if self.journal.last is None:
                raise nothing
            self.step = self.journal.last.step
            self.restoration = Restoration(self.journal, self.journal.last)
        except BaseException:
            self.journal.close()
            raise
        self.objects = self.restoration.objects
        self.records = {record.name: record for record in self.restoration.content.tensors}

    def check_whole(self) -> None:
        """Checks that these are whole tensors, and not what one rank holds of them.

        Raises:
            UsageError: the model was divided by FSDP2.
        """
        if self.objects.get("is_divided"):
            raise UsageError(
                f"{self.journal.directory} holds one rank's part of a model that FSDP2 divided; resume the run with as "
                "many ranks, and save in the script by torch.distributed.checkpoint"
            )

    def __enter__(self) -> "_Committed":
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def read(self, records: Mapping[Any, TensorRecord]) -> dict[Any, Tensor]:
        """Returns tensors of their own, in CPU memory."""
        tensors = {
            key: torch.empty_strided(record.shape, record.stride, dtype=getattr(torch, record.dtype))
            for key, record in records.items()
        }
        self.restoration.read([(records[key], tensor) for key, tensor in tensors.items()])
        return tensors


def read_summary(directory: str | os.PathLike[str]) -> CheckpointSummary:
    """Returns what is in a directory, after every byte of it has been verified.

    Raises:
        UsageError: it holds no committed step.
        StoreError: it is damaged, or a run is using it.
    """
    with _Committed(directory) as found:
        weights = [record for record in found.records.values() if record.name.startswith("parameter/")]
        state = [record for record in found.records.values() if record.name.startswith(("state/", "state "))]
        return CheckpointSummary(
            directory=os.fspath(directory),
            step=found.step,
            optimizer=" + ".join(saved["class"] for saved in found.restoration.saved_optimizers),
            num_parameters=sum(_numel(record) for record in weights),
            weight_bytes=sum(_num_bytes(record) for record in weights),
            state_bytes=sum(_num_bytes(record) for record in state),
            disk_bytes=found.journal.data.length_bytes,
        )


def export_safetensors(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes the weights under the names of the model's state dict, of tied ones the first; returns their step.

    Raises:
        UsageError: the directory holds no committed step, or a part of a divided model.
        StoreError: the checkpoint is damaged, the file cannot be written, or safetensors does not know a tensor's type.
    """
    with _Committed(directory) as found:
        found.check_whole()
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
            begin, end = end, end + _num_bytes(record)
            kind = _SAFETENSORS_TYPES[record.dtype]
            header[key] = {"dtype": kind, "shape": list(record.shape), "data_offsets": [begin, end]}
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
        UsageError: the directory holds no committed step, or a part of a divided model.
        StoreError: the checkpoint is damaged, or the file cannot be written.
    """
    with _Committed(directory) as found:
        found.check_whole()
        names: dict[str, str] = found.objects["state_dict"]
        tensors = found.read({name: found.records[name] for name in dict.fromkeys(names.values())})
        states = [_optimizer_state_dict(found, number) for number in range(len(found.restoration.saved_optimizers))]
        content = {
            "model": {key: tensors[name] for key, name in names.items()},
            **({"optimizer": states[0]} if len(states) == 1 else {"optimizers": states}),
            "helpers": found.objects["helpers"],
            "step": found.step,
        }
        with whole_file(Path(path), noun="checkpoint", error=StoreError) as file:
            torch.save(content, file)
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


def _optimizer_state_dict(found: _Committed, place: int) -> dict[str, Any]:
    saved = found.restoration.saved_optimizers[place]
    order = [name for group in saved["groups"] for name in group["parameters"]]
    numbers = {name: number for number, name in enumerate(order)}
    state: dict[int, dict[Any, Any]] = {numbers[name]: dict(rest) for name, rest in saved["state"].items()}
    chosen = {(numbers[name], key): record for name, key, record in state_records(found.records.values(), place)}
    for (number, key), tensor in found.read(chosen).items():
        state.setdefault(number, {})[key] = tensor
    for name, number in numbers.items():
        put_together(state.get(number, {}), low_bit_of(saved, name), is_kept=False)
    groups = [
        {**group["options"], "params": [numbers[name] for name in group["parameters"]]} for group in saved["groups"]
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _numel(record: TensorRecord) -> int:
    return torch.Size(record.shape).numel()


def _num_bytes(record: TensorRecord) -> int:
    return _numel(record) * torch.empty(0, dtype=getattr(torch, record.dtype)).element_size()
