"""The seconds of a recorded step's operations are the device's: what the host takes to issue them is apart."""

from typing import Any

import pytest
import torch
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.predict.curve import step_seconds
from memwall.torch_internals.device_time import keep_busy
from memwall.trace.records import Step
from memwall.trace.trace_builder import TraceBuilder

KERNEL_SECONDS = 5e-6
ON_A_BUSY_HOST: Any = pytest.mark.phantom(
    card="h100-80gb",
    devices=2,
    order="timed",
    time="roofline",
    numbers=False,
    host_share=1,
    kernel_ns=int(KERNEL_SECONDS * 1e9),
)


def recorded(model: nn.Sequential, batch: torch.Tensor) -> tuple[Step, tuple[str, ...]]:
    builder = TraceBuilder([model])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    builder.start_step(optimizer)
    model(batch).sum().backward()
    optimizer.step()
    step = builder.finish_step(optimizer)
    return step, builder.trace(optimizer).names


@pytest.mark.gpu
def test_a_device_is_kept_busy() -> None:
    done = torch.cuda.Event()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    keep_busy(200_000_000)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert done.query()


@ON_A_BUSY_HOST
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_small_kernels_take_what_the_device_takes_and_not_what_recording_does(device: str) -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))).to(device)
    step, names = recorded(model, torch.zeros(8, 64, device=device))
    tanh = [op.seconds for op in step.ops if names[op.name] == "aten.tanh.default"]
    assert len(tanh) == 8
    assert tanh == pytest.approx([KERNEL_SECONDS] * 8, rel=0.2)


@ON_A_BUSY_HOST
def test_the_first_use_of_a_kernel_is_told_by_its_arithmetic_where_the_device_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing keeps the device busy, so that it waits for the host at each operation, as at a first use."""
    width = 4096
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)).cuda()
    monkeypatch.setattr("memwall.trace.device_timer.keep_busy", lambda _: None)
    step, names = recorded(model, torch.zeros(width, width, device="cuda"))
    products = [op.seconds for op in step.ops if names[op.name] == "aten.mm.default"]
    arithmetic_seconds = 2 * width**3 / hardware_named("h100-80gb").flops["float32"]
    assert products == pytest.approx([arithmetic_seconds] * len(products), rel=0.05)


@ON_A_BUSY_HOST
def test_a_step_of_small_kernels_takes_what_the_host_takes() -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))).cuda()
    step, _ = recorded(model, torch.zeros(8, 64, device="cuda"))
    assert step.launch_seconds > KERNEL_SECONDS
    assert step_seconds(step) == step.launch_seconds * len(step.ops)
