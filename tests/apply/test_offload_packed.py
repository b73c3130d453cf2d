"""Offloaded activations that leave in a byte an element: within the op's bound, or as they were."""

from pathlib import Path

import msgspec
import pytest
import torch
from offload_engines import KIB, GradientIsSaved, Pool, is_empty, loaded_bytes, offload_for
from oracle import count_allocations
from packing_error import error_bound
from plans import a_plan, plan_of
from torch import Tensor, nn

from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.packed import check_can_pack
from memwall.errors import ApplyError
from memwall.planning.techniques.offload import LeavingForm, Offload
from memwall.predict.packed_bytes import num_packed_bytes, scratch_bytes
from memwall.session.session import Session
from memwall.torch_internals.saved import SavedTensorModifiedError
from memwall.triton_kernels.pack import pack, pack_into, unpack_into

pytestmark = pytest.mark.timeout(60)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def there_and_back(offload: ActivationOffload, tensor: Tensor) -> Tensor:
    with offload.group("block", form="int8"):
        saved = offload.pack(tensor)
    return offload.unpack(saved)


# What is lost.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (4099,)])
def test_every_element_comes_back_within_the_bound(pool: Pool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
    with offload_for(pool) as offload:
        back = there_and_back(offload, tensor)
        assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), dtype)
        rounding = back.double().abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
        error = (back.double() - tensor.double()).abs()
        assert bool((error <= error_bound(tensor) + rounding).all())  # type: ignore[arg-type]
        assert not torch.equal(back, tensor)
        assert offload.bytes_written == offload.bytes_read == num_packed_bytes(tensor.numel())


def test_the_units_are_those_of_neighbours_in_memory(pool: Pool) -> None:
    """However a tensor views them: a transposed one comes back as the transpose of what its base comes back as."""
    torch.manual_seed(0)
    base = torch.randn(64, 96)
    with offload_for(pool) as offload:
        with offload.group("block", form="int8"):
            packed = [offload.pack(view.detach()) for view in (base, base.t(), base.view(96, 64))]
        assert (offload.num_held, offload.bytes_written) == (1, num_packed_bytes(base.numel()))
        back, transposed, viewed = (offload.unpack(item) for item in packed)
        assert torch.equal(transposed, back.t())
        assert transposed.stride() == base.t().stride()
        assert torch.equal(viewed, back.view(96, 64))
        assert offload.bytes_read == offload.bytes_written
        del packed
        assert is_empty(offload, pool)


@pytest.mark.parametrize("num_elements", [1, 127, 128, 129, 4096, 1_000_003])
def test_bytes_are_those_that_plans_count_with(num_elements: int) -> None:
    """On disk, and while packing and unpacking, where a few hundred bytes for each thousand blocks stay uncounted."""
    source = torch.randn(num_elements)
    packed = pack(source)
    num_bytes = packed.codes.nbytes + packed.units.nbytes
    assert num_bytes <= num_packed_bytes(num_elements) < num_bytes + 512 + 4096
    for run in (lambda: pack_into(source, packed), lambda: unpack_into(packed, source)):
        peak_bytes = count_allocations(run, [source, packed.codes, packed.units], warm_steps=1).peak_bytes
        peak_bytes -= source.nbytes + num_bytes
        assert 0 <= peak_bytes - scratch_bytes(num_elements) < 40_000


# What is not.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4096),
        torch.ones(4096, dtype=torch.bool),
        torch.randn(4096).to(torch.uint8),
        torch.randn(4096, dtype=torch.float64),
        torch.randn(4096, dtype=torch.complex64),
        torch.randn(64, 96).chunk(3, dim=1)[1],
        torch.randn(1, 1024).expand(500, 1024),
        torch.randn(200),
    ],
    ids=["integers", "booleans", "bytes", "float64", "complex", "a view with gaps", "expanded", "small"],
)
def test_what_is_not_numbers_in_a_row_comes_back_to_the_bit(pool: Pool, tensor: Tensor) -> None:
    with offload_for(pool) as offload:
        back = there_and_back(offload, tensor)
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_range_with_a_value_that_is_not_finite_leaves_as_it_is(pool: Pool, bad: float) -> None:
    """As additive masks have them; packed, their neighbours would be NaN."""
    tensor = torch.randn(4099)
    tensor[4098] = bad
    with offload_for(pool) as offload:
        back = there_and_back(offload, tensor)
        assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))
        assert offload.bytes_written == tensor.nbytes
        assert offload.num_held == 0 or is_empty(offload, pool)


def test_a_block_whose_tensors_leave_exactly_gets_them_so_whoever_saved_them_before(pool: Pool) -> None:
    first, second = torch.randn(4096), torch.randn(4096)
    with offload_for(pool) as offload:
        with offload.group("packed", form="int8"):
            lossy = offload.pack(first)
        with offload.group("exact"):
            exact = [offload.pack(first), offload.pack(second)]
        with offload.group("packed", form="int8"):
            shared = offload.pack(second)
        assert offload.num_held == 3
        assert not torch.equal(offload.unpack(lossy), first)
        assert torch.equal(offload.unpack(exact[0]), first)
        assert torch.equal(offload.unpack(exact[1]), second)
        assert torch.equal(offload.unpack(shared), second)


def test_one_storage_seen_as_numbers_and_as_integers(pool: Pool) -> None:
    tensor = torch.randn(4096)
    with offload_for(pool) as offload, offload.group("block", form="int8"):
        numbers, integers = offload.pack(tensor), offload.pack(tensor.view(torch.int32))
        assert torch.equal(offload.unpack(integers), tensor.view(torch.int32))
        assert not torch.equal(offload.unpack(numbers), tensor)


