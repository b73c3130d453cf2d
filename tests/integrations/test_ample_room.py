"""Scripts that have room to spare run as they are; those that turn out to need a plan get one, before the next step."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.cli.app import main
from memwall.errors import UsageError
from memwall.integrations.scripts import ample_room
from memwall.integrations.scripts.ample_room import AmpleRoom
from memwall.integrations.scripts.late_parking import LateParking
from memwall.machine.meter import process_bytes
from memwall.patches import active

BUDGET_BYTES = 1 << 30


class Watched:
    """A room whose process holds what the test says."""

    def __init__(self, folder: Path) -> None:
        self.held_bytes = 0
        self.taken_over: list[nn.Module | None] = []
        self.room = AmpleRoom("train.py", BUDGET_BYTES, take_over=self.taken_over.append, disk=str(folder))

    @property
    def is_listening(self) -> bool:
        """Whether forwards are looked at."""
        return any("register_module_forward_pre_hook" in change.where for change in active())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path)
    monkeypatch.setattr(ample_room, "process_bytes", lambda: found.held_bytes)
    monkeypatch.setattr(ample_room, "process_peak_bytes", lambda: found.held_bytes)
    found.room.start()
    yield found
    found.room.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, through: nn.Module | None = None) -> None:
    loss = model(torch.ones(3, 4))
    (loss if through is None else through(loss)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def test_after_the_first_step_nothing_is_hooked_but_the_ends_of_steps(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4)
    (optimizer,) = sgd(model)
    step(model, optimizer)
    assert watched.is_listening
    step(model, optimizer)
    assert not watched.is_listening
    said = capsys.readouterr().err
    assert said == "memwall: fits: 0 B held of a budget of 1.00 GiB; nothing is done, or loaded, below 256.0 MiB\n"
    step(model, optimizer)
    watched.room.close()
    watched.room.check(0)
    assert watched.taken_over == []
    assert watched.room.num_steps == 3
    assert capsys.readouterr().err == ""


def test_two_optimizers_are_awaited_and_a_later_one_is_too(watched: Watched) -> None:
    """GIVEN a GAN THEN both its optimizers have to step; WHEN a third one is made THEN that as well."""
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 4)
    of_generator, of_discriminator = sgd(generator, discriminator)
    for _ in range(2):
        step(discriminator, of_discriminator)
        assert watched.is_listening
    step(generator, of_generator, through=discriminator)
    step(discriminator, of_discriminator)
    assert not watched.is_listening
    another = nn.Linear(4, 4)
    step(another, *sgd(another))
    assert watched.is_listening
    assert watched.taken_over == []


def by_hand(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1


def test_a_loop_that_changes_parameters_itself_counts_its_steps(watched: Watched) -> None:
    model = nn.Linear(4, 4)
    for _ in range(3):
        by_hand(model)
    watched.room.close()
    watched.room.check(0)
    assert watched.room.num_steps == 3


def test_micro_batches_and_closures_are_one_step_each(watched: Watched) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = [model(torch.ones(3, 4)).pow(2).sum() for _ in range(2)]
        sum(losses, start=torch.zeros(())).backward()
        return losses[0]

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type, no-untyped-call]
    assert watched.room.num_steps == 2


def test_a_script_that_never_trains_is_told_so(watched: Watched) -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(UsageError, match="finished without a whole training step"):
        watched.room.check(0)
    watched.room.check(1)  # its own failure is what counts


def test_a_step_that_follows_more_than_a_quarter_of_the_budget_is_another_s(watched: Watched) -> None:
    """GIVEN a run that was told it fits WHEN it has passed its quarter THEN its next whole step is handed over."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    (optimizer,) = sgd(model)
    for _ in range(2):
        step(model, optimizer)
    watched.held_bytes = BUDGET_BYTES // 4 + 1
    ended = threading.Event()
    while not watched.room._is_passed:
        ended.wait(0.05)
    loss = model(torch.ones(3, 4)).sum()  # of the step that has begun
    assert watched.taken_over == []
    loss.backward()
    optimizer.step()
    model(torch.ones(3, 4))
    model(torch.ones(3, 4))
    assert watched.taken_over == [model]
    assert [change for change in active() if "quarter of its budget" in change.why] == []


def large_model(_: Watched) -> None:
    model = nn.Linear(1 << 13, 1 << 12, bias=False)  # 128 MiB, six times of which are more than a quarter of the budget
    model(torch.ones(1, 1 << 13))


def building(watched: Watched) -> None:
    """Copies layers, whose parameters no module registers."""
    watched.held_bytes = BUDGET_BYTES // 4 + 1
    nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 2, 256, batch_first=True), 16)


def compiling(_: Watched) -> None:
    torch.compile(nn.Linear(4, 4), backend="eager")


def compiling_in_place(_: Watched) -> None:
    nn.Linear(4, 4).compile(backend="eager")


