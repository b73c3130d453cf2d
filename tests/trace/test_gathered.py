"""A model that fully_shard divides is recorded as the same model whole: its blocks, its bytes, what autograd saves."""

import pytest
import torch
from block_models import WIDTH, Model
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from memwall.trace.records import Trace
from memwall.trace.trace_builder import TraceBuilder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo"),
]


def recorded(model: nn.Module) -> Trace:
    optimizer = torch.optim.AdamW(model.parameters())
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    builder.finish_step(optimizer)
    return builder.trace(optimizer)


def forward_of(trace: Trace, path: str) -> list[str]:
    """Returns the operations of a block's forward, by the number that a plan names them by."""
    step = trace.steps[0]
    call = next(call for call in step.calls if trace.modules[call.module].path == path)
    return [trace.names[op.name] for op in step.ops[call.start : call.end]]


def saved_bytes(trace: Trace) -> list[int]:
    step = trace.steps[0]
    return sorted(saved.nbytes for saved in step.saved if step.storages[saved.storage].category != "parameter")


@pytest.mark.usefixtures("one_rank")
def test_a_divided_model_is_recorded_as_the_whole_one() -> None:
    """GIVEN units whose hooks gather and free parameters THEN none of that is an operation of a block
    AND gathered parameters are no saved tensors, and die when their unit frees them.
    """
    whole, divided = Model(), Model()
    for unit in (*divided.blocks, divided):
        fully_shard(unit)
    one, other = recorded(whole), recorded(divided)
    assert forward_of(other, "blocks.0") == forward_of(one, "blocks.0")
    assert saved_bytes(other) == saved_bytes(one)
    weight = 2 * WIDTH * WIDTH * 4
    gathered = [s for s in other.steps[0].storages if s.nbytes == weight and s.category == "temporary"]
    first_backward = next(number for number, op in enumerate(other.steps[0].ops) if op.phase == "backward")
    assert any(s.death <= first_backward for s in gathered)
