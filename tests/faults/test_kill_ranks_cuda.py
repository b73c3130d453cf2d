"""Ranks on CUDA devices commit each step, are killed, and go on to the bits of a run that nobody killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

pytestmark = [
    pytest.mark.phantom(card="a100-80gb", devices=2, context_bytes=32 << 20),
    pytest.mark.slow(seconds=60),
    pytest.mark.timeout(300),
]

SCRIPT = """
import hashlib, os, signal, sys
import torch
from torch import distributed, nn
import memwall

distributed.init_process_group("nccl")
rank, device = distributed.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(128, 512), nn.Linear(512, 128), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))

torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(Block() for _ in range(6))).cuda(), device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(10 + rank)
batches = [torch.randn(4096, 128) for _ in range(5)]
for step in memwall.steps(5):
    if step == int(sys.argv[1]) and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(batches[step].cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
print("weights", rank, digest.hexdigest(), flush=True)
distributed.destroy_process_group()
"""


def trained(folder: Path, *, dies_in: int, options: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """Returns torchrun's status, the ranks' digests and all that was said."""
    (folder / "train.py").write_text(SCRIPT)
    under = ("-m", "memwall", "run", "--budget", "180MiB", *options) if options else ()
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    done = subprocess.run(
        [sys.executable, *launcher, *under, "train.py", str(dies_in)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    return done.returncode, sorted(line for line in said.splitlines() if line.startswith("weights")), said


def test_a_run_that_lost_a_rank_goes_on_to_the_bits_of_a_plain_one(tmp_path: Path) -> None:
    """GIVEN a budget that takes recomputation WHEN a rank is killed THEN both go on from the last step both have."""
    status, plain, said = trained(tmp_path, dies_in=-1)
    assert (status, len(plain)) == (0, 2), said
    status, found, said = trained(tmp_path, dies_in=3, options=("--checkpoint", "steps"))
    assert (status, found) == (1, []), said
    status, found, said = trained(tmp_path, dies_in=-1, options=("--checkpoint", "steps", "--resume"))
    assert (status, found) == (0, plain), said
    assert "the run continues from there" in " ".join(said.split())
    assert "recompute" in said
