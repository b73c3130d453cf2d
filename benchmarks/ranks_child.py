"""One rank of `ranks.py`: a small Llama trained plainly or under memwall, by a loop of its own or a framework's.

    torchrun --nproc-per-node 2 ranks_child.py FRONTEND WRAPPER BUDGET FOLDER

BUDGET is in bytes; 0 trains without memwall. Each rank leaves what it found in FOLDER/rank.json. With CUDA devices each
rank has one, and they meet by NCCL.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import memwall
from memwall.machine.meter import CudaMeter, HostMeter, Meter
from memwall.torch_internals.sharding import local_part

NUM_STEPS, SAMPLES, SEQUENCE = 5, 8, 256
Losses = list[float]
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_CUDA else torch.device("cpu")


def made() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def batches(rank: int) -> Iterator[Tensor]:
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        yield torch.randint(512, (SAMPLES, SEQUENCE), generator=generator).to(DEVICE)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    for unit in (*model.model.layers, model):  # type: ignore[union-attr]
        fully_shard(unit)  # type: ignore[arg-type]
    return model


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Losses:
    losses = []
    for tokens in batches(distributed.get_rank()):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_loop(wrapper: str, budget_bytes: int) -> tuple[Losses, nn.Module, Any]:
    distributed.init_process_group("nccl" if ON_CUDA else "gloo")
    model = wrapped(made(), wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    note_begin()
    if not budget_bytes:
        return loop(model, optimizer), model, None
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        losses = loop(model, optimizer)
    return losses, model, session


def by_accelerate(wrapper: str, budget_bytes: int) -> tuple[Losses, nn.Module, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from memwall.integrations import MemwallPlugin

    plugin = None
    if wrapper == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=not ON_CUDA, fsdp_plugin=plugin)
    check_divides(accelerator, wrapper)
    model: nn.Module = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    note_begin()
    if not budget_bytes:
        model, optimizer = accelerator.prepare(model, optimizer)
        return loop(model, optimizer), model, None
    with MemwallPlugin(budget=budget_bytes) as memwall_plugin:
        model, optimizer = memwall_plugin.prepare(accelerator, model, optimizer)
        losses = loop(model, optimizer)
    return losses, model, memwall_plugin.session


def check_divides(accelerator: Any, wrapper: str) -> None:
    """Stops where Accelerate passes over its plugin and wraps in DistributedDataParallel instead."""
    if wrapper == "fsdp2" and accelerator.distributed_type.value != "FSDP":
        raise RuntimeError(f"Accelerate divides no model on a CPU; it is {accelerator.distributed_type.value} here")


def by_trainer(wrapper: str, budget_bytes: int) -> tuple[Losses, nn.Module, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from memwall.integrations import MemwallCallback

    losses: Losses = []

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    rows = [{"input_ids": row, "labels": row} for rank in range(2) for tokens in batches(rank) for row in tokens.cpu()]
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
    fsdp["transformer_layer_cls_to_wrap"] = ["LlamaDecoderLayer"]  # type: ignore[assignment]
    args = TrainingArguments(
        output_dir=str(Path(sys.argv[4]) / "trainer"),
        use_cpu=not ON_CUDA,
        per_device_train_batch_size=SAMPLES,
        max_steps=NUM_STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"fsdp": True, "fsdp_config": fsdp} if wrapper == "fsdp2" else {}),
    )
    callback = MemwallCallback(budget=budget_bytes) if budget_bytes else None
    model = made()
    note_begin()
    trainer = Trainer(
        model=model, args=args, train_dataset=rows, callbacks=[Noting(), *([callback] if callback is not None else [])]
    )
    check_divides(trainer.accelerator, wrapper)
    trainer.train()
    return losses, trainer.model_wrapped, None if callback is None else callback.session


FRONTENDS: dict[str, Callable[[str, int], tuple[Losses, nn.Module, Any]]] = {
    "fit": by_loop,
    "run": by_loop,
    "accelerate": by_accelerate,
    "trainer": by_trainer,
}
BEGAN: list[int] = []


def meter() -> Meter:
    return CudaMeter(DEVICE) if ON_CUDA else HostMeter()


def note_begin() -> None:
    """Notes what the process holds before it trains, and measures the peak from here on."""
    meter().reset_peak()
    BEGAN.append(meter().now_bytes())


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(local_part(parameter).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    frontend, wrapper, budget_bytes, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    if ON_CUDA:
        torch.cuda.set_device(DEVICE)
    losses, model, session = FRONTENDS[frontend](wrapper, budget_bytes)
    found: dict[str, Any] = {
        "losses": losses,
        "weights": digest(model),
        "began_bytes": BEGAN[0],
        "peak_bytes": meter().peak_bytes(),
    }
    if session is not None:
        found |= {
            "peak_bytes": session.measured.overall_peak_bytes,
            "steady_bytes": session.measured.peak_bytes,
            "predicted_bytes": session.plan.forecast.peak.process_bytes,
            "plan": session.plan.plan_hash,
            "num_actions": len(session.plan.actions),
            "num_replans": session.measured.num_replans,
        }
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    if frontend != "run":
        os._exit(0)  # gloo's threads, which ask for the interpreter, abort a process whose interpreter is ending


if __name__ == "__main__":
    main()
