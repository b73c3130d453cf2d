"""State that leaves in the middle of a run: beside it there is room for a bucket, not for all of it once more."""

from pathlib import Path

from warm_python import printed_by

MIB = 1 << 20

_SCRIPT = """
import json, sys, threading
import torch
from torch import nn
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.machine.meter import process_bytes

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(4, 1024)).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
held = [process_bytes()]
is_over = threading.Event()

def watch():
    while not is_over.wait(0.0005):
        held.append(process_bytes())

watching = threading.Thread(target=watch)
watching.start()
_, close = open_optimizer_state(
    optimizer, disk=sys.argv[1], capacity_bytes=None, resident_bytes=0, bucket_bytes=1 << 20, min_bytes=1024
)
is_over.set()
watching.join()
print(json.dumps([held[0], max(held), process_bytes()]))
close()
"""


def test_state_passes_one_buffer_on_its_way_out(tmp_path: Path) -> None:
    """GIVEN 64 MiB of state in eight shares WHEN it leaves THEN the process holds one of them more, then none."""
    before, most, after = printed_by(_SCRIPT, str(tmp_path))
    assert most - before < 12 * MIB
    assert before - after > 56 * MIB
