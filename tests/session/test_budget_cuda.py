"""A budget on a CUDA device is held by torch's allocator, and gives way where a step under a plan would end the run."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import memwall
from memwall.apply.blocks.counts import BlockCounts
from memwall.apply.blocks.executor import BlockCall
from memwall.apply.blocks.recomputed import RecomputedBlock
from memwall.apply.memory.yielding import Yielding
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.proving import Proving
from memwall.errors import UsageError
from memwall.machine.meter import CudaMeter
from memwall.planning.techniques.recompute import Recompute
from memwall.session.device_budget import DeviceBudget
from memwall.session.session import Session
from memwall.store.room import CudaLimit, cuda_room_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MIB = 1 << 20
NUM_ROWS = 8192


def total_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory)


def stepped(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(NUM_ROWS, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.cuda.empty_cache()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def limit() -> Iterator[Callable[[int], CudaLimit]]:
    """Says how much more than now the device's allocator may hold."""
    made = CudaLimit()

    def more(num_bytes: int) -> CudaLimit:
        torch.cuda.empty_cache()
        made.hold(torch.device("cuda", 0), torch.cuda.memory_reserved() + num_bytes)
        return made

    yield more
    made.lift()


def test_a_plan_holds_the_allocator_to_the_budget_and_the_end_lets_it_go(
    training: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = training
    budget_bytes = CudaMeter(torch.device("cuda", 0)).now_bytes() + 1024 * MIB
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for _ in range(3):
            stepped(session, model, optimizer)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    assert session.measured.overall_peak_bytes <= budget_bytes
    torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == 1


def test_the_cache_makes_room_before_the_budget_is_passed(
    training: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    """GIVEN free segments that fill the budget WHEN a step needs other sizes THEN they go back to the device."""
    model, optimizer = training
    budget_bytes = CudaMeter(torch.device("cuda", 0)).now_bytes() + 512 * MIB
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for number in range(4):
            stepped(session, model, optimizer)
            held = [torch.empty((30 + number) * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
            del held
    assert session.measured.overall_peak_bytes <= budget_bytes


def test_the_first_step_under_a_plan_gets_what_it_needs(training: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """GIVEN a step that needs twice of what its plan foresaw, by what no batch's shape tells of
    THEN it runs, and the next plan knows of it.
    """
    model, optimizer = training
    held: list[Tensor] = []

    def hold_more(*_: object) -> None:
        if session.state == "running":
            held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))

    model.register_forward_pre_hook(hold_more)
    budget_bytes = CudaMeter(torch.device("cuda", 0)).now_bytes() + 256 * MIB
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for _ in range(4):
            stepped(session, model, optimizer)
            held.clear()
    assert session.measured.num_steps == 4
    assert session.measured.peak_bytes > 0
    assert session.measured.num_replans > 0 or session.measured.overall_peak_bytes > budget_bytes


def test_what_lies_free_between_blocks_is_no_room_for_a_proof(limit: Callable[[int], CudaLimit]) -> None:
    """GIVEN segments of which a block in use holds on to the rest THEN that rest is not said to be room."""
    limit(64 * MIB)
    device = torch.device("cuda", 0)
    room_bytes = cuda_room_bytes(device)
    blocks = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (2, 18)]
    del blocks[1]
    assert cuda_room_bytes(device) == room_bytes - 20 * MIB
    torch.empty(cuda_room_bytes(device), dtype=torch.uint8, device="cuda")


def test_a_limit_that_the_script_has_set_stays(limit: Callable[[int], CudaLimit]) -> None:
    torch.cuda.set_per_process_memory_fraction(0.01)
    before = torch.cuda.get_per_process_memory_fraction()
    held = limit(total_bytes() // 2)
    assert held.place is None
    assert torch.cuda.get_per_process_memory_fraction() == before
    torch.cuda.set_per_process_memory_fraction(1.0)
    limit(64 * MIB)
    torch.cuda.set_per_process_memory_fraction(0.5)  # by the script, while the limit is held
    held.lift()
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_operation_is_repeated_with_the_random_numbers_it_had(limit: Callable[[int], CudaLimit]) -> None:
    x = torch.ones(16 * MIB, device="cuda")
    generator = torch.cuda.default_generators[0]
    torch.cuda.manual_seed(3)
    nn.functional.dropout(x, 0.5)
    expected = generator.get_offset()
    torch.cuda.manual_seed(3)
    held = limit(8 * MIB)
    yielding = Yielding(held)
    y = nn.functional.dropout(x, 0.5)
    yielding.stop()
    assert held.has_yielded
    assert y.shape == x.shape
    assert generator.get_offset() == expected
    with pytest.raises(torch.OutOfMemoryError):
        nn.functional.dropout(x, 0.5)


def test_what_the_device_itself_lacks_is_an_error(limit: Callable[[int], CudaLimit]) -> None:
    held = limit(8 * MIB)
    yielding = Yielding(held)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total_bytes(), dtype=torch.uint8, device="cuda")
    yielding.stop()
    assert not held.has_yielded


def test_an_operation_that_writes_is_not_repeated(limit: Callable[[int], CudaLimit]) -> None:
    x = torch.ones(16 * MIB, device="cuda")
    places = torch.empty(16 * MIB, dtype=torch.int64, device="cuda")
    held = limit(8 * MIB)
    yielding = Yielding(held)
    with pytest.raises(torch.OutOfMemoryError):
        torch.sort(x, out=(x, places))
    yielding.stop()


def test_a_budget_above_the_card_is_refused_with_its_bytes(training: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    with pytest.raises(UsageError, match=r"the budget of .* is more than the .* that cuda:0 has; give at most that"):
        memwall.fit(*training, budget=total_bytes() + MIB)
    memwall.fit(*training, budget=total_bytes()).close()


def test_what_a_proof_takes_more_is_given_in_that_step_alone() -> None:
    """GIVEN a first step under a plan that passes the budget WHEN the next one begins THEN the limit is held again."""
    torch.cuda.empty_cache()
    meter, held = CudaMeter(torch.device("cuda", 0)), DeviceBudget()
    held.hold(meter, meter.now_bytes() + 64 * MIB)
    limit = torch.cuda.get_per_process_memory_fraction()
    held.begin_step()
    held.watch_step(can_be_redone=False)
    proof = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    held.end_step()
    assert torch.cuda.get_per_process_memory_fraction() > limit
    assert held.is_kept
    del proof
    held.begin_step()
    assert torch.cuda.get_per_process_memory_fraction() == limit
    held.lift()


def test_a_proof_leaves_no_segments_behind() -> None:
    """GIVEN a block that was run twice WHEN its first call ends THEN nothing could be given back of what it filled."""
    module = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    action = Recompute(saved_bytes=0, cost_seconds=0.0, exactness="bit-exact", block="")
    block = RecomputedBlock(module, module.forward, action)
    x = torch.ones(NUM_ROWS, 256, device="cuda", requires_grad=True)
    kept = block.run(x)
    reserved_bytes = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved_bytes
    assert kept.shape == x.shape


def test_a_proof_of_an_offload_leaves_no_segments_behind() -> None:
    """GIVEN a block whose saved tensors are held until they are proven WHEN its call ends THEN nothing is free."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))
    x = torch.ones(NUM_ROWS, 256, device="cuda", requires_grad=True)
    module.cuda()
    with ActivationOffload(None, window_bytes=MIB, is_excluded=lambda tensor: False) as offload:
        with offload.group("block"), Proving(offload, BlockCall(("block", 0), BlockCounts())).hooks():
            out = module(x)
        reserved_bytes = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert offload.bytes_written > 8 * MIB
        assert torch.cuda.memory_reserved() == reserved_bytes
        assert out.shape == x.shape


def test_a_proof_in_backward_begins_without_free_segments() -> None:
    """GIVEN memory that others have left free WHEN a proven block is recomputed THEN none of it is kept beside that."""
    module = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    action = Recompute(saved_bytes=0, cost_seconds=0.0, exactness="bit-exact", block="")
    block = RecomputedBlock(module, module.forward, action)
    out = block.run(torch.ones(NUM_ROWS, 256, device="cuda", requires_grad=True)).sum()
    before_bytes = torch.cuda.memory_reserved()
    left = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del left
    out.backward()
    assert torch.cuda.memory_reserved() < before_bytes + 256 * MIB
