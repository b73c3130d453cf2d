"""`pack` and `unpack`: what needs no kernel: mistakes, fake tensors, torch's rules for operators, and the cost."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import pack, unpack
from memwall.triton_kernels.cost import Calibration
from memwall.triton_kernels.pack import BLOCK_ELEMENTS, PackShape, cost, error_bound, pack_into, unpack_into
from memwall.triton_kernels.pack._ops import pack_op, unpack_op

H200 = hardware_named("h200")
FORMS: list[Any] = ["int8", "fp8"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_tensors_and_scalars(form: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    found = unpack(pack(tensor, form))
    assert found.shape == shape
    torch.testing.assert_close(found, tensor, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("form", FORMS)
def test_fp64_keeps_its_range(form: Any) -> None:
    tensor = torch.randn(300, dtype=torch.float64) * 1e200
    found = unpack(pack(tensor, form))
    assert found.dtype == torch.float64
    assert bool(((found - tensor).abs() <= error_bound(tensor, form)).all())


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_and_nothing_kept(form: Any) -> None:
    packed = pack(torch.randn(5, 40, requires_grad=True), form)
    assert not packed.units.requires_grad
    assert not unpack(packed).requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_runs_on_fake_tensors_of_a_real_shape(form: Any) -> None:
    with FakeTensorMode():
        packed = pack(torch.empty(8192, 4096, dtype=torch.bfloat16), form)
        found = unpack(packed)
    assert (found.shape, found.dtype) == ((8192, 4096), torch.bfloat16)
    assert packed.nbytes == 8192 * 4096 * (1 + 4 / 128)


@pytest.mark.parametrize("form", FORMS)
def test_operators_follow_torchs_rules(form: Any) -> None:
    # test_aot_dispatch_dynamic compares results, which torch cannot do in fp8.
    tests: tuple[str, ...] = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    tests = tests if form == "int8" else ("test_faketensor",)
    tensor = torch.randn(7, 40).t()
    torch.library.opcheck(pack_op, (tensor, form), test_utils=tests)
    packed = pack(tensor, form)
    torch.library.opcheck(unpack_op, (packed.codes, packed.units, torch.bfloat16), test_utils=tests)


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="forms int8 and fp8, not 'int4'"):
        pack(torch.zeros(3), "int4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"16 to 64 bits, found torch\.int64"):
        pack(torch.zeros(3, dtype=torch.long))
    packed = pack(torch.zeros(300))
    with pytest.raises(UsageError, match=r"wants 300 codes .* 3 units, found torch\.int8 \[300\] and \[2\]"):
        unpack(packed._replace(units=packed.units[:2]))
    with pytest.raises(UsageError, match=r"found torch\.int16 \[300\] and \[3\]"):
        unpack(packed._replace(codes=packed.codes.short()))


def test_memory_that_does_not_fit_is_named() -> None:
    tensor = torch.zeros(300)
    packed = pack(tensor)
    for wrong in (tensor.double(), tensor[:299], torch.zeros(600)[::2]):
        with pytest.raises(UsageError, match=r"float32 \[300\], packed, wants a contiguous tensor like that"):
            pack_into(wrong, packed)
        with pytest.raises(UsageError, match="a contiguous tensor like that"):
            unpack_into(packed, wrong)
    with pytest.raises(UsageError, match=r"and torch\.float32 units, found .* and torch\.float64 units"):
        pack_into(tensor, packed._replace(units=packed.units.double()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad_element", [None, 100_000])
def test_large_tensors_are_packed_as_their_parts_are(form: Any, bad_element: int | None) -> None:
    """However many elements are worked on at a time: a block knows of no other."""
    tensor = torch.randn(150_001)
    if bad_element is not None:
        tensor[bad_element] = torch.nan
    whole = pack(tensor, form)
    for part in range(0, tensor.numel(), 37 * BLOCK_ELEMENTS):
        alone = pack(tensor[part : part + 37 * BLOCK_ELEMENTS], form)
        blocks = slice(part // BLOCK_ELEMENTS, part // BLOCK_ELEMENTS + alone.units.numel())
        assert torch.equal(
            whole.codes[part : part + alone.codes.numel()].view(torch.int8), alone.codes.view(torch.int8)
        )
        assert torch.equal(whole.units[blocks].nan_to_num(-1.0), alone.units.nan_to_num(-1.0))


def test_a_pass_costs_what_its_bytes_take() -> None:
    """3 bytes for each bf16 element and way, and the units: 24 us for 64 MiB at 4.3 TB/s."""
    calibration = Calibration(copy_efficiency=4.3e12 / H200.memory_bytes_per_second)
    found = cost(PackShape(num_elements=1 << 25), torch.bfloat16, H200, calibration=calibration)
    assert found.bytes_moved == 2 * ((3 << 25) + (4 << 18))
    assert found.seconds / 2 == pytest.approx(23.7e-6, rel=0.01)
    assert found.saved_bytes == pack(torch.empty(1 << 12).bfloat16()).nbytes << 13
    assert found.eager is not None
    assert found.eager.seconds > 5 * found.seconds
    with pytest.raises(UsageError, match="must not be negative"):
        cost(PackShape(num_elements=-1), torch.bfloat16, H200)
