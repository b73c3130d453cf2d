"""Models to forecast, and how a user asks for that."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FACTORY", "LLAMA", "MIB", "OPTIONS", "SCHEMA", "Run", "estimated"]

SCHEMA = json.loads((Path(__file__).parent / "contract" / "forecast.schema.json").read_text())
MIB = 1 << 20

# Activations outweigh the weights, and layers are alike, so that a plan has something to do.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
FACTORY = """
import torch
from memwall.trace.workload import Workload

def small():
    return Workload(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))),
        batch=lambda: torch.ones(64, 256),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
"""

Run = Callable[..., tuple[int, dict[str, Any]]]
OPTIONS = ("--batch", "4", "--seq", "1024", "--dtype", "bfloat16")


def estimated(run: Run, config: str, *more: str) -> tuple[int, dict[str, Any]]:
    return run("estimate", config, "--device", "h100-80gb", *OPTIONS, *more)
