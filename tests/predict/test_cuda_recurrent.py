"""Recurrent layers and cells of a step recorded for a device that is not here: cuDNN's operator, fused cells."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from plans import a_plan
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from memwall.machine.hardware import hardware_named
from memwall.planning.device_phases import with_evaluation
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.device import DeviceModel
from memwall.predict.phases import Phases
from memwall.trace.fake import record_fake_run
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 1 << 20
SAMPLES, TOKENS, WIDTH = 4, 16, 32
POSITIONS = SAMPLES * TOKENS


class First(nn.Module):
    """Returns what a recurrent layer or cell puts out, and no state."""

    def __init__(self, layer: nn.Module, *, is_packed: bool = False) -> None:
        super().__init__()
        self.layer, self.is_packed = layer, is_packed

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(PackedSequence(x.flatten(0, 1), torch.tensor([SAMPLES] * TOKENS)) if self.is_packed else x)
        first: Tensor = out if isinstance(out, Tensor) else out[0]
        return first.data if self.is_packed else first


@pytest.fixture
def run(workload_of: Callable[..., Workload], recorded: Callable[..., Trace]) -> Callable[..., Trace]:
    """(layer, options of the step) -> the step as an H100 would run it."""

    def made(
        layer: Callable[[], nn.Module],
        shape: tuple[int, ...] = (SAMPLES, TOKENS, WIDTH),
        *,
        dtype: torch.dtype = torch.float32,
        is_cast: bool = False,
        is_packed: bool = False,
    ) -> Trace:
        def loss(model: nn.Module, batch: Tensor) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=is_cast):
                return model(batch).float().sum()

        model = lambda: First(layer(), is_packed=is_packed)  # noqa: E731
        return recorded(workload_of(model, lambda: torch.ones(shape), dtype, loss=loss), "h100-80gb")

    return made


def lstm(**options: Any) -> nn.LSTM:
    return nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_lstm_is_one_operator_that_keeps_gates_cells_and_results(
    is_packed: bool, run: Callable[..., Trace], new_bytes: Callable[..., list[int]]
) -> None:
    """As is assumed of cuDNN; a CPU runs other operators, and keeps several times as much."""
    trace = run(lstm, is_packed=is_packed)
    state = SAMPLES * WIDTH * 4
    assert new_bytes(trace, "_cudnn_rnn")[:4] == [POSITIONS * WIDTH * 4, state, state, POSITIONS * WIDTH * 6 * 4]
    assert not any("mkldnn" in name or "sigmoid" in name for name in trace.names)


def test_a_gru_has_no_cells(run: Callable[..., Trace], new_bytes: Callable[..., list[int]]) -> None:
    trace = run(lambda: nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True))
    assert POSITIONS * WIDTH * 5 * 4 * 4 in new_bytes(trace, "_cudnn_rnn")  # of two layers in two directions


def test_weights_and_their_gradients_lie_in_one_buffer_each(run: Callable[..., Trace]) -> None:
    trace = run(lambda: lstm(num_layers=2))
    step = trace.steps[-1]
    nbytes = sum(weight.nbytes for weight in lstm(num_layers=2).parameters())
    for category in ("parameter", "gradient"):
        assert [each.nbytes for each in step.storages if each.category == category] == [nbytes]


def test_weights_that_are_computed_stay_where_they_are(
    run: Callable[..., Trace], numbers_of: Callable[..., list[int]]
) -> None:
    trace = run(lambda: nn.utils.parametrizations.weight_norm(lstm(), "weight_hh_l0"))
    assert numbers_of(trace, trace.steps[-1], "_cudnn_rnn")
    assert len([each for each in trace.steps[-1].storages if each.category == "parameter"]) == 5


def test_weights_of_bfloat16_are_gathered_in_every_call(run: Callable[..., Trace]) -> None:
    """Source: torch/backends/cudnn/__init__.py; torch warns of it on the device."""
    step = run(lstm, dtype=torch.bfloat16).steps[-1]
    nbytes = sum(weight.numel() * 2 for weight in lstm().parameters())
    assert len([each for each in step.storages if each.category == "parameter"]) == 4
    assert nbytes in {step.storages[save.storage].nbytes for save in step.saved}


def test_autocast_runs_a_layer_in_float16_whatever_else_it_casts_to(
    run: Callable[..., Trace], new_bytes: Callable[..., list[int]]
) -> None:
    trace = run(lstm, is_cast=True)
    assert new_bytes(trace, "_cudnn_rnn")[0] == POSITIONS * WIDTH * 2
    (number,) = (at for at, op in enumerate(trace.steps[-1].ops) if trace.names[op.name] == "aten._cudnn_rnn.default")
    storages = trace.steps[-1].storages
    assert storages[trace.steps[-1].ops[number].outputs[0]].dtype == "float16"


@pytest.mark.parametrize(
    ("cell", "operator", "num_kept"),
    [(nn.LSTMCell, "_thnn_fused_lstm_cell", 4), (nn.GRUCell, "_thnn_fused_gru_cell", 5)],
)
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_cell_is_two_products_and_one_kernel(
    cell: type[nn.Module],
    operator: str,
    num_kept: int,
    is_cast: bool,
    run: Callable[..., Trace],
    new_bytes: Callable[..., list[int]],
) -> None:
    trace = run(lambda: cell(WIDTH, WIDTH), (SAMPLES, WIDTH), is_cast=is_cast)
    assert new_bytes(trace, operator)[-1] == SAMPLES * WIDTH * num_kept * (2 if is_cast else 4)
    assert not any("sigmoid" in name for name in trace.names)


def sizes_of(trace: Trace, operator: str) -> list[int]:
    """Returns the bytes of the storages that the first call of an operator takes, in their order."""
    step = trace.steps[0]
    number = next(n for n, op in enumerate(step.ops) if operator in trace.names[op.name])
    return [storage.nbytes for storage in step.storages if storage.birth == number and storage.nbytes]


def test_a_layer_asks_for_what_it_works_in_before_what_it_keeps(run: Callable[..., Trace]) -> None:
    """Source: native/cudnn/RNN.cpp, `_cudnn_rnn`: results, then `workspace`, then `reserve`."""
    state, position = SAMPLES * WIDTH * 4, POSITIONS * WIDTH * 4
    *_, first, second, third, works, keeps = sizes_of(run(lstm), "_cudnn_rnn")
    assert [first, second, third, works, keeps] == [position, state, state, 4 * position, 6 * position]


def test_weights_were_copied_one_by_one_before_they_lay_in_a_buffer(run: Callable[..., Trace]) -> None:
    """GIVEN a model that is moved to the device THEN its phase of building holds copies and buffer at once."""
    trace = run(lstm)
    weight, bias = 4 * WIDTH * WIDTH * 4, 4 * WIDTH * 4
    (buffer,) = (storage for storage in trace.steps[1].storages if storage.category == "parameter")
    assert buffer.copied == (weight, weight, bias, bias)
    found = Phases((trace.steps[0], trace.steps[1]), None).peaks(profile_for("2.13.0")[0])
    assert found is not None
    assert found["build"].allocated_bytes == 2 * buffer.nbytes
    assert found["save"].allocated_bytes < 2 * buffer.nbytes + MIB


def test_an_evaluation_reads_no_random_state_of_dropout(workload_of: Callable[..., Workload]) -> None:
    """Source: native/cudnn/RNN.cpp, `get_dropout_state`: none where nothing is dropped."""
    workload = workload_of(lambda: First(lstm(num_layers=2, dropout=0.1)), lambda: torch.ones(SAMPLES, TOKENS, WIDTH))
    recording = recording_for(hardware_named("h100-80gb"))
    found = record_fake_run(workload, workload.make_batch, choices=recording.choices())
    assert found.evaluation is not None
    in_training, in_evaluation = (
        [storage.nbytes for storage in trace.steps[-1].storages if storage.nbytes == 3 * MIB]
        for trace in (found.training, found.evaluation)
    )
    assert (in_training, in_evaluation) == ([3 * MIB], [])


def dropping(
    workload_of: Callable[..., Workload], *, dropout: float = 0.1, num_samples: int = SAMPLES, num_tokens: int = TOKENS
) -> Workload:
    """Returns a step of an LSTM of two layers, and values dropped between them."""
    batch = lambda: torch.ones(num_samples, num_tokens, WIDTH)  # noqa: E731
    return workload_of(lambda: First(lstm(num_layers=2, dropout=dropout)), batch)


def seeded_batch() -> Tensor:
    torch.manual_seed(0)
    return torch.ones(SAMPLES, TOKENS, WIDTH)


def evaluated(workload: Workload, batch: Callable[[], Tensor]) -> Trace:
    """Returns the evaluation, and the training step after it where that is not like the others."""
    recording = recording_for(hardware_named("h100-80gb"))
    run = record_fake_run(workload, batch, workspaces=recording.workspaces, choices=recording.choices())
    assert run.evaluation is not None
    return run.evaluation


def test_after_seeding_the_random_state_of_dropout_is_made_anew(workload_of: Callable[..., Workload]) -> None:
    """Source: CUDAGeneratorImpl.cpp, `no_reset_rnn_state_`: the old one goes once the new one is there."""
    _, after = evaluated(dropping(workload_of), seeded_batch).steps
    old, new = (storage for storage in after.storages if storage.nbytes == 3 * MIB)
    assert (old.birth, new.death) == (-1, len(after.ops))
    assert 0 <= new.birth < old.death <= new.birth + 2


def test_a_checkpoint_has_the_random_state_made_anew_when_it_recomputes(workload_of: Callable[..., Workload]) -> None:
    """Source: torch/utils/checkpoint.py, `set_device_states`, ahead of each recomputation, and `fork_rng` behind it."""

    class Checkpointed(First):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    batch = lambda: torch.ones(SAMPLES, TOKENS, WIDTH, requires_grad=True)  # noqa: E731
    workload = workload_of(lambda: Checkpointed(lstm(num_layers=2, dropout=0.1)), batch)
    hardware = hardware_named("h100-80gb")
    recording = recording_for(hardware)
    run = record_fake_run(workload, batch, workspaces=recording.workspaces, choices=recording.choices())
    first, steady = translated(run.training, hardware).steps
    old, forward, backward = (storage for storage in steady.storages if storage.nbytes == 3 * MIB)
    assert old.birth == -1
    assert forward.birth < old.death <= forward.birth + 2
    assert backward.birth < forward.death <= backward.birth + 2
    assert backward.death == len(steady.ops)
    found = Phases((first, steady), None).peaks(profile_for("2.13.0")[0])
    assert found is not None
    assert found["save"].allocated_bytes >= 3 * MIB


def test_a_plan_counts_the_random_state_that_is_made_anew(workload_of: Callable[..., Workload]) -> None:
    """GIVEN a step that fills its segments WHEN an evaluation's batch has seeded THEN the next one takes another."""
    hardware = hardware_named("h100-80gb")
    recording = recording_for(hardware)
    workload = dropping(workload_of, num_samples=64, num_tokens=128)
    run = record_fake_run(workload, seeded_batch, workspaces=recording.workspaces, choices=recording.choices())
    training, evaluation = (translated(trace, hardware) for trace in (run.training, run.evaluation) if trace)
    like_all_others = msgspec.structs.replace(evaluation, steps=evaluation.steps[:1])
    model = DeviceModel(training, hardware)
    after, plain = (
        with_evaluation(a_plan(device="h100-80gb"), training, model, found).forecast.phases["eval"].reserved_bytes or 0
        for found in (evaluation, like_all_others)
    )
    assert after >= plain + 3 * MIB


