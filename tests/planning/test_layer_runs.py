"""Long sequences of single layers are divided into runs of layers, which a plan treats as blocks."""

from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from plain_cnn import Network, features
from torch import Tensor, nn

from memwall.planning.blocks import find_blocks
from memwall.planning.one_recording.step_rows import StepRows
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.curve import live_peak_bytes
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(model: nn.Module) -> tuple[Trace, Step, tuple[BlockCalls, ...]]:
    workload = Workload(
        model=model,
        batch=lambda: torch.ones(2, 3, 32, 32),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = record(workload, num_steps=1)
    return trace, trace.steps[0], find_blocks(trace, trace.steps[0])


def paths(model: nn.Module) -> list[str]:
    return [block.path for block in recorded(model)[2]]


class Derived(nn.Sequential):
    """Calls its layers in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Named(nn.Sequential):
    """Has another name alone, as FSDP2 gives it one."""


def conv_of(width: int, *others: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), *others)


def perceptron(num_blocks: int = 6, relu: nn.Module | None = None) -> nn.Sequential:
    """Blocks that save what they are called with and what they return, of 64 KiB each, and nothing else."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), relu or nn.ReLU()) for _ in range(num_blocks)))


class LayerElsewhere(Network):
    """Has one ReLU beside the sequence, in all its places: in the sequence it has no place of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.features
        self.relu = nn.ReLU()
        self.features = nn.Sequential(*(self.relu if isinstance(layer, nn.ReLU) else layer for layer in features()))


def with_forward_around(network: Network) -> Network:
    """Puts a forward on the sequence that calls its own, as Accelerate does with a model's."""
    own = network.features.forward
    network.features.forward = lambda x: own(x).float()  # type: ignore[method-assign]
    return network


def test_runs_follow_each_other_and_hold_every_layer_and_whatever_it_saves() -> None:
    trace, step, blocks = recorded(Network())
    runs = [block for block in blocks if block.path.startswith("features.")]
    bounds = [block.path.removeprefix("features.").split(":") for block in runs]
    assert len(runs) > 2
    assert bounds[0][0] == "0"
    assert all(int(before[-1]) + 1 == int(after[0]) for before, after in pairwise(bounds))
    assert int(bounds[-1][-1]) == len(Network().features) - 1
    inside = {
        number for number, save in enumerate(step.saved) if trace.modules[save.module].path.startswith("features.")
    }
    assert sorted(number for block in runs for number in block.saved[0]) == sorted(inside)
    ends = [call.end for block in runs for call in block.calls]
    assert [call.start for block in runs[1:] for call in block.calls] == ends[:-1]


def test_no_run_begins_with_a_layer_that_writes_to_what_it_is_called_with() -> None:
    """GIVEN ReLUs in place WHEN runs are bounded THEN each begins before: else what it is called with is gone."""
    layers: list[nn.Module] = []
    for width in (3, 8, 8, 8):
        layers += [nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.ReLU(inplace=True)]
    found = [path for path in paths(Network(nn.Sequential(*layers))) if path.startswith("features.")]
    assert len(found) > 2
    first_layers = [layers[int(path.removeprefix("features.").partition(":")[0])] for path in found]
    assert not any(isinstance(layer, nn.ReLU) for layer in first_layers)


@pytest.mark.parametrize("model", [nn.Sequential(*features()), Network(Named(*features()))], ids=["root", "named"])
def test_a_root_and_a_class_with_the_same_forward_are_divided_too(model: nn.Module) -> None:
    assert any(":" in path for path in paths(model))


def test_a_call_that_ends_the_recording_is_no_call_of_the_layers() -> None:
    """GIVEN a root whose evaluation ended the recorded step, as it began WHEN it is looked at THEN it is divided."""
    trace, step, blocks = recorded(nn.Sequential(*features()))
    end = len(step.ops)
    root = next(call for call in step.calls if call.module == 0)
    evaluated = replace(root, start=end, end=end, backward_start=-1, backward_end=-1)
    found = find_blocks(trace, replace(step, calls=(*step.calls, evaluated)))
    assert [block.path for block in found] == [block.path for block in blocks]
    assert any(":" in block.path for block in found)


@pytest.mark.parametrize(
    "model",
    [
        Network(Derived(*features())),
        Network(nn.Sequential(*list(features())[:6])),
        Network(nn.Sequential(*list(features())[:8], *(conv_of(8, nn.BatchNorm2d(8), nn.GELU()) for _ in range(4)))),
        LayerElsewhere(),
        with_forward_around(Network()),
    ],
    ids=["a forward of its own", "few layers", "blocks within", "a layer from elsewhere", "a forward around"],
)
def test_others_are_not_divided(model: nn.Module) -> None:
    assert not any(":" in path for path in paths(model))


def test_blocks_that_save_what_they_pass_on_are_taken_together_and_each_run_has_something_to_free() -> None:
    _, step, blocks = recorded(perceptron())
    assert [block.path for block in blocks] == ["0:1", "2:3", "4:5"]
    for block in blocks:
        ends = {*block.calls[0].inputs, *block.calls[0].outputs}
        within = {step.saved[number].storage for number in block.saved[0]} - ends
        kept = [step.storages[index].nbytes for index in within if step.storages[index].category == "activation"]
        assert kept == [2 * 3 * 32 * 32 * 4]


def test_single_layers_that_save_what_they_pass_on_are_taken_together_as_well() -> None:
    flat = [layer for block in perceptron() for layer in block]  # type: ignore[attr-defined]
    assert [block.path for block in recorded(nn.Sequential(*flat))[2]] == ["0:3", "4:7", "8:11"]


def test_a_layer_within_that_others_call_too_keeps_a_sequence_whole() -> None:
    assert not any(":" in path for path in paths(perceptron(relu=nn.ReLU())))


@pytest.mark.parametrize("in_chain", [False, True], ids=["alone", "in a chain"])
def test_inputs_that_leave_are_free_where_the_blocks_before_let_go_of_them_as_well(in_chain: bool) -> None:
    trace, step, blocks = recorded(perceptron(12))
    rows = StepRows(StepModel(step, trace.names, blocks), "cpu", in_chain=in_chain)
    again, away = Treatment(recompute=True), Treatment(recompute=True, offload=True, min_bytes=1)
    freed = [rows.freed_bytes(1, away) - rows.freed_bytes(1, again), rows.freed_bytes(0, away)]
    assert [round(num_bytes / (2 * 3 * 32 * 32 * 4)) for num_bytes in freed] == [int(in_chain), 1]


def test_a_layer_that_is_called_twice_keeps_a_sequence_whole() -> None:
    """GIVEN one ReLU for all places WHEN the sequence is looked at THEN its calls are not those of one place."""
    relu = nn.ReLU()
    layers = [relu if isinstance(layer, nn.ReLU) else layer for layer in features()]
    assert not any(":" in path for path in paths(Network(nn.Sequential(*layers))))


def test_runs_that_are_computed_again_make_the_step_smaller_than_the_whole_sequence_does() -> None:
    def peak_bytes(model: nn.Module) -> tuple[int, int]:
        trace, step, blocks = recorded(model)
        treatments = {block.path: Treatment(recompute=True) for block in blocks if block.path.startswith("features")}
        again = StepModel(step, trace.names, blocks).treated(treatments)
        return live_peak_bytes(step, "cpu"), live_peak_bytes(again, "cpu")

    plain_bytes, in_runs_bytes = peak_bytes(Network())
    same_bytes, whole_bytes = peak_bytes(Network(Derived(*features())))
    assert plain_bytes == same_bytes
    assert whole_bytes >= plain_bytes
    assert in_runs_bytes < plain_bytes * 4 / 5
