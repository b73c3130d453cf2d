"""Which sub-modules a plan treats as one: found in the trace alone, disjoint, and small enough to be recomputed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import MODELS

from memwall.planning.blocks import find_blocks
from memwall.predict.call_rules import BlockCalls
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

needs_transformers = pytest.mark.requires("transformers")


pytestmark = pytest.mark.usefixtures("one_thread")


def blocks_of(
    model: nn.Module, batch: object, loss: Callable[[nn.Module, object], Tensor] | None = None
) -> tuple[Trace, Step, tuple[BlockCalls, ...]]:
    trace = record(
        Workload(
            model=model,
            batch=batch,
            loss=loss or (lambda model, batch: model(batch).square().mean()),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        num_steps=1,
    )
    return trace, trace.steps[0], find_blocks(trace, trace.steps[0])


def paths(model: nn.Module, batch: object) -> list[str]:
    return [block.path for block in blocks_of(model, batch)[2]]


class Layer(nn.Module):
    """A residual feed-forward layer; saves about nine times its width per row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt", ["blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
        ("vit", ["blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
        ("moe", ["blocks.0", "blocks.1", "norm", "head"]),
        # Its head is frozen and saves nothing.
        ("lora", ["blocks.0", "blocks.1", "blocks.2", "norm"]),
        ("resnet", ["stem", "stages.0", "stages.1"]),
        ("unet", ["encoders.0", "encoders.1", "bottom", "decoders.0", "decoders.1"]),
        pytest.param(
            "encoder",
            ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"],
            marks=needs_transformers,
        ),
        pytest.param(
            "encdec",
            [
                "encoder.dropout",
                "encoder.block.0",
                "encoder.block.1",
                "encoder.final_layer_norm",
                "decoder.dropout",
                "decoder.block.0",
                "decoder.block.1",
                "decoder.final_layer_norm",
            ],
            marks=needs_transformers,
        ),
    ],
)
def test_the_layers_a_person_would_name_are_the_blocks(name: str, expected: list[str]) -> None:
    case = MODELS[name]("tiny")
    trace, step, blocks = blocks_of(case.model, case.batch, case.loss)
    assert [block.path for block in blocks] == expected
    # Disjoint, in forward order, and holding most of what autograd keeps.
    assert [trace.modules[block.module].path for block in blocks] == expected
    starts = [block.calls[0].start for block in blocks]
    assert starts == sorted(starts)
    numbers = [number for block in blocks for call in block.saved for number in call]
    assert len(numbers) == len(set(numbers))
    own = {save.storage for save in step.saved if step.storages[save.storage].category == "activation"}
    covered = {step.saved[number].storage for number in numbers} & own
    own_bytes, covered_bytes = (sum(step.storages[i].nbytes for i in which) for which in (own, covered))
    assert covered_bytes >= 0.7 * own_bytes


def test_every_saving_is_inside_the_call_it_is_counted_to() -> None:
    case = MODELS["gpt"]("tiny")
    _, step, blocks = blocks_of(case.model, case.batch, case.loss)
    for block in blocks:
        for call, saved in zip(block.calls, block.saved, strict=True):
            assert saved
            assert all(call.start <= step.saved[number].packed <= call.end for number in saved)


def test_few_and_many_equal_layers_are_blocks_of_their_own() -> None:
    for depth in (2, 12):
        model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*(Layer(16) for _ in range(depth))))
        assert paths(model, torch.randn(32, 16))[-depth:] == [f"1.{place}" for place in range(depth)]


def test_a_large_stage_of_equal_layers_is_divided_into_them() -> None:
    """As in a hierarchical model: two stages are repeated themselves, but one at a time would be half of everything."""
    model = nn.Sequential(*(nn.Sequential(*(Layer(16) for _ in range(4))) for _ in range(2)))
    assert paths(model, torch.randn(32, 16)) == [f"{stage}.{place}" for stage in range(2) for place in range(4)]


def test_what_saves_next_to_nothing_is_no_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(64) for _ in range(4))
            self.gate = nn.Sequential(nn.Linear(64, 1), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * self.gate(x.mean(0, keepdim=True))

    assert paths(Model(), torch.randn(64, 64)) == [f"layers.{place}" for place in range(4)]


def test_a_block_that_runs_twice_has_two_calls_with_their_own_savings() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(16)
            self.head = Layer(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x).sin()))

    _, step, blocks = blocks_of(Recurrent(), torch.randn(8, 16))
    assert [(block.path, len(block.calls)) for block in blocks] == [("layer", 2), ("head", 1)]
    first, second = blocks[0].saved
    assert len(first) == len(second) > 0
    assert max(step.saved[n].packed for n in first) < min(step.saved[n].packed for n in second)


def test_a_frozen_part_has_no_backward_and_is_no_block() -> None:
    model = nn.Sequential(Layer(16), Layer(16), Layer(16))
    model[0].requires_grad_(False)
    assert paths(model, torch.randn(32, 16)) == ["1", "2"]


def test_what_cannot_be_wrapped_is_divided_or_left() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(16, 64), nn.Sigmoid()), torch.randn(4, 16))
    model = nn.Sequential(Layer(16), scripted, nn.Linear(64, 16), Layer(16))
    found = paths(model, torch.randn(32, 16))
    assert {"0", "3"} <= set(found)
    assert not any(path.startswith("1") for path in found)


def test_a_model_of_one_layer_has_no_block() -> None:
    assert paths(nn.Linear(8, 8), torch.randn(4, 8)) == []


def test_blocks_do_not_depend_on_times() -> None:
    case = MODELS["moe"]("tiny")
    assert blocks_of(case.model, case.batch, case.loss)[2] == blocks_of(case.model, case.batch, case.loss)[2]


@pytest.mark.slow
def test_each_of_many_layers_is_a_block_although_it_saves_little() -> None:
    """GIVEN a model of 150 equal layers, under 1 % of the saved bytes each WHEN divided THEN each layer is a block."""
    found = paths(nn.Sequential(*(Layer(16) for _ in range(150))), torch.randn(64, 16))
    assert found == [str(number) for number in range(150)]