# The engine's promises hold.


def test_an_in_place_write_after_the_save_raises(pool: Pool) -> None:
    tensor = torch.randn(4096)
    with offload_for(pool) as offload:
        with offload.group("block", form="int8"):
            saved = offload.pack(tensor)
        tensor.add_(1)
        with pytest.raises(SavedTensorModifiedError, match=r"float32\[4096\] saved in block"):
            offload.unpack(saved)


@pytest.mark.parametrize("window_bytes", [16 * KIB, 1 << 20])
def test_what_becomes_a_gradient_may_be_written_and_what_was_saved_stays(pool: Pool, window_bytes: int) -> None:
    """127 is a code times a unit of 1, so nothing is lost."""
    weight, gradient = torch.ones(2048, requires_grad=True), torch.full((2048,), 127.0)
    with offload_for(pool, window_bytes=window_bytes) as offload:
        with offload.group("block", form="int8"), offload.hooks():
            total = sum(GradientIsSaved.apply(weight, gradient) for _ in range(4))
        for number in range(1, 17, 4):
            total.backward(retain_graph=True)
            assert weight.grad is not None
            assert weight.grad[0] == 127 * (number + 3)
        assert gradient[0] == 127


def test_reading_ahead_counts_what_is_unpacked(pool: Pool) -> None:
    with offload_for(pool, window_bytes=40 * KIB) as offload:
        sources = [torch.randn(2048) for _ in range(12)]  # 8 KiB each, and 4 KiB packed
        with offload.group("block", form="int8"):
            packed = [offload.pack(source) for source in sources]
        for left in reversed(range(12)):
            torch.testing.assert_close(offload.unpack(packed[left]), sources[left], rtol=0.0, atol=0.02)
            assert loaded_bytes(offload) == min(left, 5) * 8 * KIB
            packed.pop()
        assert offload.bytes_read == 12 * num_packed_bytes(2048)
        assert is_empty(offload, pool)


def test_several_readers_share_what_was_unpacked_once(pool: Pool) -> None:
    tensor = torch.randn(4096)
    with offload_for(pool, window_bytes=1 << 20) as offload:
        with offload.group("block", form="int8"):
            packed = [offload.pack(tensor) for _ in range(3)]
        first = offload.unpack(packed[0])
        assert offload.unpack(packed[1]).data_ptr() == first.data_ptr()
        del first
        offload.unpack(packed[2])
        assert offload.bytes_read == num_packed_bytes(4096)


# A plan that says so.


def offload_of(block: str, form: LeavingForm) -> Offload:
    return Offload(
        block=block,
        scope="saved",
        tier="disk",
        min_bytes=1024,
        window_bytes=8 << 20,
        form=form,
        exactness="bit-exact" if form == "exact" else "changes-numerics",
    )


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def trained(model: nn.Sequential, x: Tensor, session: Session | None = None) -> None:
    """One step that leaves the weights where they are, and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if session is not None:
        session.attach(model, optimizer)
    (model(x) * torch.linspace(-1, 1, 64)).sum().backward()
    optimizer.step()


def test_gradients_are_as_far_off_as_their_inputs(tmp_path: Path) -> None:
    """GIVEN layers whose gradient is linear in what they save WHEN that is packed THEN |G - G'| <= |dy|' bound(x)."""
    plain, packed, x = chain(), chain(), torch.randn(48, 64)
    trained(plain, x)
    actions = (offload_of(name, "int8") for name in "012")
    with Session(plan=plan_of(packed, *actions), disk=str(tmp_path)) as session:
        trained(packed, x, session)
    assert session.measured.bytes_to_tier == 3 * num_packed_bytes(48 * 64)
    y = x
    for number, (layer, expected) in enumerate(zip(packed, plain, strict=True)):
        later = torch.linspace(-1, 1, 64).expand(48, 64)
        for following in reversed(list(plain)[number + 1 :]):
            later = later @ following.weight
        bound = later.double().abs().t() @ error_bound(y)  # type: ignore[arg-type]
        error = (layer.weight.grad - expected.weight.grad).double().abs()
        rounding = 1e-6 * (later.double().abs().t() @ y.double().abs())
        assert bool((error <= bound + rounding).all())
        assert error.max() > 0.02 * bound.max()
        assert torch.equal(layer.bias.grad, expected.bias.grad)
        y = plain[number](y).detach()


def test_on_other_devices_the_plan_is_refused(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        check_can_pack(torch.device(device), "h.0")
    with pytest.raises(ApplyError, match=r"leaves the block 'h.0', which is on mps, .*--allow low-bit-offload"):
        check_can_pack(torch.device("mps"), "h.0")
    model = chain().to("meta")
    plan = msgspec.structs.replace(
        plan_of(model), forecast=a_plan(offload_of("0", "exact"), offload_of("1", "int8"), device="meta").forecast
    )
    with (
        pytest.raises(ApplyError, match="packs what leaves the block '1', which is on meta"),
        Session(plan=plan, disk=str(tmp_path)) as session,
    ):
        trained(model, torch.empty(48, 64, device="meta"), session)


@pytest.mark.slow
def test_a_run_that_may_pack_and_cannot_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN packing is allowed WHEN the rule finds that it cannot be, as on a device, THEN the log has the reason."""
    monkeypatch.setattr(
        "memwall.planning.techniques.offload.TECHNIQUE.why_not", lambda trace, allow: "packed on a CPU only"
    )
    model = chain()
    with Session(budget_bytes=1 << 30, disk=str(tmp_path), allow=("low-bit-offload",)) as session:
        trained(model, torch.ones(48, 64), session)
    assert "low-bit-offload is allowed, but has no effect: packed on a CPU only" in caplog.text
