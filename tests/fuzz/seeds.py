"""Makes whole files of every kind, for a fuzzer to begin with."""

import pickle
from pathlib import Path

import zstandard
from cuda_history import MIB, History, frame
from packed_checkpoint import packed

from memwall.cli.app import main

__all__ = ["seeds"]

_SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def seeds(folder: Path) -> dict[str, list[bytes]]:
    """Returns files by the name of their reader; makes them in a folder, by the commands that write them."""
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    trace, plan, run, steps = (str(folder / name) for name in ("t.trace", "plan.json", "run.json", "steps.jsonl"))
    for command in (
        ["profile", "-o", trace, str(script)],
        ["plan", trace, "--budget", "8GiB", "-o", plan],
        ["run", "--plan", plan, "--report", run, "--metrics", steps, str(script)],
    ):
        if main(command) not in (0, 4, 5):
            raise RuntimeError(f"memwall {' '.join(command)} failed")
    whole = Path(trace).read_bytes()
    if main(["run", "--budget", "8GiB", "--checkpoint", str(folder / "kept"), str(script)]) not in (0, 4, 5):
        raise RuntimeError("memwall run --checkpoint failed")
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB, [frame("/home/me/train.py", 3, "step")])
    return {
        "trace": [zstandard.ZstdDecompressor().decompress(whole.partition(b"\n")[2])],
        "trace_file": [whole],
        "plan": [Path(plan).read_bytes()],
        "run": [Path(run).read_bytes()],
        "snapshot": [pickle.dumps(history.snapshot(), protocol=4)],
        "steps": [Path(steps).read_bytes()],
        "config": [
            b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
            b'"intermediate_size": 128, "vocab_size": 100, "torch_dtype": "bfloat16"}'
        ],
        "deepspeed": [
            b'{"fp16": {"enabled": true}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, '
            b'"stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9, '
            b'"offload_param": {"device": "nvme", "buffer_count": 5, "buffer_size": 1e8}, '
            b'"offload_optimizer": {"device": "nvme"}}}'
        ],
        "diffusers": [
            b'{"_class_name": "UNet2DModel", "_diffusers_version": "0.30.0", "sample_size": 8, "layers_per_block": 1, '
            b'"block_out_channels": [8, 8], "in_channels": 4, "num_class_embeds": null}'
        ],
        "dlrover": [
            b'{"dataloader": {"version": 1, "dataloader_name": "train", "last_batch_size": 8, "batch_size": 4, '
            b'"num_workers": 2, "pin_memory": 1}, "optimizer": {"version": 1, "optimizer_name": "AdamW", '
            b'"learning_rate": 0.001, "weight_decay": 0.01}, "restart": false}'
        ],
        "next_budget": [b'{"budget_bytes": 100, "within_bytes": 90, "num_failures": 1}'],
        "checkpoint": [packed(folder / "kept")],
        "allocator_settings": [b"expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:[256:1,>:8]"],
    }
