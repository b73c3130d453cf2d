"""A parameter on disk is the same object as before: who uses it gets its numbers, and who changes it changes them."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from streamed_models import GPT, KIB, everything, loss_of, streamed
from torch import Tensor, nn

from memwall.apply.streaming import guard
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.errors import ApplyError
from memwall.store.transfer import TransferPool

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


@pytest.fixture
def streaming(model: nn.Module, state_pool: TransferPool) -> Iterator[ParameterStreaming]:
    """Two matrices may be used outside their blocks at a time."""
    with streamed(model, state_pool, window_bytes=32 * KIB) as made:
        yield made


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


# Parameters.


def test_what_needs_no_numbers_reads_none(
    model: nn.Module, streaming: ParameterStreaming, state_pool: TransferPool
) -> None:
    for parameter in weights(model):
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.shape, parameter.dtype, parameter.numel()) == ((64, 64), torch.float32, 64 * 64)
        assert parameter.requires_grad
        assert parameter.grad is None
        assert torch.zeros_like(parameter).sum() == 0
    assert (
        len(
            {
                id(parameter)
                for group in torch.optim.SGD(model.parameters()).param_groups
                for parameter in group["params"]
            }
        )
        == 12
    )
    assert state_pool.bytes_read == 0
    assert streaming.resident_bytes == 0


def test_numbers_are_read_when_they_are_used_and_only_a_window_stays(
    model: nn.Module, state_pool: TransferPool
) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with streamed(model, state_pool, window_bytes=32 * KIB) as streaming:
        for _ in range(2):
            assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
            assert streaming.resident_bytes <= 2 * 32 * KIB  # what was used last, and what is being written


def test_changes_are_kept_whichever_way_they_are_made(model: nn.Module, streaming: ParameterStreaming) -> None:
    one, other, third = weights(model)[:3]
    with torch.no_grad():
        one.fill_(1.0)
    other.data.fill_(2.0)
    nn.init.constant_(third, 3.0)
    for parameter in weights(model)[3:]:
        parameter.sum().item()  # fills the window, so that the first three must leave
    assert streaming.resident_bytes <= 3 * 16 * KIB
    assert [float(p.detach().mean()) for p in (one, other, third)] == [1.0, 2.0, 3.0]


def test_memory_that_somebody_refers_to_stays(model: nn.Module, streaming: ParameterStreaming) -> None:
    first = weights(model)[0]
    alias, copied = first.data, first.detach().clone()
    for parameter in weights(model)[1:]:
        parameter.detach().sum()
    model(torch.ones(1, 64)).sum().backward()
    assert torch.equal(alias, copied)
    alias.mul_(2)
    assert torch.equal(first.detach(), copied * 2)


def test_use_in_a_graph_outside_the_block_keeps_the_parameter_in_memory(
    state_pool: TransferPool, caplog: pytest.LogCaptureFixture
) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x).mean()
            return out + self.layers[1].weight.square().sum()

    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = Penalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(3):
                for _ in range(2):
                    model(torch.ones(2, 64)).backward()
                optimizer.step()
                optimizer.zero_grad()

        if is_streamed:
            with streamed(model, state_pool, optimizer, min_bytes=KIB) as streaming:
                run()
                assert streaming.away_bytes == 2 * 16 * KIB
                assert type(model.layers[1].weight) is nn.Parameter
                assert type(model.layers[0].weight) is not nn.Parameter
        else:
            run()
        found.append(everything(model, optimizer))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert "layers.1.weight is used outside the block that it belongs to; its 16.0 KiB stay in memory" in caplog.text


def test_copies_pickles_and_state_dicts_are_plain_and_whole(model: nn.Module, state_pool: TransferPool) -> None:
    before = copy.deepcopy(model.state_dict())
    with streamed(model, state_pool, window_bytes=32 * KIB):
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        x = torch.ones(1, 64)
        expected = model(x)
        with torch.no_grad():
            weights(model)[0].mul_(2)  # the copies are their own
        assert not torch.equal(model(x), expected)
        assert torch.equal(copied(x), expected)
        assert torch.equal(pickled(x), expected)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    for other in (copied, pickled):
        assert {type(parameter) for parameter in other.parameters()} == {nn.Parameter}
    for found in (copied.state_dict(), pickled.state_dict(), loaded):
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], value) for name, value in before.items())


def test_a_state_dict_may_be_loaded(model: nn.Module, streaming: ParameterStreaming) -> None:
    other = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model.load_state_dict(other.state_dict())
    assert streaming.resident_bytes <= 2 * 32 * KIB  # what was used last, and what is being written
    x = torch.randn(3, 64)
    assert torch.equal(model(x), other(x))


def test_other_memory_is_refused(model: nn.Module, streaming: ParameterStreaming) -> None:
    with pytest.raises(ApplyError, match=r"0\.weight was given other memory .* change the model before its first step"):
        model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.float32


def test_an_average_that_is_assigned_goes_to_disk(model: nn.Module, streaming: ParameterStreaming) -> None:
    """A teacher's weights are new tensors in each step, which nobody else holds."""
    expected = [0.9 * weight.detach().clone() + 0.1 for weight in weights(model)]
    for weight in weights(model):
        weight.data = weight.data * 0.9 + 0.1
    assert streaming.away_bytes == 6 * 16 * KIB
    assert streaming.resident_bytes <= 2 * 32 * KIB
    assert all(torch.equal(weight, value) for weight, value in zip(weights(model), expected, strict=True))


