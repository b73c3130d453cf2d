"""An evaluation in larger batches is foreseen from a recorded training step."""

import msgspec
import torch
from torch import nn

import memwall
from memwall.predict.evaluation import evaluation_bytes

MIB = 1 << 20


def test_it_is_the_forward_of_a_larger_batch_without_what_backward_needs() -> None:
    """GIVEN three layers of which each holds 1 MiB for 256 samples WHEN 1,024 are evaluated THEN two live at once."""
    workload = memwall.Workload(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))),
        batch=lambda: torch.zeros(256, 1024),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = msgspec.structs.replace(memwall.record(workload, num_steps=1), base_bytes=100 * MIB, workspace_bytes=MIB)
    weights, batch = 3 * 4 * MIB, 4 * MIB
    expected = 100 * MIB + 4 * MIB + weights + batch + 2 * batch
    assert abs(evaluation_bytes(trace, batch=1024) - expected) <= batch
    assert evaluation_bytes(trace, batch=256) < evaluation_bytes(trace, batch=1024)
