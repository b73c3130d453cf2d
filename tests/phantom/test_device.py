"""The phantom device itself: its cards, its memory, its settings, and what it says of calls that did nothing."""

import ctypes
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.machine.hardware import hardware_named

pytestmark = pytest.mark.phantom
MIB = 1 << 20


@pytest.mark.parametrize(
    "card", [pytest.param(name, marks=pytest.mark.phantom(card=name)) for name in ("h100-80gb", "l4", "t4", "b200")]
)
def test_a_card_has_the_figures_of_hardware_toml(card: str) -> None:
    known, found = hardware_named(card), torch.cuda.get_device_properties(0)
    assert found.total_memory == known.usable_bytes
    assert f"{found.major}.{found.minor}" == known.compute_capability
    assert (found.multi_processor_count, found.L2_cache_size) == (known.num_multiprocessors, known.l2_cache_bytes)
    assert found.name == known.product


@pytest.mark.phantom(memory_bytes=1 << 30, context_bytes=100 * MIB, numbers=False)
def test_memory_ends_where_the_card_says() -> None:
    held = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (24 * MIB, 1 << 30)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 26\.00 MiB\. GPU 0 has a total capacity of 1024"
    ):
        torch.empty(26 * MIB, dtype=torch.uint8, device="cuda")
    del held


@pytest.mark.phantom(numbers=False)
def test_more_memory_than_the_host_has_can_be_allocated() -> None:
    held = [torch.empty(10 << 30, dtype=torch.uint8, device="cuda") for _ in range(7)]
    assert torch.cuda.memory_allocated() == 70 << 30
    assert held[0][:4].tolist() == [0, 0, 0, 0]


@pytest.mark.phantom(devices=3)
def test_devices_have_memory_of_their_own() -> None:
    assert torch.cuda.device_count() == 3
    there = torch.arange(8.0, device="cuda:2")
    assert torch.equal(there.to("cuda:1").mul(2).cpu(), torch.arange(8.0) * 2)
    assert torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.memory_allocated(2) == 512


def test_values_are_those_of_the_cpu() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Linear(32, 16)
    there = torch.nn.Linear(32, 16).cuda()
    there.load_state_dict(weight.state_dict())
    here, found = weight(x).relu(), there(x.cuda()).relu()
    here.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(found.cpu(), here)
    assert there.weight.grad is not None
    assert weight.weight.grad is not None
    assert torch.equal(there.weight.grad.cpu(), weight.weight.grad)


def test_a_call_that_did_nothing_is_counted() -> None:
    """GIVEN a function of cuSOLVER's that nobody wrote WHEN it is called THEN the account names it."""
    ctypes.CDLL("libcusolver.so.12").cusolverDnCreate(None)
    device = ctypes.CDLL(os.environ["PHANTOM_LIBRARY"])
    text = ctypes.create_string_buffer(1 << 20)
    device.phantom_account(text, ctypes.c_size_t(len(text)))
    assert "stub\t1\tcusolverDnCreate" in text.value.decode().splitlines()


@pytest.mark.parametrize("numbers", [pytest.param(n, marks=pytest.mark.phantom(numbers=n)) for n in (False, True)])
def test_a_step_on_fake_tensors_runs_beside_values(numbers: bool) -> None:
    """GIVEN fake tensors, which have no memory THEN their operations compute shapes as they do without a device."""
    with FakeTensorMode():
        layer = torch.nn.Linear(4, 3)
        layer(torch.zeros(2, 4)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (3, 4)
    assert float(torch.ones(2, device="cuda").sum()) == (2 if numbers else 0)


@pytest.mark.phantom(order="timed", numbers=False)
def test_a_device_that_is_told_to_sleep_does_so_on_its_clock() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(150_000_000)
    end.record()
    assert not end.query()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(100, rel=0.001)


@pytest.mark.phantom(order="timed")
def test_values_that_come_late_change_no_version_that_autograd_counts() -> None:
    """Attention keeps its random state in tensors of the host, whose values are queued as all others are."""
    seen: list[tuple[torch.Tensor, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tensor, tensor._version))
        return tensor

    q = torch.ones(1, 2, 16, 32, device="cuda", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum().backward()
    torch.cuda.synchronize()
    assert any(not tensor.is_cuda for tensor, _ in seen)
    assert all(tensor._version == version for tensor, version in seen)


@pytest.mark.phantom(order="lazy")
def test_the_backward_of_an_attention_drops_what_its_forward_dropped_however_late_that_is_computed() -> None:
    """GIVEN work that nobody waits for between them THEN gradients are those of a forward that was waited for."""

    def gradient(*, waits: bool) -> torch.Tensor:
        torch.manual_seed(0)
        q = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        if waits:
            torch.cuda.synchronize()
        out.square().sum().backward()
        assert q.grad is not None
        return q.grad.cpu()

    assert torch.equal(gradient(waits=False), gradient(waits=True))
