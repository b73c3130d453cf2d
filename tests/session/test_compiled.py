"""Compiled models train under a budget: compiled blocks are kept, recomputed or offloaded as a whole, bit for bit."""

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_regions import REGIONS
from plans import plan_of
from torch import Tensor, nn
from torch._higher_order_ops import wrap

import memwall
from memwall.apply.memory.yielding import Yielding
from memwall.errors import InfeasibleError
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.store.room import CudaLimit
from memwall.torch_internals.compiler import compiled_call_of
from memwall.trace import step_recorder
from memwall.trace.compiled_call import CompiledCall
from memwall.trace.records import COMPILED_CODE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(wrap, "InductorCompiledCallable"), reason="compiled code is no operation there yet"),
]

WIDTH, BATCH = 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def in_place(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=REGIONS)
    return model


def wrappers(model: nn.Module) -> nn.Module:
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        model.blocks[number] = torch.compile(block, backend=REGIONS)  # type: ignore[operator, index]
    return model


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=REGIONS)  # type: ignore[return-value]


def whole_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=REGIONS)
    return model


def train(model: nn.Module, num_steps: int = 4, **fit: Any) -> tuple[list[Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    batches = [torch.randn(BATCH, WIDTH) for _ in range(num_steps)]

    def loop() -> None:
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    session = None
    if fit:
        with memwall.fit(model, optimizer, **fit) as session:
            loop()
    else:
        loop()
    return [parameter.detach().clone() for parameter in model.parameters()], session


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture
def made(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """Returns two equal models, compiled in the same way, in a compiler that has seen nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Net()
    compiled: Callable[[nn.Module], nn.Module] = request.param
    return compiled(copy.deepcopy(model)), compiled(model)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what memwall warned of; the compiler has a log of its own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("memwall")]


@pytest.mark.parametrize("made", [in_place, wrappers], indirect=True)
def test_compiled_blocks_are_recomputed_and_offloaded_to_the_same_bits(
    made: tuple[nn.Module, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = made
    expected, _ = train(plain)
    compiled = num_graphs()
    plan = plan_of(
        model,
        Recompute(block="blocks.0"),
        Recompute(block="blocks.1"),
        Offload(block="blocks.1", scope="inputs", tier="disk", min_bytes=1024, window_bytes=8 << 20),
        Offload(block="blocks.2", scope="saved", tier="disk", min_bytes=1024, window_bytes=8 << 20),
    )
    with caplog.at_level(logging.WARNING):
        found, session = train(model, plan=plan)
    assert said(caplog) == []
    assert all(map(torch.equal, found, expected))
    assert session.measured.bytes_to_tier > 0
    assert num_graphs() <= 2 * compiled, "the compiler saw memwall's own code"


@pytest.mark.parametrize(("made", "num_regions"), [(in_place, 3), (whole, 1), (whole_in_place, 1)], indirect=["made"])
def test_a_compiled_model_is_recorded_as_it_runs(
    made: tuple[nn.Module, nn.Module], num_regions: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = made
    expected, _ = train(plain)
    with caplog.at_level(logging.WARNING):
        found, session = train(model, budget="20GiB")
    assert said(caplog) == []
    assert all(map(torch.equal, found, expected))
    step, names = session.trace.steps[0], session.trace.names
    calls = [number for number, op in enumerate(step.ops) if names[op.name] == COMPILED_CODE]
    assert [step.ops[number].phase for number in calls] == ["forward"] * num_regions + ["backward"] * num_regions
    saved = {save.storage for save in step.saved if step.storages[save.storage].category == "activation"}
    assert {step.storages[index].birth for index in saved} <= set(calls) | {0, 1}, "saved tensors come out of the code"
    assert not [module for module in model.modules() if isinstance(compiled_call_of(module), CompiledCall)]


@pytest.mark.parametrize("made", [in_place, wrappers, whole, whole_in_place], indirect=True)
def test_parameters_of_compiled_code_stay_in_memory(
    made: tuple[nn.Module, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Code that reads them while they are away is compiled anew for each, and holds more than it would later."""
    plain, model = made
    train(plain, num_steps=1)
    compiled = num_graphs()
    with caplog.at_level(logging.INFO), pytest.raises(InfeasibleError, match="compiled code uses parameters without"):
        train(model, budget="64MiB")
    assert not any("of the parameters are on disk" in message for message in said(caplog))
    assert num_graphs() <= 2 * compiled, "the compiler saw memwall's own code"


@pytest.mark.parametrize("made", [whole], indirect=True)
def test_seconds_of_compiled_code_are_without_what_the_kernel_takes_for_its_pages(
    made: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN code within which the kernel computes WHEN it is recorded THEN its later steps are foreseen without."""
    clock = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(step_recorder, "kernel_seconds", lambda: next(clock))
    _, session = train(made[1], budget="20GiB")
    step, names = session.trace.steps[0], session.trace.names
    assert [op.seconds for op in step.ops if names[op.name] == COMPILED_CODE] == [0.0, 0.0]


def test_compiled_code_ends_the_limit_of_a_device_where_that_gives_way() -> None:
    """GIVEN the first step under a plan on CUDA WHEN it runs code compiled in the recorded step THEN it runs."""
    limit = CudaLimit()
    limit.place = torch.device("cuda", 0)
    yielding = Yielding(limit)
    try:
        (out,) = wrap.inductor_compiled_code(
            wrap.InductorCompiledCallable(lambda inputs: [inputs[0] + 1]), [torch.ones(2)]
        )
    finally:
        yielding.stop()
    assert out.tolist() == [2, 2]
    assert limit.place is None
