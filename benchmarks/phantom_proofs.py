"""Measures what a step that proves its actions takes more than one that does not, on the phantom device: simulated.

    phantom/run python benchmarks/phantom_proofs.py [MODEL ...]

A GPT, a ViT under autocast and a convolutional net train under plans made by hand: all blocks recomputed, the last two,
all that blocks save or their inputs in pinned memory, the optimizer's state there. Shown are, of the step before one
that proves and of that one, the most that is allocated, and reserved. The cache is emptied before either.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from phantom_budgets_script import Convolutions, Language, Vision
from torch import Tensor, nn

import memwall
from memwall.planning.action import Action
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute
from memwall.trace.modules import fingerprint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from plans import a_plan

MIB = 1 << 20
_NUM_WARM_STEPS = 4
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (
        lambda: Language(is_llama=False, num_layers=6, width=768, length=512),
        lambda: torch.randint(0, 256, (8, 512)),
    ),
    "vit": (Vision, lambda: torch.randn(1024, 3, 32, 32)),
    "conv": (lambda: Convolutions(64), lambda: torch.randn(64, 3, 56, 56)),
}


def leaving(path: str, scope: Literal["saved", "input"]) -> Offload:
    return Offload(block=path, scope=scope, tier="host", min_bytes=1 << 16, window_bytes=64 * MIB)


def plans(paths: Sequence[str]) -> dict[str, list[Action]]:
    recompute: list[Action] = [Recompute(block=path) for path in paths]
    return {
        "recompute": recompute,
        "recompute two": recompute[-2:],
        "offload": [leaving(path, "saved") for path in paths],
        "offload two": [leaving(path, "saved") for path in paths[-2:]],
        "offload inputs": [*recompute, *(leaving(path, "input") for path in paths)],
        "state": [OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=16 * MIB, min_bytes=4096)],
    }


def peaks(name: str, choice: str) -> list[tuple[int, int]]:
    """Returns the bytes allocated and reserved in a step, and in the one after it, which proves."""
    torch.manual_seed(0)
    make_model, make_batch = MODELS[name]
    model, batch = make_model().cuda(), make_batch().cuda()
    paths = [path for path, _ in model.named_modules() if path.startswith("blocks.") and path.count(".") == 1]
    optimizer = torch.optim.AdamW(model.parameters())
    plan = a_plan(
        *plans(paths)[choice],
        micro_batch=batch.shape[0],
        device="cuda",
        model_fingerprint=fingerprint([model]),
        process_bytes=1,
    )
    found = []
    with memwall.fit(model, optimizer, plan=plan) as session:
        for number in range(_NUM_WARM_STEPS + 1):
            if number == _NUM_WARM_STEPS:
                applied = session._live.in_effect.applied
                assert applied is not None
                applied._num_steps = 0
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16) if name == "vit" else nullcontext():
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return found[-2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    print("| model | plan | allocated MiB | a proof more | reserved MiB | a proof more |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in parser.parse_args().models or MODELS:
        for choice in plans([]):
            (allocated, reserved), (proven_allocated, proven_reserved) = peaks(name, choice)
            print(
                f"| {name} | {choice} | {allocated / MIB:.1f} | {(proven_allocated - allocated) / MIB:+.1f} | "
                f"{reserved / MIB:.0f} | {(proven_reserved - reserved) / MIB:+.0f} |",
                flush=True,
            )
            gc.collect()


if __name__ == "__main__":
    main()
