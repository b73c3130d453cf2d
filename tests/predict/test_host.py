"""Host memory of a device's run: what saving and reading a checkpoint takes, against a process that does it.

There is no device here. Tensors that claim to be elsewhere make safetensors and torch copy them, as from one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from memwall.predict.host import HostBytes, host_bytes_of
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

MIB = 1 << 20
WIDTH, NUM_LAYERS = 1_536, 8
# Python's objects and the allocator's slack beside tensors of 9 MiB each.
TOLERANCE = 0.1

pytestmark = pytest.mark.usefixtures("one_thread")

_MEASURED = """
import gc, json, sys, torch
from safetensors.torch import load_file, save_file
from torch import nn
from memwall.machine.meter import process_bytes, process_peak_bytes, reset_process_peak, return_free_memory

torch.set_num_threads(1)
width, num_layers, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()

class Elsewhere(torch.Tensor):
    @property
    def device(self):
        return torch.device("cuda", 0)

    def to(self, *args):
        return self.as_subclass(torch.Tensor).clone()

def grown(run):
    return_free_memory()
    before = process_bytes()
    reset_process_peak()
    run()
    return process_peak_bytes() - before

def save_weights():
    weights = {name: value.as_subclass(Elsewhere) for name, value in model.state_dict().items()}
    save_file(weights, f"{folder}/model.safetensors")

def save_state():
    torch.UntypedStorage.device = property(lambda storage: torch.device("cuda", 0))
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    del torch.UntypedStorage.device

def load_weights():
    model.load_state_dict(load_file(f"{folder}/model.safetensors", device="cpu"))

def load_state():
    torch.load(f"{folder}/optimizer.pt", map_location="cpu", weights_only=True)

print(json.dumps({run.__name__: grown(run) for run in (save_weights, save_state, load_weights, load_state)}))
"""


@pytest.fixture(scope="module")
def host(workload_of: Callable[..., Workload], recorded: Callable[..., Trace]) -> HostBytes:
    workload = workload_of(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))),
        lambda: torch.ones(3, WIDTH),
        optimizer=torch.optim.AdamW,
    )
    return host_bytes_of(recorded(workload, "a100-80gb").steps[-1])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """By how much the process grew while it saved and read weights and optimizer state."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(WIDTH), str(NUM_LAYERS), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        # Large blocks are given back when they are freed (mallopt(3), M_MMAP_THRESHOLD); else malloc keeps some.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)},
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_sizes_are_those_of_the_step(host: HostBytes) -> None:
    layer = 4 * WIDTH * WIDTH
    assert (host.weights_bytes, host.shard_bytes) == (NUM_LAYERS * layer, NUM_LAYERS * layer)
    assert (host.state_bytes, host.largest_state_bytes) == (2 * NUM_LAYERS * layer, layer)
    assert (host.loader_bytes, host.pinned_bytes) == (3 * WIDTH * 4, 32_768)


@pytest.mark.slow
def test_saving_copies_all_weights_of_a_file_and_one_tensor_of_the_state(
    host: HostBytes, measured: dict[str, int]
) -> None:
    assert measured["save_weights"] == pytest.approx(host.shard_bytes, rel=TOLERANCE)
    assert host.largest_state_bytes <= measured["save_state"] < 2 * host.largest_state_bytes
    grown = max(measured["save_weights"], measured["save_state"])
    assert host.save_peak_bytes - host.step_peak_bytes == pytest.approx(grown, rel=TOLERANCE)


@pytest.mark.slow
def test_resuming_reads_the_weights_and_then_the_whole_state(host: HostBytes, measured: dict[str, int]) -> None:
    assert measured["load_weights"] == pytest.approx(host.weights_bytes, rel=TOLERANCE)
    assert measured["load_state"] == pytest.approx(host.state_bytes, rel=TOLERANCE)
    grown = max(measured["load_weights"], measured["load_state"])
    assert host.resume_peak_bytes - host.process_bytes[0] == pytest.approx(grown, rel=TOLERANCE)


def test_page_locked_memory_comes_in_powers_of_two(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    for rows, expected in ((1_000, 2 * MIB), (1_024, 2 * MIB), (1_025, 4 * MIB)):
        workload = workload_of(lambda: nn.Linear(512, 8), lambda rows=rows: torch.ones(rows, 512))
        assert host_bytes_of(recorded(workload, "a100-80gb").steps[-1]).pinned_bytes == expected


def test_a_large_model_is_saved_in_files_of_fifty_gigabytes(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    width = 1 << 17
    workload = workload_of(lambda: nn.Linear(width, width, bias=False), lambda: torch.ones(1, width))
    host = host_bytes_of(recorded(workload, "a100-80gb").steps[-1])
    assert (host.weights_bytes, host.shard_bytes) == (4 * width * width, 50 * 10**9)
    assert host.build_peak_bytes - host.process_bytes[0] == 4 * width * width


def test_the_process_itself_is_a_range_of_which_the_low_end_counts(host: HostBytes) -> None:
    low, high = host.process_bytes
    assert 0 < low < high
    without = msgspec.structs.replace(host, process_bytes=(0, 0))
    for name in ("build_peak_bytes", "step_peak_bytes", "save_peak_bytes", "resume_peak_bytes"):
        assert getattr(host, name) - getattr(without, name) == low
