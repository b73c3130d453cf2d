"""One of two processes runs out of memory: it ends with a typed error, and the other does not wait for ever."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
from warm_python import warm_python

SCRIPT = textwrap.dedent("""
    import sys
    from datetime import timedelta
    import torch
    from plans import plan_of
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    import memwall

    rank, store = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    inner = nn.Linear(8, 1)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(inner, optimizer, plan=plan_of(inner)) as session:
        for step in range(3):
            def loss_of(rows):
                if (rank, step) == (1, 1):
                    torch.empty(1 << 60, dtype=torch.uint8)
                return model(rows).sum()
            session.compute_gradients(torch.ones(4, 8), loss_of)
            optimizer.step()
            optimizer.zero_grad()
""")


@pytest.mark.slow
def test_no_process_is_left_waiting(tmp_path: Path) -> None:
    """GIVEN two processes with a timeout of ten minutes WHEN one fails THEN both have ended within one."""
    search = os.pathsep.join(sys.path)
    runs = [warm_python().start("-c", SCRIPT, rank, tmp_path / "store", PYTHONPATH=search) for rank in range(2)]
    try:
        assert [run.wait(timeout_s=120) for run in runs] == [1, 1]
    finally:
        for run in runs:
            run.kill()
    assert "memwall.errors.OutOfMemoryError: out of memory in the forward of step 2: " in runs[1].said
    assert "this is one of 2 processes, and the others wait for its part of this step: it ends, so" in runs[1].said