def test_memory_that_the_script_holds_as_well_is_the_parameters(
    model: nn.Module, streaming: ParameterStreaming, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that are exchanged for averages and back: what is written to either is seen in both."""
    new = [torch.ones(64, 64) for _ in range(6)]
    for weight, value in zip(weights(model), new, strict=True):
        weight.data = value
    new[0].add_(1)
    assert torch.equal(model[0].weight, torch.full((64, 64), 2.0))
    assert streaming.away_bytes == 0
    assert "0.weight is given memory that the script holds as well; its 16.0 KiB stay in memory" in caplog.text
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


_OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "its data": lambda held: held[1].data,
    "a part of a buffer": lambda held: held[1],
    "an array's memory": lambda held: torch.from_numpy(held[1].numpy()),
}


@pytest.mark.parametrize("kind", _OVER)
def test_a_new_tensor_over_memory_that_the_script_holds_is_the_parameter(
    model: nn.Module, streaming: ParameterStreaming, kind: str
) -> None:
    """Weights that averages take the place of, or that lie in one buffer: what is written there is seen in both."""
    held = torch.ones(2, 64, 64)
    model[0].weight.data = _OVER[kind](held)
    held.add_(1)
    assert torch.equal(model[0].weight, torch.full((64, 64), 2.0))


def test_moving_to_where_it_is_changes_nothing(model: nn.Module, state_pool: TransferPool) -> None:
    before = everything(model)
    with streamed(model, state_pool, window_bytes=32 * KIB) as streaming:
        assert model.to("cpu").float() is model
        assert streaming.resident_bytes <= 2 * 32 * KIB
        after = everything(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


# Gradients.


@pytest.mark.slow
def test_a_gradient_reads_as_it_is_and_may_be_changed(state_pool: TransferPool) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters())

        def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> dict[str, Tensor]:
            seen = {}
            for step in range(3):
                loss_of(model, step).backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    seen[f"{name}.norm {step}"] = parameter.grad.norm()
                    if step == 0:
                        parameter.grad.mul_(0.5).clamp_(-0.1, 0.1)
                    elif step == 1:
                        parameter.grad += 0.01 * torch.ones_like(parameter.grad)
                    else:
                        parameter.grad = parameter.grad * 2
                    seen[f"{name}.sum {step}"] = parameter.grad.abs().sum()
                loss_of(model, step + 10).backward()
                optimizer.step()
                optimizer.zero_grad()
            return seen

        if is_streamed:
            with streamed(model, state_pool, optimizer):
                seen = run()
        else:
            seen = run()
        found.append(everything(model, optimizer) | seen)
    assert [name for name, value in found[0].items() if not torch.equal(found[1][name], value)] == []


def test_gradients_are_dropped_without_being_read(model: nn.Module, state_pool: TransferPool) -> None:
    with streamed(model, state_pool):
        model(torch.ones(2, 64)).sum().backward()
        before = state_pool.bytes_read
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert state_pool.bytes_read == before


def test_a_gradient_that_was_dropped_raises(model: nn.Module, streaming: ParameterStreaming) -> None:
    model(torch.ones(2, 64)).sum().backward()
    gradient = weights(model)[0].grad
    assert gradient is not None
    kept = gradient.clone()
    model.zero_grad()
    with pytest.raises(ApplyError, match=r"the gradient of 0\.weight was kept by the loop beyond the moment"):
        gradient.sum()
    assert kept.shape == (64, 64)
    del streaming


def test_norms_asked_for_before_are_computed_when_gradients_appear(
    model: nn.Module, streaming: ParameterStreaming, state_pool: TransferPool
) -> None:
    read = []
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        before = state_pool.bytes_read
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        read.append(state_pool.bytes_read - before)
        assert torch.equal(
            norm, nn.utils.get_total_norm([p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
        model.zero_grad()
    assert read[0] >= 4 * 16 * KIB
    assert read[1] == 0
    del streaming


def test_what_refers_to_a_passing_tensor_is_asked_within_a_transform_too() -> None:
    """GIVEN a script of torch.func alone THEN memwall is imported within its first gradient, which forbids `.data`.

    Tensors are wrapped there: none may be found to pass.
    """
    found: list[int] = []

    def loss_of(given: Tensor) -> Tensor:
        found.append(guard._references_of_passing())
        return given.sum()

    torch.func.grad(loss_of)(torch.ones(1))
    assert found[0] in (0, guard._REFERENCES_OF_PASSING)
