"""Resumes with an optimizer on NVMe: puts back what DeepSpeed's `load_checkpoint` leaves out, from its own files.

DeepSpeed 0.19.8 copies the swap files of moments back and never reads them, and skips the file that holds step counts,
hyperparameters, the loss scale and all that was too small to be swapped. Here each moment is made known to the swapper
under the name of its file, which it reads at the next step; the rest is taken from that file. The names used are
DeepSpeed's own, and private: where one is missing, nothing is loaded.
"""

from pathlib import Path
from typing import Any

import torch

from memwall.errors import IntegrationError

__all__ = ["check_resumable", "restore_swapped"]

_NEEDED = {
    "": ("_get_zero_ckpt_name", "load_checkpoint", "optimizer"),
    "optimizer": (
        "_reassign_or_swap_out_partitioned_parameters",
        "_swappable_optimizer_subgroup",
        "checkpoint_event_epilogue",
        "checkpoint_event_prologue",
        "fp16_partitioned_groups_flat_numel",
        "fp32_partitioned_groups_flat",
        "optimizer",
        "optimizer_swapper",
    ),
    "optimizer.optimizer_swapper": ("_get_param_swap_info", "_io_aligned_numel", "is_swappable_tensor", "swap_folder"),
}


def check_resumable(engine: Any, load_dir: str, tag: str) -> dict[str, Any]:
    """Returns what the checkpoint has for this rank besides the swap files.

    Raises:
        IntegrationError: this version of DeepSpeed is another than known, or the checkpoint does not fit the engine.
    """
    for path, names in _NEEDED.items():
        owner = engine
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part)
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise IntegrationError(
                f"DeepSpeed's {type(owner).__name__} has no '{missing[0]}' in this version, through which memwall "
                "restores an optimizer on NVMe; DeepSpeed itself would lose its moments without a word. Take "
                'deepspeed 0.19.8, or train with offload_optimizer.device "cpu"'
            )
    file = Path(engine._get_zero_ckpt_name(load_dir, tag))
    if not file.is_file():
        raise IntegrationError(
            f"there is no {file}: the checkpoint is of another number of ranks or precision, or cut short; resume with "
            "as many ranks as saved it"
        )
    # Written by DeepSpeed with its own classes in it, as DeepSpeed reads it.
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    zero = engine.optimizer
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    folder = file.parent / "offloaded_tensors" / f"rank{rank:02d}"
    num_saved, num_here = len(saved["fp32_flat_groups"]), len(zero.fp32_partitioned_groups_flat)
    if num_saved != num_here:
        raise IntegrationError(
            f"{file} has {num_saved} groups of parameters, the engine has {num_here}; resume with the model, the "
            "parameter groups, the ranks and the sub_group_size that saved it"
        )
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(index):
            _check_files(folder, zero, index, flat, saved["optimizer_state_dict"]["state"].get(index, {}))
        elif saved["fp32_flat_groups"][index].numel() != flat.numel():
            raise IntegrationError(
                f"group {index} of {file} has {saved['fp32_flat_groups'][index].numel()} elements, the engine's has "
                f"{flat.numel()}; resume with the model and the ranks that saved it"
            )
    return saved


def restore_swapped(engine: Any, saved: dict[str, Any]) -> None:
    """Puts back, after `engine.load_checkpoint`, what that left out."""
    zero = engine.optimizer
    inner = zero.optimizer
    states: dict[int, dict[str, Any]] = saved["optimizer_state_dict"]["state"]
    # Small parameters are whole on every rank: they are given up here, and gathered again from what is put back.
    zero.checkpoint_event_prologue()
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(index):
            _make_known(zero, index, flat, states.get(index, {}))
            continue
        flat.data.copy_(saved["fp32_flat_groups"][index].data)
        inner.state[flat] = dict(states.get(index, {}))
        zero._reassign_or_swap_out_partitioned_parameters(index)
    for group, old in zip(inner.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True):
        group.update({name: value for name, value in old.items() if name != "params"})
    for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
        setattr(zero, name, saved[name])
    zero.checkpoint_event_epilogue()


def _make_known(zero: Any, index: int, flat: Any, state: dict[str, Any]) -> None:
    """Gives a group its state, whose large tensors are in files, and the swapper the names of these."""
    numel = int(zero.fp16_partitioned_groups_flat_numel[index])
    # Saved while its bytes were in the file, a moment has no elements; the swapper knows it by its size, then lets go.
    zero.optimizer.state[flat] = {
        name: torch.empty(numel, dtype=flat.dtype) if _is_in_file(value) else value for name, value in state.items()
    }
    info = zero.optimizer_swapper._get_param_swap_info(flat)
    if info is not None:
        info.release_memory()


def _check_files(folder: Path, zero: Any, index: int, flat: Any, state: dict[str, Any]) -> None:
    numel = int(zero.fp16_partitioned_groups_flat_numel[index])
    wanted_bytes = zero.optimizer_swapper._io_aligned_numel(numel) * flat.element_size()
    names = ["", *(f"{name}-" for name, value in state.items() if _is_in_file(value))]
    for name in names:
        path = folder / f"{name}{flat.ds_id}.tensor.swp"
        got_bytes = path.stat().st_size if path.is_file() else 0
        if got_bytes != wanted_bytes:
            raise IntegrationError(
                f"{path} has {got_bytes} bytes, expected {wanted_bytes}: the checkpoint is cut short, or of another "
                "number of ranks; resume from an earlier one, with the ranks that saved it"
            )


def _is_in_file(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0
