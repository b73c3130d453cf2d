"""A run is planned from its first step with the blocks in it that this one left out at random."""

import pytest
import torch
from torch import Tensor, nn

import memwall
from memwall.machine.meter import process_bytes
from memwall.predict.curve import live_peak_bytes
from memwall.trace.records import Step
from memwall.trace.steps import steady_step

WIDTH, DEPTH = 256, 6
EVERY = tuple(range(DEPTH))


class Block(nn.Linear):
    """Adds to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Net(nn.Module):
    """Runs some of its blocks, as it looks at a random number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in EVERY)
        self.runs = EVERY

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if torch.rand(()) < 2 and number in self.runs:
                x = block(x)
        return x


def planned_step(
    first: tuple[int, ...], *, frozen: tuple[int, ...] = (), stepped: tuple[int, ...] = EVERY, persist: bool = False
) -> Step:
    """Returns the step that a plan is made from once the first step has run these blocks."""
    model = Net()
    for number in frozen:
        model.blocks[number].requires_grad_(False)
    parameters = [each for number in stepped for each in model.blocks[number].parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    with memwall.fit(model, optimizer, budget=process_bytes() + (1 << 30)) as session:
        for runs in (first, EVERY):
            model.runs = runs
            model(torch.ones(64, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not persist)
        trace = session.trace
    assert trace is not None
    return steady_step(trace)


@pytest.mark.parametrize("persist", [False, True], ids=["gradients are dropped", "gradients are zeroed"])
def test_it_holds_gradients_and_state_of_blocks_that_did_not_run(persist: bool) -> None:
    few, every = planned_step((2,), persist=persist), planned_step(EVERY, persist=persist)
    assert len([call for call in few.calls if call.backward_start >= 0]) == len(every.calls)
    for category in ("gradient", "optimizer_state"):
        sizes = [sorted(s.nbytes for s in one.storages if s.category == category and s.nbytes) for one in (few, every)]
        assert sizes[0] == sizes[1]
    assert live_peak_bytes(few, "cpu") == pytest.approx(live_peak_bytes(every, "cpu"), rel=0.02)


@pytest.mark.parametrize(
    "not_trained", [{"frozen": (0, 1)}, {"stepped": (2, 3, 4, 5)}], ids=["frozen", "stepped by no optimizer"]
)
def test_what_does_not_train_is_not_counted(not_trained: dict[str, tuple[int, ...]]) -> None:
    step = planned_step((2, 3), **not_trained)
    assert len([s for s in step.storages if s.category == "gradient" and s.nbytes]) == 8