@pytest.mark.parametrize(("dropout", "is_seeded"), [(0.1, False), (0.0, True)])
def test_a_step_that_no_seed_changes_is_not_recorded_again(
    dropout: float, is_seeded: bool, workload_of: Callable[..., Workload]
) -> None:
    workload = dropping(workload_of, dropout=dropout)
    assert len(evaluated(workload, seeded_batch if is_seeded else workload.make_batch).steps) == 1


def test_backward_lets_go_of_what_it_copied_before_it_finds_gradients_of_weights(run: Callable[..., Trace]) -> None:
    """Source: native/cudnn/RNN.cpp, `_cudnn_rnn_backward_input`, `_cudnn_rnn_backward_weight`."""
    trace = run(lstm)
    step = trace.steps[-1]
    of_data, of_weights = (
        number for number, op in enumerate(step.ops) if trace.names[op.name] == "aten._cudnn_rnn_backward.default"
    )
    copies = [each for each in step.storages if each.birth == of_data and each.dtype == "uint8"]
    assert copies
    assert all(each.death == of_weights for each in copies)
    (gradient,) = (each for each in step.storages if each.birth == of_weights and each.category == "gradient")
    assert gradient.nbytes == sum(weight.nbytes for weight in lstm().parameters())


def test_autocast_casts_weights_first_and_the_data_last(run: Callable[..., Trace]) -> None:
    """As torch 2.13 is seen to: cudnn/AutocastRNN.cpp has the casts among the arguments of a call."""
    step = run(lstm, is_cast=True).steps[-1]
    halves = [each.nbytes for each in step.storages if each.dtype == "float16" and each.phase == "forward"]
    weights, state = sum(weight.numel() for weight in lstm().parameters()), SAMPLES * WIDTH
    assert halves[:4] == [2 * weights, 2 * state, 2 * state, 2 * POSITIONS * WIDTH]


def test_weights_of_a_layer_without_biases_are_read_where_they_are(run: Callable[..., Trace]) -> None:
    """Source: native/cudnn/RNN.cpp, `try_get_weight_buf`: they share a buffer with room for biases."""
    step = run(lambda: lstm(bias=False)).steps[-1]
    room = 2 * 4 * WIDTH * 4
    nbytes = sum(weight.nbytes for weight in lstm(bias=False).parameters()) + room
    assert nbytes not in [each.nbytes for each in step.storages if each.phase == "forward"]
