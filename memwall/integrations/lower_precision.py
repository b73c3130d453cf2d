"""Runs a workload as Accelerate does for `bf16=True` or `fp16=True`: the model's forward under autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from memwall.integrations.dtypes import parse_dtype
from memwall.patches import Patches
from memwall.trace.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

LowerDtype = Literal["bfloat16", "float16"]
AUTOCAST_DTYPES: tuple[LowerDtype, ...] = ("bfloat16", "float16")


def under_autocast(workload: Workload, dtype: str) -> Workload:
    """Returns the workload with its model under autocast, and what the model returns in float32 again.

    Source: accelerate 1.15, accelerator.py, `prepare_model`: `convert_outputs_to_fp32(autocast_context(forward))`.
    What scales gradients for float16 is left out.

    Raises:
        UsageError: `dtype` names none of `AUTOCAST_DTYPES`.
    """
    dtype = parse_dtype(dtype, option="--autocast", among=AUTOCAST_DTYPES)
    return replace(workload, loss=partial(_loss, workload.loss, dtype))


def _loss(loss: Callable[[Any, Any], "Tensor"], dtype: str, model: "nn.Module", batch: Any) -> "Tensor":
    import torch

    entered: list[AbstractContextManager[object]] = []

    def enter(module: "nn.Module", args: Any) -> None:
        device = next((parameter.device.type for parameter in module.parameters()), "cpu")
        entered.append(torch.autocast(device, dtype=getattr(torch, dtype)))
        entered[-1].__enter__()

    def leave(module: "nn.Module", args: Any, out: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return _in_float32(out)

    with Patches("runs a model's forward under autocast") as patches:
        patches.hook(model.register_forward_pre_hook, enter)
        patches.hook(model.register_forward_hook, leave, always_call=True)
        return loss(model, batch)


def _in_float32(out: Any) -> Any:
    import torch

    from memwall.torch_internals.trees import tree_map_only

    def widened(tensor: "Tensor") -> "Tensor":
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    return tree_map_only(torch.Tensor, widened, out)
