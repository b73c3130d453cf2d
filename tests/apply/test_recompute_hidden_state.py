"""Recomputed blocks whose forward reads and changes more than tensors: the bits of a plain run, or not recomputed."""

import collections
import copy
import gc
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from block_models import executor_of
from plans import plan_of
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from memwall.apply.blocks.executor import BlockExecutor
from memwall.apply.hidden_state import MAX_CLONED_BYTES
from memwall.errors import ApplyError
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

Recomputed = Callable[..., AbstractContextManager[None]]


class Block(nn.Module):
    """Two layers; what happens between them is up to the class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.num_forwards = [0]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.between(torch.sin(self.up(x)))))

    def between(self, y: Tensor) -> Tensor:
        return y


class PythonRandom(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * random.gauss(0, 1)


class NumpyRandom(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * float(np.random.rand())


class NumpyNormal(Block):
    """numpy's legacy generator makes normal numbers in pairs, and holds the second one back."""

    def between(self, y: Tensor) -> Tensor:
        return y * float(np.random.randn())


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, y: Tensor) -> Tensor:
        return y * torch.rand(y.shape, generator=self.generator)


class OwnPythonGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def between(self, y: Tensor) -> Tensor:
        return y * self.generator.random()


class OwnNumpyGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def between(self, y: Tensor) -> Tensor:
        return y * float(self.generator.random())


class Counting(Block):
    num_calls = 0

    def between(self, y: Tensor) -> Tensor:
        self.num_calls += 1
        return y * self.num_calls


