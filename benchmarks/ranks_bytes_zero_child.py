"""One rank of `ranks_bytes.py` under DeepSpeed: what each form of a training step holds, every operation metered.

    torchrun --nproc-per-node 2 ranks_bytes_zero_child.py FOLDER KIND FORM

KIND is the file of a plan in FOLDER, whose configuration DeepSpeed is made with. Each rank leaves what it found in
FOLDER/rank.json, as `ranks_bytes_child.py` does.
"""

import gc
import json
import sys
from pathlib import Path

import deepspeed
import torch
from msgspec.structs import replace
from torch import distributed, nn

from memwall.integrations import deepspeed as integration
from memwall.planning.planfile import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from plans import plan_of
from ranks_bytes import made_batch
from ranks_bytes_child import actions_of, process_peak_bytes
from sharded_runs import LiveBytes, Model, loss_of


def peak_bytes(path: Path, form: str) -> tuple[int, int, int]:
    """Returns the most that tensors of a rank hold in the fifth step, and what its process does, as for others."""
    torch.manual_seed(0)
    model: nn.Module = Model()
    tokens, divided = made_batch(), Plan.load(path)
    plan = plan_of(model, *actions_of(form, ""), micro_batch=len(tokens))
    plan = replace(plan, forecast=replace(plan.forecast, ranks=divided.forecast.ranks))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    config = plan.deepspeed_config(model=model, optimizer=optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rest = integration.apply_rest(engine, plan)

    def step() -> None:
        engine.backward(loss_of(engine, tokens))
        engine.step()

    for _ in range(3):
        step()
    of_process = process_peak_bytes(step)
    gc.collect()
    # What DeepSpeed has made by now, its buffers and master weights included, and nothing of the forms before.
    held = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.layout is torch.strided]
    with LiveBytes(held) as meter:
        step()
    rest.undo()
    engine.destroy()
    return meter.peak_bytes, *of_process


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    folder, kind, form = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    found = {f"{kind}, {form}": peak_bytes(folder / kind, form)}
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
