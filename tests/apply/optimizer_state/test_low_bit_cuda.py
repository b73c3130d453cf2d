"""Moments in 8 bits on a CUDA device: a run's bytes against its forecast, and the numbers of the same run on a CPU."""

import gc
from typing import Any, NamedTuple

import pytest
import torch
from optimizer_runs import OPTIMIZERS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memwall
from memwall.apply.offload import parking
from memwall.apply.optimizer_state.low_bit import LowBitMoments, LowBitOptimizerState
from memwall.apply.optimizer_state.low_bit_form import is_low_bit
from memwall.errors import StoreError
from memwall.machine.tiers import Machine
from memwall.observe.measure import run_report
from memwall.planning.planfile import Plan
from memwall.planning.techniques import recompute
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.predict.low_bit_moments import (
    _LAUNCHES_PER_SLICE,
    _PASSED_BYTES_PER_ELEMENT,
    _SEARCH_TENSORS,
    DEVICE_SLICE_ELEMENTS,
)

MIB = 1 << 20
pytestmark = [pytest.mark.timeout(300), pytest.mark.requires("torchao")]
on_phantom = pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.norms = width, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        weights = (q @ k.mT / self.width**0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Gpt(nn.Module):
    """Is a small one, most of whose memory is its optimizer's."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(512, width), nn.Parameter(torch.zeros(32, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 512, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


class Run(NamedTuple):
    losses: list[float]
    weights: list[Tensor]
    plan: Plan | None
    peak_bytes: int
    """Counts what the process held on the device in its last step."""
    allocated_bytes: int
    """Counts the most that torch handed out in steps under the plan."""


def trained(device: str, *, begin: int | None = None, **options: Any) -> Run:
    """Trains in a session, if it has options, or with moments in 8 bits from step `begin` on."""
    torch.manual_seed(0)
    model = Gpt(192, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    session = memwall.fit(model, optimizer, **options) if options else None
    losses, kept = [], None
    for step in range(4):
        if step == begin:
            kept = LowBitOptimizerState(LowBitMoments(optimizer))
        words = torch.randint(512, (32, 32), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plan, peak_bytes, allocated_bytes = None, 0, 0
    if session is not None:
        session.close()
        plan, peak_bytes = session.plan, session.measured.last_peak_bytes
        allocated_bytes = run_report(session).measured.peak.allocated_bytes
    if kept is not None:
        kept.undo()
    assert not any(is_low_bit(value) for state in optimizer.state.values() for value in state.values())
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    del session, model, optimizer, kept, loss
    gc.collect()
    return Run(losses, weights, plan, peak_bytes, allocated_bytes)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what would free as much and lose nothing: host memory, and blocks that run again."""
    monkeypatch.setattr(parking, "machine_above_host", lambda *_, **__: Machine())
    monkeypatch.setattr(recompute.TECHNIQUE, "block_options", lambda *_: iter(()))


@on_phantom
@pytest.mark.usefixtures("alone")
def test_a_run_holds_what_is_foreseen_and_has_the_losses_of_the_same_run_on_a_cpu() -> None:
    """GIVEN a budget that nothing else meets WHEN a run has it, then its plan THEN numbers are those of a CPU."""
    whole = trained("cuda", budget="1GiB")
    assert whole.plan is not None
    least_bytes = whole.plan.forecast.smallest_feasible_budget_bytes
    assert least_bytes is not None
    live = trained("cuda", budget=least_bytes - 2 * MIB, allow=("low-bit-optimizer",))
    # What closed libraries hold is no tensor of a step's.
    libraries_bytes = whole.allocated_bytes - whole.plan.forecast.peak.allocated_bytes
    for begin, run in ((1, live), (0, trained("cuda", plan=live.plan))):
        expected = trained("cpu", begin=begin)
        assert run.losses == expected.losses != whole.losses
        assert all(map(torch.equal, run.weights, expected.weights))
        assert run.plan is not None
        assert [type(action) for action in run.plan.actions] == [LowBitState]
        forecast = run.plan.forecast
        assert run.allocated_bytes - libraries_bytes == pytest.approx(forecast.peak.allocated_bytes, rel=0.01)
        # Segments that moments were closed in stay in other pieces than those foreseen.
        assert run.peak_bytes == pytest.approx(forecast.phases["steady_step"].process_bytes, rel=0.03)


@on_phantom
@pytest.mark.parametrize("name", ["adamw foreach", "adamw fused", "adam amsgrad"])
def test_a_step_takes_the_memory_and_the_passes_that_are_foreseen(name: str) -> None:
    parameter = nn.Parameter(torch.zeros(2 * DEVICE_SLICE_ELEMENTS, device="cuda"))
    plain, low = (OPTIMIZERS[name]([parameter]) for _ in range(2))
    kept = LowBitOptimizerState(LowBitMoments(low))
    parameter.grad = torch.zeros_like(parameter)
    passes = []
    for optimizer in (plain, low):
        optimizer.step()
        with Passes() as found:
            optimizer.step()
        passes.append(found)
    gc.collect()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    low.step()
    kept.undo()
    num_moments = 3 if "amsgrad" in name else 2
    taken = (torch.cuda.max_memory_allocated() - before_bytes) / DEVICE_SLICE_ELEMENTS
    assert taken == pytest.approx(4 * (_SEARCH_TENSORS + 2 * num_moments), rel=0.01)
    per_moment = (passes[1].num_bytes - passes[0].num_bytes) / (num_moments * parameter.numel())
    assert per_moment == pytest.approx(_PASSED_BYTES_PER_ELEMENT, rel=0.01)
    num_kernels = passes[1].num_kernels / 2 / num_moments
    assert 0.85 * _LAUNCHES_PER_SLICE < num_kernels <= _LAUNCHES_PER_SLICE


class Passes(TorchDispatchMode):
    """Counts kernels of a device, and the bytes that they read and write."""

    num_kernels = num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        read = _on_device((args, {key: value for key, value in kwargs.items() if key != "out"}))
        written = _on_device(result) or _on_device(args[0])
        known = {tensor.untyped_storage().data_ptr() for tensor in read}
        is_view = all(t.untyped_storage().data_ptr() in known for t in written) and not function._schema.is_mutable
        if written and not is_view and "empty" not in function.name():
            self.num_kernels += 1
            self.num_bytes += sum(tensor.nbytes for tensor in (*read, *written))
        return result


def _on_device(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_cuda]


@on_phantom
def test_a_step_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN moments in 8 bits WHEN a step would be replayed without what the host does THEN the error says so."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = LowBitOptimizerState(LowBitMoments(optimizer))
    model(torch.ones(4, 64, device="cuda")).square().mean().backward()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StoreError, match="captured into a CUDA graph, and its moments are in 8 bits"):
        optimizer.step()
    state.undo()
