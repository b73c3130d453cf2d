"""A CUDA device that is full at some place of a step: what is done again ends with the weights of a run without."""

import ctypes
import hashlib

import pytest
import torch
from combinations import exhaustive
from torch import Tensor, nn

import memwall
from memwall.errors import OutOfMemoryError
from memwall.session.next_budget import MAX_ATTEMPTS
from memwall.session.session import Session

pytestmark = [pytest.mark.phantom(card="a100-80gb", memory_bytes=1 << 30, context_bytes=32 << 20), pytest.mark.slow]
MIB = 1 << 20
NUM_STEPS, NUM_BLOCKS = 4, 3
PLACES = [f"{what} {number}" for what in ("forward", "inside", "backward") for number in range(NUM_BLOCKS)]


class Full:
    """Takes all that the device has left, as another process might, when a place is passed, until a request fails.

    It is no state of the model that holds it, which would be put back: nothing is found in an object with slots.
    """

    __slots__ = ("_ballast", "_driver", "num_failed", "place", "stays")

    def __init__(self) -> None:
        self.place, self.num_failed, self.stays = "", 0, False
        self._driver, self._ballast = ctypes.CDLL(None), ctypes.c_void_p()
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._give_back())

    def passes(self, place: str) -> None:
        if place != self.place:
            return
        self.place = ""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info()
        assert self._driver.cudaMalloc(ctypes.byref(self._ballast), ctypes.c_size_t(free_bytes - MIB)) == 0

    def _give_back(self) -> None:
        if self._ballast.value and not self.stays:
            self._driver.cudaFree(self._ballast)
            self._ballast.value, self.num_failed = None, self.num_failed + 1


class Block(nn.Module):
    """Random numbers, statistics that a forward changes, and saved tensors of 16 MiB in segments of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(64, 1024), nn.Dropout(0.1), nn.Linear(1024, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, values: Tensor, full: Full, number: int) -> Tensor:
        inner = nn.functional.gelu(self.up(values))
        full.passes(f"inside {number}")
        return values + self.norm(self.down(self.drop(inner)))


class Model(nn.Module):
    def __init__(self, full: Full) -> None:
        super().__init__()
        self.blocks, self.full = nn.ModuleList(Block() for _ in range(NUM_BLOCKS)), full

    def forward(self, values: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.full.passes(f"forward {number}")
            values = block(values, self.full, number)
            values.register_hook(lambda _, number=number: self.full.passes(f"backward {number}"))
        return values.square().mean()


def made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(Full()).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(
    model: Model,
    optimizer: torch.optim.Optimizer,
    session: Session | None,
    place: str = "",
    *,
    is_handed_over: bool = True,
) -> str:
    """Returns a digest of what came of the training, in the last but one step of which a place is armed."""
    torch.manual_seed(1)
    for step in range(NUM_STEPS):
        batch = torch.randn(4096, 64, device="cuda")
        model.full.place = place if step == NUM_STEPS - 2 else ""
        if session is None or not is_handed_over:
            model(batch).backward()
        else:
            session.compute_gradients(batch, model)
        model.full.passes("optimizer")
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256(torch.cuda.get_rng_state().numpy().tobytes())
    for tensor in (*model.state_dict().values(),):
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


CASES = [
    *((place, True) for place in PLACES),
    *((place, False) for place in PLACES if not place.startswith("backward")),
]
# Each kind of place in either loop, and the first block, the middle one and the last.
FEW = {("forward 0", True), ("inside 1", True), ("backward 0", True), ("backward 2", True)}
FEW |= {("forward 2", False), ("inside 0", False)}


@pytest.mark.parametrize(("place", "is_handed_over"), [case if case in FEW else exhaustive(*case) for case in CASES])
def test_a_step_for_which_the_device_was_full_is_done_again_to_the_same_bits(
    place: str, *, is_handed_over: bool
) -> None:
    """GIVEN a loop that hands its steps over, or a plain one WHEN a forward fails THEN nothing is different."""
    expected = trained(*made(), None)
    torch.cuda.empty_cache()
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="600MiB") as session:
        found = trained(model, optimizer, session, place, is_handed_over=is_handed_over)
    assert model.full.num_failed == session.measured.oom_recoveries == 1
    assert session.measured.num_steps == NUM_STEPS
    assert found == expected


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_an_optimizer_step_for_which_the_device_was_full_goes_on_to_the_same_bits(*, is_handed_over: bool) -> None:
    """GIVEN parameters that have begun to change WHEN there is no room THEN what failed is repeated, and no more."""
    expected = trained(*made(), None)
    torch.cuda.empty_cache()
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="600MiB") as session:
        found = trained(model, optimizer, session, "optimizer", is_handed_over=is_handed_over)
    assert model.full.num_failed == session.measured.oom_recoveries == 1
    assert session.measured.num_steps == NUM_STEPS
    assert found == expected


def test_room_that_is_made_for_an_optimizer_step_is_not_enough_for_the_next_forward() -> None:
    """GIVEN a device that stays full WHEN workspaces make room for the optimizer THEN the run ends a step later."""
    model, optimizer = made()
    model.full.stays = True
    with (
        pytest.raises(OutOfMemoryError, match=rf"out of memory in the forward of step {NUM_STEPS}"),
        memwall.fit(model, optimizer, budget="600MiB") as session,
    ):
        trained(model, optimizer, session, "optimizer")
    assert session.measured.num_steps == NUM_STEPS - 1


def test_an_optimizer_step_for_which_no_room_is_made_any_more_ends_the_run_and_says_why() -> None:
    model, optimizer = made()
    session = memwall.fit(model, optimizer, budget="600MiB")
    session.measured.oom_recoveries = MAX_ATTEMPTS
    with pytest.raises(OutOfMemoryError, match=r"optimizer step.*parameters had begun to change"), session:
        trained(model, optimizer, session, "optimizer")
