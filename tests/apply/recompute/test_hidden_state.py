"""Recomputed blocks whose forward reads and changes more than tensors: the bits of a plain run."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hidden_state import (
    Alternating,
    Block,
    BufferInPlace,
    Calls,
    Counting,
    EnclosedGenerator,
    GlobalGenerators,
    HelperDraws,
    LayerDrop,
    LossesAppended,
    MeanInADict,
    MeanInPlace,
    NumpyNormal,
    NumpyRandom,
    OwnGenerator,
    OwnNumpyGenerator,
    OwnPythonGenerator,
    PythonRandom,
    ReadsAGlobal,
    ReboundMean,
    assert_same,
    seed_outside,
    trained,
    under,
)
from torch import Tensor, nn

from memwall.planning.techniques.recompute import Recompute

pytestmark = pytest.mark.usefixtures("one_thread")

Recomputed = Callable[..., AbstractContextManager[None]]

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


def state_of(block: nn.Module) -> dict[str, Any]:
    """Attributes of the block's own, comparable."""
    kept = {name: value for name, value in vars(block).items() if name in ("num_calls", "mean", "is_odd", "means")}
    kept |= {name: len(value) for name, value in vars(block).items() if name in ("losses", "seen")}
    return {name: str(value) for name, value in kept.items()}


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


@pytest.mark.parametrize("kind", [GlobalGenerators, HelperDraws, EnclosedGenerator])
def test_state_outside_of_a_block_that_its_code_names_is_what_it_was_in_forward(kind: type[Block]) -> None:
    """GIVEN generators and counts that are globals, a helper's, or of the function that defines the class THEN the bits
    of a plain run come of it, and each is drawn from once.
    """
    torch.manual_seed(1)
    plain = nn.Sequential(kind(), kind())
    treated = copy.deepcopy(plain)
    seed_outside()
    expected = trained(plain)
    seed_outside()
    with under(treated, Recompute(block="0"), Recompute(block="1")) as executor:
        assert_same(trained(treated), expected)
        assert [executor.wrapped(path)[1].dropped for path in "01"] == ["", ""]


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


# -- how often, and what of ------------------------------------------------------------------------------------------


def test_a_block_is_proven_once_a_plan() -> None:
    runs = Calls()

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
