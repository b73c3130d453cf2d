"""Fused kernels in a model that two processes train: the same losses where weights are gathered for each module."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from combinations import exhaustive

pytestmark = pytest.mark.timeout(200)

SCRIPT = textwrap.dedent("""
    import json, os, sys
    import torch
    from language_model import LanguageModel, tokens
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from memwall.apply.kernels.patched import patch_kernels
    from memwall.errors import ApplyError

    rank, folder, wrapper, chunk_rows = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = inner = LanguageModel()
    num_replaced = 0 if chunk_rows < 0 else patch_kernels(inner, chunk_rows=chunk_rows).num_replaced
    if wrapper == "ddp":
        model = DistributedDataParallel(inner)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*inner.layers, inner.lm_head, inner):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, refusal = [], ""
    for step in range(3):
        try:
            loss = model(tokens()[4 * rank : 4 * rank + 4])
        except ApplyError as error:
            refusal = str(error)
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"losses": losses, "num_replaced": num_replaced, "refusal": refusal}, file)
    os._exit(0)  # Gloo's threads, which ask for the interpreter, abort a process whose interpreter is ending
""")


def trained(folder: Path, wrapper: str, chunk_rows: int) -> list[dict[str, Any]]:
    """What each of two processes saw; a negative number of rows leaves the model's own forwards."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(folder), wrapper, str(chunk_rows)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        errors = [run.communicate(timeout=150)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "chunk_rows"), [exhaustive("ddp", 128), ("fsdp", 0)])
def test_two_processes_train_as_with_the_models_own_forwards(tmp_path: Path, wrapper: str, chunk_rows: int) -> None:
    """Under DDP the loss without logits as well; under FSDP norms and MLPs, whose own calls gather their weights."""
    own, fused = trained(tmp_path / "own", wrapper, -1), trained(tmp_path / "fused", wrapper, chunk_rows)
    for expected, found in zip(own, fused, strict=True):
        assert found["num_replaced"] == 5 + (chunk_rows > 0)
        assert len(found["losses"]) == 3
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert own[0]["losses"] != own[1]["losses"]


@pytest.mark.slow
def test_a_head_that_fsdp_shards_is_refused_in_every_process(tmp_path: Path) -> None:
    """Liger #332; TRL #4544, #3368, #6372: its weight would be read where it is not gathered."""
    for found in trained(tmp_path / "fused", "fsdp", 128):
        assert "the weight of the head went away before its loss was computed" in found["refusal"]
        assert found["losses"] == []