def transformed(_: Watched) -> None:
    model = nn.Linear(4, 4)
    torch.func.grad(lambda given: functional_call(model, given, (torch.ones(3, 4),)).sum())(
        dict(model.named_parameters())
    )


def left_unstepped(_: Watched) -> None:
    model = nn.Linear(4, 4)
    optimizer, _unused = sgd(model, nn.Linear(4, 4))
    for _ in range(11):
        step(model, optimizer)


@pytest.mark.parametrize(
    "needs_more", [large_model, building, compiling, compiling_in_place, transformed, left_unstepped]
)
def test_what_may_need_a_plan_is_handed_over_once(watched: Watched, needs_more: Callable[[Watched], None]) -> None:
    needs_more(watched)
    assert len(watched.taken_over) == 1
    assert watched.room.is_over


def test_a_script_draws_the_numbers_that_it_draws_without_memwall(watched: Watched) -> None:
    """GIVEN what is loaded when the run is handed over draws some itself THEN those of the script are the same."""
    state, model = random.getstate(), nn.Linear(4, 4)
    (optimizer,) = sgd(model)
    step(model, optimizer)
    watched.room._take_over = lambda _: random.seed(1)
    watched.held_bytes = BUDGET_BYTES
    step(model, optimizer)
    assert watched.room.is_over
    assert random.getstate() == state


def test_a_process_of_several_is_handed_over(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ample_room, "num_processes", lambda: 2)
    model = nn.Linear(4, 4)
    model(torch.ones(3, 4))
    assert watched.taken_over == [model]


def gradients(model: nn.Module, parking: LateParking | None) -> list[torch.Tensor]:
    if parking is not None:
        parking.begin(model)
    loss = model(torch.linspace(-1, 1, 64 * 8192).view(8192, 64)).tanh().sum()
    if parking is not None:
        parking.end()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("most_bytes", "is_moved"), [(0, True), (1 << 40, False)])
def test_what_is_saved_leaves_once_too_much_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, is_moved: bool
) -> None:
    """GIVEN a step WHEN the process passes its quarter THEN what is saved goes to disk, and gradients are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    expected = [gradient.clone() for gradient in gradients(model, None)]
    model.zero_grad()
    parking, opened = LateParking(most_bytes, str(tmp_path), None), []
    monkeypatch.setattr(parking, "_open", lambda: (opened.append(True), LateParking._open(parking)))
    found = gradients(model, parking)
    assert bool(opened) == is_moved
    assert all(map(torch.equal, found, expected))


def test_what_stays_is_as_autograd_has_it(tmp_path: Path) -> None:
    """GIVEN a saved result that stays WHEN it is written to THEN backward refuses it, as without hooks."""
    model, parking = nn.Linear(4, 4), LateParking(1 << 40, str(tmp_path), None)
    parking.begin(model)
    result = model(torch.ones(3, 4)).exp()
    parking.end()
    result.add_(1.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        result.sum().backward()


def test_what_a_step_frees_is_returned_once_too_much_is_held(tmp_path: Path) -> None:
    """GIVEN a step that passes its quarter WHEN it frees blocks and makes larger ones THEN they are not there twice."""
    held_bytes, size = process_bytes(), 1 << 20
    parking, model = LateParking(held_bytes // 3, str(tmp_path), None), nn.Linear(4, 4)
    torch.zeros(size, dtype=torch.uint8)  # malloc no longer maps blocks of this size, each of which it would return
    parking.begin(model)
    model(torch.ones(3, 4)).exp().sum().backward()  # opens it, for exp saves its result
    blocks = [torch.zeros(size, dtype=torch.uint8) for _ in range(64)]
    del blocks[::2]
    larger = [torch.zeros(3 * size, dtype=torch.uint8) for _ in range(8)]
    live_bytes = sum(block.nbytes for block in (*blocks, *larger))
    grown_bytes = process_bytes() - held_bytes
    parking.end()
    assert grown_bytes < live_bytes + 16 * size


def test_a_step_goes_on_where_another_session_has_the_heap(tmp_path: Path) -> None:
    other, parking, model = AllocatorHandler(), LateParking(0, str(tmp_path), None), nn.Linear(4, 4)
    other.apply_tight()
    try:
        parking.begin(model)
        model(torch.ones(3, 4)).exp().sum().backward()
        parking.end()
    finally:
        other.undo()
    assert model.weight.grad is not None


DRAWS_FIRST = """
import torch
from torch import nn
from memwall.machine.meter import process_bytes, process_peak_bytes
torch.ones((process_peak_bytes() - process_bytes() + (320 << 20)) // 4)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.leaves_changed
def test_the_number_told_to_a_run_that_was_handed_over_has_room_for_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN own work that holds more than the steps WHEN those do not fit THEN what is told has room for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ample_room, "has_ample_room", lambda _: True)
    Path("train.py").write_text(DRAWS_FIRST)
    assert main(["run", "--budget", "64MiB", "train.py"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "before its first step the script held" in said
