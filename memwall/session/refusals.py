"""Models that a session would train wrongly, or only in part: refused before the first step, with what to do."""

import torch
from torch import nn

from memwall.errors import ApplyError, UsageError


def check_is_trainable_here(model: nn.Module) -> None:
    """Looks at how a model is spread, and at layers that count their calls.

    Raises:
        UsageError: its parameters are on several CUDA devices, or it has layers of TransformerEngine.
    """
    devices = sorted({str(p.device) for p in model.parameters() if p.device.type == "cuda"})
    if len(devices) > 1:
        raise UsageError(
            f"the model is spread over {len(devices)} devices ({', '.join(devices)}), and a budget is for one; load "
            'it onto one of them (device_map={"": 0}), where a plan makes it fit, or shard it with DeepSpeed or FSDP'
        )
    engine = next((m for m in model.modules() if type(m).__module__.partition(".")[0] == "transformer_engine"), None)
    if engine is not None:
        raise UsageError(
            f"the model has layers of TransformerEngine ({type(engine).__name__}), whose scaling factors of FP8 follow "
            "every forward: one that runs again in backward would count twice; use torch's own layers, or train "
            "without memwall"
        )


def check_not_captured(device: torch.device) -> None:
    """Looks at whether a step is being captured into a CUDA graph.

    Raises:
        ApplyError: it is.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ApplyError(
            "a training step is being captured into a CUDA graph, which would play back its kernels without what "
            "memwall does between them; train without the graph (torch.cuda.graph, make_graphed_callables), or "
            "without memwall"
        )
