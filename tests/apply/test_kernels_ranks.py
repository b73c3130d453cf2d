"""Fused kernels in a model that two processes train: the same losses where weights are gathered for each module."""

from collections.abc import Callable
from typing import Any

import pytest
from combinations import exhaustive
from rank_runs import found_by_ranks

pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.timeout(200)]

SCRIPT = """
from language_model import LanguageModel, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memwall.apply.kernels.patched import patch_kernels
from memwall.errors import ApplyError

def trained(chunk_rows):
    torch.manual_seed(0)
    model = inner = LanguageModel()
    num_replaced = 0 if chunk_rows < 0 else patch_kernels(inner, chunk_rows=chunk_rows).num_replaced
    if WRAPPER == "ddp":
        model = DistributedDataParallel(inner)
    else:
        mesh = init_device_mesh("cpu", (num_ranks,))
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
    return {"losses": losses, "num_replaced": num_replaced, "refusal": refusal}

found(own=trained(-1), norms=trained(0), loss=trained(128))
"""
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Returns what each of two ranks saw: with the model's own forwards, with fused ones, with the loss too."""
    runs: dict[str, Found] = {}

    def by(wrapper: str) -> Found:
        if wrapper not in runs:
            script = f"WRAPPER = {wrapper!r}\n{SCRIPT}"
            runs[wrapper] = found_by_ranks(2, script, tmp_path_factory.mktemp(wrapper))
        return runs[wrapper]

    return by


@pytest.mark.parametrize(("wrapper", "kernels"), [exhaustive("ddp", "loss"), ("fsdp", "norms")])
def test_two_processes_train_as_with_the_models_own_forwards(
    found: Callable[[str], Found], wrapper: str, kernels: str
) -> None:
    """Under DDP the loss without logits as well; under FSDP norms and MLPs, whose own calls gather their weights."""
    ranks = found(wrapper)
    for rank in ranks:
        assert rank[kernels]["num_replaced"] == 5 + (kernels == "loss")
        assert len(rank[kernels]["losses"]) == 3
        assert rank[kernels]["losses"] == pytest.approx(rank["own"]["losses"], rel=1e-5)
    assert ranks[0]["own"]["losses"] != ranks[1]["own"]["losses"]


def test_a_head_that_fsdp_shards_is_refused_in_every_process(found: Callable[[str], Found]) -> None:
    """Liger #332; TRL #4544, #3368, #6372: its weight would be read where it is not gathered."""
    for rank in found("fsdp"):
        assert "the weight of the head went away before its loss was computed" in rank["loss"]["refusal"]
        assert rank["loss"]["losses"] == []
