"""A small GPT under DeepSpeed with a plan's configuration, or plain with --plain: the same batches, losses as JSON."""

import argparse
import json
import os
import resource
import runpy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, SEQUENCE, BATCH, LEARNING_RATE = 512, 32, 4, 3e-4
# Pieces of 1 MiB and more, or DeepSpeed swaps nothing; the projections of two blocks have 0.25 to 1 million elements.
GPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train_plain.py"))["GPT"]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    rows[:, 1:] = rows[:, :1]  # something to learn: the same byte again
    return rows[:, :-1], rows[:, 1:]


def parameters_of(model: nn.Module, has_groups: bool) -> Any:
    if not has_groups:
        return list(model.parameters())
    decayed = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) > 1]
    others = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) <= 1]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def build(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    model = GPT(WIDTH, 2, 4, SEQUENCE)
    if args.rms_norms:
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.LayerNorm):
                    setattr(parent, name, nn.RMSNorm(child.normalized_shape))
    return model


def train_plain(args: argparse.Namespace) -> dict[str, Any]:
    model = build(args)
    optimizer = torch.optim.AdamW(parameters_of(model, args.groups), lr=LEARNING_RATE)
    losses = []
    for step in range(args.first, args.first + args.steps):
        inputs, labels = batch_of(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


def train_deepspeed(args: argparse.Namespace) -> dict[str, Any]:
    import deepspeed

    from memwall import Plan
    from memwall.apply.kernels.patched import patch_kernels
    from memwall.integrations import deepspeed as integration

    plan = Plan.load(args.plan)
    deepspeed.init_distributed("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with torch.device("meta"):
        shape = build(args)
    config = plan.deepspeed_config(
        model=shape,
        disk=args.disk,
        stage=args.stage,
        offload_parameters=args.parameters,
        gradient_clipping=args.clip,
        optimizer=torch.optim.AdamW(shape.parameters()),
    )
    if args.plain_linear:
        config["zero_optimization"]["memory_efficient_linear"] = False
    if args.state is not None:
        config["zero_optimization"]["offload_optimizer"] = {"device": args.state, "pin_memory": False}
    is_partitioned = config["zero_optimization"]["stage"] == 3
    # Kernels are compared with what they replace, so values are there until DeepSpeed takes the model.
    is_partitioned &= args.kernels is None
    with deepspeed.zero.Init(config_dict_or_path=config) if is_partitioned else nullcontext():
        model = build(args)
    if args.kernels is not None:
        vars(model)["get_output_embeddings"] = lambda: model.head
        assert patch_kernels(model, chunk_rows=args.kernels).num_replaced == 5 + (args.kernels > 0)
    if args.cpu_adam:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
            parameters_of(model, args.groups), lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True
        )
    else:
        optimizer = torch.optim.AdamW(parameters_of(model, args.groups), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if args.load is not None:
        engine.load_checkpoint(args.load)
    rest = integration.apply_rest(engine, plan, disk=args.disk)
    if args.torch_checkpoint:
        for block in engine.module.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    micro, parts = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    losses = []
    for step in range(args.first, args.first + args.steps):
        inputs, labels = batch_of(step)
        total = torch.zeros(())
        for part in range(parts):
            begin = (part * world_size + rank) * micro
            mine = slice(begin, begin + micro)
            loss = F.cross_entropy(engine(inputs[mine]).flatten(0, 1).float(), labels[mine].flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach() / parts
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world_size)
    rest.undo()
    if args.save is not None:
        engine.save_checkpoint(args.save)
    files = list(Path(args.disk).rglob("*.swp"))
    return {
        "losses": losses,
        "config": config,
        "swapped_bytes": {
            kind: sum(path.stat().st_size for path in files if kind in path.as_posix())
            for kind in ("optimizer", "param")
        },
        "num_numbers": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--plan")
    parser.add_argument("--out", required=True)
    parser.add_argument("--disk")
    parser.add_argument("--stage", type=int)
    parser.add_argument("--parameters", default="none")
    parser.add_argument("--state")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--rms-norms", action="store_true", help="in place of layer norms, which have no fused kernel")
    parser.add_argument("--kernels", type=int, help="rows of logits at a time; 0 leaves the head as it is")
    parser.add_argument("--save")
    parser.add_argument("--load")
    for flag in ("--plain-linear", "--groups", "--cpu-adam", "--autocast", "--torch-checkpoint"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = train_plain(args) if args.plain else train_deepspeed(args)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if int(os.environ.get("RANK", "0")) == 0:
        Path(args.out).write_text(json.dumps(found))
    # Gloo's threads let go of the last collective's tensors by way of the interpreter: while that ends, they would
    # abort the process (torch 2.13, ProcessGroupGloo::runLoop).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
