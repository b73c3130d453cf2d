"""Every block of a recurrent model's run on the phantom, held against the forecast's: sizes, and what precedes what."""

from collections.abc import Callable, Iterable
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.allocator_events import ALLOC
from memwall.predict.cuda_allocator.step_peaks import NUM_STEADY
from memwall.predict.phases import Phases
from memwall.torch_internals.allocator import record_history, snapshot
from memwall.trace.fake import record_fake_run
from memwall.trace.workload import Workload

CARD = "l4"
Requests = list[tuple[bool, int]]
"""Whether a block is asked for or let go of, and its bytes."""

pytestmark = pytest.mark.phantom(card=CARD, numbers=False)


class Reader(nn.Module):
    """Reads samples by a bidirectional LSTM and a GRU above it, whose results are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.gru = nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.gru(self.lstm(x)[0])[0])
        return found


def in_turn(requests: Requests) -> Requests:
    """Returns requests in order; what is let go of between two of them has none."""
    turns = groupby(requests, key=lambda each: each[0])
    return [each for is_asked, turn in turns for each in (turn if is_asked else sorted(turn))]


def foreseen(workload: Workload) -> Requests:
    """Returns those of steps, an evaluation and steps after it, as foreseen without a device."""
    hardware = hardware_named(CARD)
    recording = recording_for(hardware)
    run = record_fake_run(workload, workload.make_batch, workspaces=recording.workspaces, choices=recording.choices())
    assert run.evaluation is not None
    training, evaluation = (
        translated(trace, hardware, autocast=recording.autocast) for trace in (run.training, run.evaluation)
    )
    evaluated, after = evaluation.steps
    events = Phases((training.steps[0], training.steps[1]), evaluated, after_evaluation=after).run
    sizes = {block: nbytes for action, block, nbytes, _ in events.events if action == ALLOC}
    steps = events.events[events.steps[0] : events.steps[-1]]
    return [(action == ALLOC, sizes[block]) for action, block, *_ in steps]


def counted(model: nn.Module, batch_of: Callable[[], Tensor], loss: Callable[[nn.Module, Tensor], Tensor]) -> Requests:
    """Returns those that torch's allocator notes of the same run."""
    batch = batch_of()
    optimizer = sgd(model.parameters())

    def train() -> None:
        for _ in range(NUM_STEADY):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    record_history(enabled="all", context=None)
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    train()
    with torch.no_grad():
        loss(model.eval(), batch_of())
    model.train()
    train()
    history = snapshot()["device_traces"][0]
    noted = ((one["action"], one["size"]) for one in history)
    return [(action == "alloc", size) for action, size in noted if action in ("alloc", "free_completed")]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_all_that_torch_asks_for_and_lets_go_of_is_foreseen_in_order(precision: str) -> None:
    """GIVEN steps, an evaluation of a batch that seeds, and steps THEN not a block is out of its place."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            found: Tensor = model(batch).float().pow(2).sum()
        return found

    def batch_of(device: str) -> Tensor:
        torch.manual_seed(0)
        return torch.zeros(16, 64, 24, dtype=dtype, device=device)

    workload = Workload(model=lambda: Reader().to(dtype), batch=lambda: batch_of("cpu"), loss=loss, optimizer=sgd)
    plain = foreseen(workload)
    model = Reader().to(dtype).cuda()
    assert in_turn(plain) == in_turn(counted(model, lambda: batch_of("cuda"), loss))