class ReboundMean(Block):
    mean: Any = 0.0

    def between(self, y: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y - self.mean


class MeanInPlace(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(24)

    def between(self, y: Tensor) -> Tensor:
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean.clone()


class MeanInADict(MeanInPlace):
    def __init__(self) -> None:
        super().__init__()
        self.means = {"of": self.mean}
        del self.mean

    def between(self, y: Tensor) -> Tensor:
        self.means["of"].lerp_(y.detach().mean(0), 0.1)
        return y - self.means["of"].clone()


class BufferInPlace(MeanInPlace):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(24))


class LossesAppended(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.seen: collections.deque[float] = collections.deque(maxlen=3)

    def between(self, y: Tensor) -> Tensor:
        self.losses.append(y.square().mean())
        self.seen.append(float(y.detach().mean()))
        return y * len(self.losses)


class LayerDrop(Block):
    def between(self, y: Tensor) -> Tensor:
        return y if random.random() < 0.5 else torch.tanh(y) * torch.exp(-y)


class Alternating(Block):
    is_odd = False

    def between(self, y: Tensor) -> Tensor:
        self.is_odd = not self.is_odd
        return torch.tanh(y) * y if self.is_odd else y


EXACT = [
    PythonRandom,
    NumpyRandom,
    NumpyNormal,
    OwnGenerator,
    OwnPythonGenerator,
    OwnNumpyGenerator,
    Counting,
    ReboundMean,
    MeanInPlace,
    MeanInADict,
    BufferInPlace,
    LossesAppended,
    LayerDrop,
    Alternating,
]


def trained(model: nn.Module, *, num_steps: int = 3, around: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    """Losses, gradients and what random numbers come next, of some steps from the same random states."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    with around or nullcontext():
        for number in range(num_steps):
            batch = torch.linspace(-1, 1, 30).reshape(5, 6) * (number + 1)
            loss = model(batch).square().sum()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, torch.rand(3), torch.tensor([random.random(), np.random.rand()])]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def state_of(block: nn.Module) -> dict[str, Any]:
    """Attributes of the block's own, comparable."""
    kept = {name: value for name, value in vars(block).items() if name in ("num_calls", "mean", "is_odd", "means")}
    kept |= {name: len(value) for name, value in vars(block).items() if name in ("losses", "seen")}
    return {name: str(value) for name, value in kept.items()}


@contextmanager
def under(model: nn.Module, *actions: Recompute) -> Iterator[BlockExecutor]:
    executor = executor_of(model, *actions)
    executor.apply()
    try:
        yield executor
    finally:
        executor.undo()


@pytest.mark.parametrize("kept_ops", [(), (1,)], ids=["full", "selective"])
@pytest.mark.parametrize("kind", EXACT)
def test_hidden_state_is_what_it_was_in_forward(kind: type[Block], kept_ops: tuple[int, ...]) -> None:
    """Three steps to the bits of a plain run; what the block counts and collects has each batch once."""
    torch.manual_seed(1)
    plain = nn.Sequential(kind(), kind())
    treated = copy.deepcopy(plain)
    expected = trained(plain)
    with under(treated, *(Recompute(block=block, kept_ops=kept_ops) for block in "01")) as executor:
        assert_same(trained(treated), expected)
        for path in "01":
            counts = executor.wrapped(path)[1]
            assert (counts.dropped, counts.num_calls, counts.num_reruns) == ("", 3, 3)
    assert [state_of(block) for block in treated] == [state_of(block) for block in plain]


def test_a_list_is_the_same_list_after_backward(recomputed: Recomputed) -> None:
    model = nn.Sequential(LossesAppended())
    losses = model[0].losses
    with recomputed(model, Recompute(block="0")):
        model(torch.randn(5, 6)).sum().backward()
    assert model[0].losses is losses
    assert len(losses) == 1


def test_what_changes_between_forward_and_backward_stays_changed_and_does_not_reach_the_recomputation() -> None:
    """As a loop that calls model.eval() and takes its auxiliary losses before backward."""
    torch.manual_seed(1)

    class Both(LossesAppended):
        def between(self, y: Tensor) -> Tensor:
            return nn.functional.dropout(super().between(y), 0.5, training=self.training)

    plain = nn.Sequential(Both())
    treated = copy.deepcopy(plain)

    def gradient(model: nn.Module) -> Tensor:
        torch.manual_seed(2)
        first, second = (model(torch.ones(5, 6) * n).square().sum() for n in (1, 2))
        model.eval()
        model[0].losses.clear()
        (first + second).backward()
        assert not model.training
        assert not model[0].losses
        weight: Tensor = model[0].up.weight.grad
        return weight

    with under(treated, Recompute(block="0")):
        assert torch.equal(gradient(treated), gradient(plain))


# -- state that cannot be put back -------------------------------------------------------------------------------------

CLOCK = itertools.count(1)


class ReadsAGlobal(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * next(CLOCK)


def test_a_block_that_cannot_be_repeated_is_not_recomputed_and_named(caplog: pytest.LogCaptureFixture) -> None:
    global CLOCK
    torch.manual_seed(1)
    plain = nn.Sequential(Block(), ReadsAGlobal())
    treated = copy.deepcopy(plain)
    CLOCK = itertools.chain((1,), itertools.count(3))  # 2 is the second run's, which proves the first
    expected = trained(plain)
    CLOCK = itertools.count(1)
    with under(treated, Recompute(block="0"), Recompute(block="1")) as executor, caplog.at_level(logging.WARNING):
        assert_same(trained(treated), expected)
        assert executor.wrapped("0")[1].dropped == ""
        assert executor.wrapped("1")[1].num_runs == 3
        reason = executor.wrapped("1")[1].dropped
    assert "outside of the module" in reason
    assert [record.message for record in caplog.records] == [f"'1' keeps what it saves and is not recomputed: {reason}"]


def test_a_session_goes_on_and_says_which_block_is_not_recomputed() -> None:
    model = nn.Sequential(Block(), ReadsAGlobal(), nn.Tanh())
    plan = plan_of(model, Recompute(block="0"), Recompute(block="1"))
    with Session(plan=plan) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.attach(model, optimizer)
        for _ in range(3):
            model(torch.ones(5, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.measured.num_steps == 3
    assert list(session.measured.not_recomputed) == ["1"]


def test_a_second_run_that_fails_leaves_a_plain_step(caplog: pytest.LogCaptureFixture) -> None:
    class Once(Block):
        seen: set[int] = set()  # noqa: RUF012 - shared by all on purpose

        def between(self, y: Tensor) -> Tensor:
            if y.dim() in self.seen:
                raise KeyError("seen")
            self.seen.add(y.dim())
            return y

    plain = nn.Sequential(Once())
    treated = copy.deepcopy(plain)
    expected = trained(plain, num_steps=1)
    Once.seen.clear()
    with under(treated, Recompute(block="0")), caplog.at_level(logging.WARNING):
        assert_same(trained(treated, num_steps=1), expected)
    assert "'0' keeps what it saves and is not recomputed" in caplog.text
    assert "the second run ends in KeyError: 'seen'" in caplog.text


def test_a_large_tensor_that_is_written_in_place_is_named_as_the_cause() -> None:
    class Large(MeanInPlace):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(MAX_CLONED_BYTES // 4 // 24 + 1, 24)

        def between(self, y: Tensor) -> Tensor:
            self.mean.lerp_(y.detach().mean(0), 0.1)
            return y - self.mean[0].clone()

    torch.manual_seed(1)
    plain = nn.Sequential(Large())
    treated = copy.deepcopy(plain)
    expected = trained(plain)
    with under(treated, Recompute(block="0")) as executor:
        assert_same(trained(treated), expected)
        assert "it writes into mean (1.0 MiB)" in executor.wrapped("0")[1].dropped
    assert torch.equal(treated[0].mean, plain[0].mean)


def test_a_global_that_changes_before_backward_ends_the_run() -> None:
    """In the first step, where it can be known; no gradient of the block comes out."""
    factor = [2.0]

    class Scaled(Block):
        def between(self, y: Tensor) -> Tensor:
            return y * factor[0]

    model = nn.Sequential(Scaled())
    with under(model, Recompute(block="0")):
        loss = model(torch.ones(5, 6)).sum()
        factor[0] = 3.0
        with pytest.raises(ApplyError, match="'0' is recomputed in backward, and what it saves differs"):
            loss.backward()
    assert model[0].up.weight.grad is None


def test_writes_into_what_a_dropped_block_saved_are_noticed() -> None:
    class Written(ReadsAGlobal):
        def between(self, y: Tensor) -> Tensor:
            self.kept = torch.sin(super().between(y))
            return self.kept * self.kept

    model = nn.Sequential(Written())
    with under(model, Recompute(block="0")):
        loss = model(torch.ones(5, 6)).sum()
        model[0].kept.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- how often, and what of ------------------------------------------------------------------------------------------


def test_a_block_is_proven_once_a_plan() -> None:
    runs: list[int] = []

    class Noting(Block):
        def between(self, y: Tensor) -> Tensor:
            runs.append(1)
            return y

    model = nn.Sequential(Noting())
    for expected in (7, 14):  # three steps, each once and once more in backward, and the proof
        with under(model, Recompute(block="0")):
            trained(model)
        assert len(runs) == expected


@pytest.mark.parametrize("inner", [Counting, PythonRandom, Alternating])
def test_blocks_within_recomputed_blocks(inner: type[Block]) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Sequential(inner(), inner()), inner())
    treated = copy.deepcopy(plain)
    expected = trained(plain)
    with under(treated, *(Recompute(block=block) for block in ("0", "0.0", "0.1", "1"))):
        assert_same(trained(treated), expected)


def test_a_gradient_of_the_gradient() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Counting(), PythonRandom())
    treated = copy.deepcopy(plain)

    def second(model: nn.Module) -> list[Tensor]:
        random.seed(0)
        batch = torch.ones(5, 6, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(batch).square().sum(), batch, create_graph=True)
        return [*torch.autograd.grad(gradient.square().sum(), [p for p in model.parameters() if p.dim() > 1])]

    with under(treated, Recompute(block="0"), Recompute(block="1")):
        assert_same(second(treated), second(plain))
        assert_same(second(treated), second(plain))


@pytest.mark.parametrize("kind", [Block, ReadsAGlobal])
def test_what_a_step_needed_goes_with_its_graph(kind: type[Block]) -> None:
    """And does not wait for the garbage collector."""
    model, batch = nn.Sequential(kind()), torch.randn(5, 6).clone()
    held = weakref.ref(batch)
    gc.disable()
    try:
        with under(model, Recompute(block="0")):
            model(batch).sum().backward()
            del batch
            assert held() is None
        block = weakref.ref(model)
        del model
        assert block() is None
    finally:
        gc.enable()


def test_a_proven_block_holds_its_input_only() -> None:
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    model, batch = nn.Sequential(Block()), torch.randn(64, 6)
    with under(model, Recompute(block="0")), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(batch).sum()
    assert [tensor.data_ptr() for tensor in held if tensor.dim() == 2] == [batch.data_ptr()]


# -- arguments by keyword ----------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, scale: float, *, hidden_states: Tensor, extra: dict[str, list[Tensor]]) -> Tensor:
        y = nn.functional.dropout(torch.sin(self.up(hidden_states)), 0.5)
        extra["seen"].append(y)
        return self.down(y * extra["masks"][0]) * scale


def call(model: nn.Module, hidden: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    extra = {"masks": [mask], "seen": []}
    out: Tensor = model(2.0, hidden_states=hidden, extra=extra)
    return out, len(extra["seen"])


def test_the_devices_of_tensors_by_keyword_have_their_random_states_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for them among what it is given by position, and stashes the states of those devices."""
    asked: list[list[Tensor]] = []
    original = torch_checkpoint.get_device_states

    def spy(*args: Any) -> Any:
        asked.append([a for a in args if isinstance(a, Tensor)])
        return original(*args)

    monkeypatch.setattr(torch_checkpoint, "get_device_states", spy)
    monkeypatch.setattr(torch.cpu, "_initialized", True, raising=False)
    model, hidden, mask = Named(), torch.ones(5, 6), torch.ones(24)
    with under(model, Recompute(block="Named")):
        for _ in range(2):
            call(model, hidden, mask)
    assert len(asked) >= 2
    assert all({id(hidden), id(mask)} == set(map(id, tensors)) for tensors in asked[:1] + asked[-1:])


def test_a_block_that_is_given_no_tensor_of_its_device_names_it_by_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[set[str]] = []
    original = torch_checkpoint._infer_device_type

    def spy(*args: Any) -> str:
        kinds.append({a.device.type for a in args if isinstance(a, Tensor)})
        return original(*args)

    monkeypatch.setattr(torch_checkpoint, "_infer_device_type", spy)

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, device="meta"))

        def forward(self, size: int) -> Tensor:
            return torch.sin(self.weight * size)

    model = nn.Sequential(Grid())
    with under(model, Recompute(block="0")):
        model(3).sum().backward()
    assert kinds
    assert all("meta" in found for found in kinds)


def test_arguments_by_keyword_give_the_same_bits_and_lists_are_filled_once() -> None:
    torch.manual_seed(1)
    plain = Named()
    treated = copy.deepcopy(plain)
    mask = torch.rand(24, requires_grad=True)

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        out, num_seen = call(model, torch.ones(5, 6), mask)
        out.square().sum().backward()
        assert num_seen == 1
        found = [mask.grad, model.up.weight.grad, model.down.weight.grad]
        mask.grad = None
        model.zero_grad()
        return found

    with under(treated, Recompute(block="Named")):
        for _ in range(3):
            assert_same(step(treated), step(plain))


class Listing:
    """An engine that offloads nothing, and notes what it is offered."""

    def __init__(self) -> None:
        self.offered: list[Tensor] = []

    def group(self, *_: Any) -> Any:
        return nullcontext()

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        self.offered.append(tensor)
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        found: Tensor = packed
        return found

    def prefetch(self, key: Any) -> None:
        pass


def test_what_a_recomputed_block_is_given_by_keyword_is_offered_to_the_offload_once() -> None:
    model, hidden, mask = nn.ModuleDict({"block": Named()}), torch.ones(5, 6), torch.ones(24)
    engine = Listing()
    leaving = Offload(block="block", scope="inputs", tier="disk", min_bytes=0, window_bytes=0)
    executor = executor_of(model, Recompute(block="block"), leaving, engine=engine)
    executor.apply()
    call(model["block"], hidden, mask)
    executor.undo()
    offered = [tensor.data_ptr() for tensor in engine.offered]
    assert offered.count(hidden.data_ptr()) == offered.count(mask.data_ptr()) == 1
