"""The modelled clock, by what operations compute and move: what takes how long, and what a copy hides. Simulated."""

from collections.abc import Callable

import pytest
import torch

from memwall.apply.offload.engine import ActivationOffload
from memwall.machine.hardware import hardware_named

pytestmark = pytest.mark.phantom(card="h100-80gb", order="timed", time="roofline", numbers=False)
H100 = hardware_named("h100-80gb")
MIB = 1 << 20


def seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_takes_its_arithmetic(dtype: torch.dtype) -> None:
    a = torch.zeros(8192, 8192, device="cuda", dtype=dtype)
    rate = H100.flops["float32" if dtype is torch.float32 else "bfloat16"]
    assert seconds(lambda: a @ a) == pytest.approx(2 * 8192**3 / rate, rel=0.02)


def test_what_computes_little_takes_its_bytes() -> None:
    a = torch.zeros(256 * MIB, device="cuda")
    assert seconds(lambda: a + a) == pytest.approx(2 * a.nbytes / H100.memory_bytes_per_second, rel=0.02)
    assert seconds(lambda: a.add_(1)) == pytest.approx(2 * a.nbytes / H100.memory_bytes_per_second, rel=0.02)
    assert seconds(lambda: a.view(-1, 2)[0]) < 1e-5


def test_a_copy_beside_a_product_is_hidden_and_a_wait_shows_it() -> None:
    a, there = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.zeros(64 * MIB, device="cuda")
    here, side = torch.empty(16 * MIB, pin_memory=True), torch.cuda.Stream()
    alone = seconds(lambda: a @ a)

    def beside(*, waits: bool) -> None:
        with torch.cuda.stream(side):
            here.copy_(there[: 16 * MIB], non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        a @ a
        torch.cuda.current_stream().wait_stream(side)

    copy_seconds = here.nbytes / H100.host_link_bytes_per_second
    assert seconds(lambda: beside(waits=False)) == pytest.approx(max(alone, copy_seconds), rel=0.05)
    assert seconds(lambda: beside(waits=True)) == pytest.approx(alone + copy_seconds, rel=0.05)


@pytest.mark.parametrize(("width", "most"), [(8192, 1.05), (1024, 8.0)])
def test_saved_tensors_that_leave_are_hidden_by_wide_layers_and_not_by_narrow_ones(width: int, most: float) -> None:
    """A product's arithmetic grows with the cube of the width, its bytes on the link with the square."""
    x = torch.zeros(width, width, device="cuda", requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(8):
            y = (y @ x).sin()
        y.sum().backward()

    plain = seconds(step)
    window_bytes = 4 * x.nbytes
    with ActivationOffload(None, window_bytes=window_bytes, min_bytes=MIB, is_excluded=lambda t: t is x) as offload:

        def offloaded() -> None:
            with offload.hooks():
                step()

        seconds(offloaded)
        ratio = seconds(offloaded) / plain
    assert ratio < most
    assert (ratio > 1.5) == (width == 1024)
