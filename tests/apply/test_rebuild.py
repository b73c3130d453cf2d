"""Rebuilding what fused kernels return: planned before anything dearer, applied block by block, to the same bits."""

from pathlib import Path

import pytest
import torch
from block_models import offload
from language_model import LanguageModel, Layer, tokens
from msgspec.structs import replace
from plans import plan_of
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from memwall.apply.kernels.patched import patch_kernels
from memwall.errors import NoEffectError
from memwall.planning.action import Action
from memwall.planning.blocks import find_blocks
from memwall.planning.search import plan
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.rebuild import Rebuild
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.treatment import StepModel
from memwall.session.session import Session
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

NUM_LAYERS, CHUNK_ROWS = 6, 128
LAYERS = tuple(f"layers.{number}" for number in range(NUM_LAYERS))
FUSED = FusedKernels(
    modules=("norm", *(f"{layer}.{part}" for layer in LAYERS for part in ("mlp", "norm"))), chunk_rows=CHUNK_ROWS
)


def a_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(num_layers=NUM_LAYERS)


def a_model_with_kernels() -> LanguageModel:
    model = a_model()
    patch_kernels(model, chunk_rows=CHUNK_ROWS)
    return model


def train(model: LanguageModel, *actions: Action, disk: Path | None = None) -> list[Tensor]:
    """Its parameters after three steps under a plan by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Session(plan=plan_of(model, *actions), disk=None if disk is None else str(disk)) as session:
        session.attach(model, optimizer)
        for _ in range(3):
            model(tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_training_with_it_is_bitwise_training_with_the_kernels(tmp_path: Path) -> None:
    """Alone, with what is not rebuilt moved to disk, and beside blocks that are recomputed."""
    expected = train(a_model(), FUSED)
    rebuilt = [Rebuild(block=layer) for layer in LAYERS]
    mixed = (Recompute(block=LAYERS[0]), *rebuilt[1:], offload(LAYERS[1]), offload(LAYERS[2]))
    for actions, disk in (((*rebuilt,), None), (mixed, tmp_path)):
        found = train(a_model(), FUSED, *actions, disk=disk)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def a_trace() -> Trace:
    """A step with kernels, with times that follow from FLOPs and bytes and not from how busy the machine is."""
    trace = record(
        Workload(
            model=a_model_with_kernels,
            batch=tokens,
            loss=lambda model, batch: model(batch),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        )
    )

    def timed(step: Step) -> Step:
        seconds = [
            1e-6 + 2e-11 * op.flops + 1e-10 * sum(step.storages[index].nbytes for index in op.outputs)
            for op in step.ops
        ]
        ops = tuple(replace(op, seconds=time) for op, time in zip(step.ops, seconds, strict=True))
        return replace(step, ops=ops)

    return replace(trace, steps=tuple(timed(step) for step in trace.steps))


def test_as_the_budget_falls_results_are_rebuilt_before_whole_blocks_are_recomputed() -> None:
    trace = a_trace()
    roomy = plan(trace, budget="1TiB").forecast
    most_bytes, least_bytes = roomy.peak.process_bytes + roomy.margin_bytes, roomy.smallest_feasible_budget_bytes
    assert least_bytes is not None
    found = []
    for percent in range(100, -1, -5):
        actions = plan(trace, budget=least_bytes + (most_bytes - least_bytes) * percent // 100).actions
        again = [action for action in actions if isinstance(action, Rebuild | Recompute)]
        if again:
            found.append(again)
    assert {type(action) for action in found[0]} == {Rebuild}
    assert {action.saved_bytes for action in found[0]} == {8 * 65 * (64 + 192) * 4}
    assert Recompute in {type(action) for action in found[-1]}


def test_a_result_that_needs_no_gradient_is_not_forecast_as_rebuilt() -> None:
    """GIVEN an embedding and a first norm that are not trained THEN of the first layer the product alone is rebuilt."""

    def partly_frozen() -> LanguageModel:
        model = a_model_with_kernels()
        for module in (model.embed, model.layers[0].norm):
            module.requires_grad_(False)
        return model

    trace = record(
        Workload(
            model=partly_frozen,
            batch=tokens,
            loss=lambda model, batch: model(batch),
            optimizer=lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3),
        )
    )
    step = trace.steps[0]
    model = StepModel(step, trace.names, find_blocks(trace, step))
    found = {block.path: model.rebuilt_results(block.calls[0], block.saved[0]) for block in model.blocks}
    assert [len(found[layer]) for layer in LAYERS] == [1] + [2] * (NUM_LAYERS - 1)
    assert trace.names[step.ops[found[LAYERS[0]][0].op].name] == "memwall.glu.default"


def test_without_a_kernel_in_the_block_it_has_no_effect_and_says_so() -> None:
    with pytest.raises(NoEffectError, match="none of the tensors that it saved came from a fused kernel") as caught:
        train(a_model(), Rebuild(block="layers.1"))
    assert caught.value.action == "rebuilding in 'layers.1'"


class Keeping(Layer):
    """A block that takes its own saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x)


def test_where_hooks_of_the_blocks_own_take_its_tensors_it_has_no_effect_and_says_so() -> None:
    model = a_model()
    model.layers[1] = Keeping()
    with pytest.raises(NoEffectError, match="hooks of its own take them"):
        train(model, FUSED, Rebuild(block="layers.1"))
