"""An action that was applied and does nothing stops the run: one way to fail silently, and more, for each kind."""

from functools import partial
from pathlib import Path

import pytest
import torch
from block_models import PLACED, WIDTH, Block, Call, Model, offload, train
from language_model import language_model, tokens
from plans import plan_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memwall.errors import NoEffectError
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.malloc.tensor_heap import heap_library, heap_unavailable_reason
from memwall.session.session import Session

pytestmark = pytest.mark.slow

# -- recompute ---------------------------------------------------------------------------------------------------------


def called_by_its_class(block: nn.Module, x: Tensor) -> Tensor:
    return type(block).forward(block, x)


def under_a_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def under_a_reentrant_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x.requires_grad_(), use_reentrant=True)


def after_replacing_its_forward(block: nn.Module, x: Tensor) -> Tensor:
    """As gradient checkpointing of a loop's own does, set up when the plan is in effect already."""
    block.forward = lambda value: checkpoint(partial(Block.forward, block), value, use_reentrant=False)
    return block(x)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (after_replacing_its_forward, r"something replaced its forward after memwall wrapped Block\.forward"),
        (called_by_its_class, "its forward was not called: the model calls Block.forward or a part of it"),
        (under_a_checkpoint, "another checkpoint calls the block again in backward"),
        (under_a_reentrant_checkpoint, "another checkpoint calls the block again in backward"),
    ],
)
def test_a_recomputed_block_that_is_called_another_way(call: Call, found: str) -> None:
    """GIVEN a model that goes past the wrapper or checkpoints itself WHEN a step ends THEN the action is named."""
    model = Model(call)
    with (
        pytest.raises(NoEffectError, match=found) as caught,
        Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session,
    ):
        train(session, model)
    assert caught.value.action == "recompute of 'blocks.1'"
    assert str(caught.value).startswith(
        "recompute of 'blocks.1' has no effect: expected that its forward runs again in backward in place of keeping "
        "what it saves; found that "
    )
    assert session.measured.num_steps == 1
    assert isinstance(session.failure, NoEffectError)


def test_a_recomputed_block_that_keeps_its_tensors_by_hooks_of_its_own() -> None:
    """GIVEN a block that saves through its own hooks WHEN it is recomputed THEN nothing runs again, and it stops."""

    class Keeping(Block):
        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                return super().forward(x)

    model = Model()
    model.blocks[1] = Keeping()
    with (
        pytest.raises(NoEffectError, match=r"it was called 1 times and its gradients arrived, but nothing ran again"),
        Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session,
    ):
        train(session, model)


# -- offload -----------------------------------------------------------------------------------------------------------


def test_an_offloaded_block_that_is_called_another_way(tmp_path: Path) -> None:
    model = Model(called_by_its_class)
    with (
        pytest.raises(NoEffectError, match=r"offload of 'blocks\.0' has no effect: .* its forward was not called"),
        Session(plan=plan_of(model, offload("blocks.0")), disk=str(tmp_path)) as session,
    ):
        train(session, model)


def test_an_offloaded_block_with_a_checkpoint_inside(tmp_path: Path) -> None:
    """GIVEN a block that checkpoints all it does WHEN its tensors should move THEN none is offered."""

    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return super().forward(x)

    model = Model()
    model.blocks[0] = Checkpointed()
    with (
        pytest.raises(NoEffectError, match="none of the tensors that it saves was offered"),
        Session(plan=plan_of(model, offload("blocks.0")), disk=str(tmp_path)) as session,
    ):
        train(session, model)


def test_an_offloaded_block_whose_tensors_cannot_move(tmp_path: Path) -> None:
    """GIVEN a block that saves sparse tensors, which stay where they are THEN the run says so, not the memory meter."""

    class OnSparse(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x.to_sparse(), self.inner.weight.t())

    model = nn.Sequential(OnSparse(), nn.Linear(2 * WIDTH, WIDTH))
    with (
        pytest.raises(NoEffectError, match="1 saved tensors are of a kind that cannot be moved"),
        Session(plan=plan_of(model, offload("0")), disk=str(tmp_path)) as session,
    ):
        train(session, model)


# -- lower precision ---------------------------------------------------------------------------------------------------


class WithoutAutocast(Model):
    """Switches autocast off, as code does that must compute in full precision."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("model", [WithoutAutocast(), Model().double()], ids=["switched off", "float64"])
def test_autocast_that_changes_no_operation(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    with (
        pytest.raises(NoEffectError, match=r"autocast to bfloat16 has no effect: .* none of the \d+ operations"),
        Session(plan=plan_of(model, Autocast(dtype="bfloat16")), allow=("precision",)) as session,
    ):
        train(session, model, batch=torch.ones(8, WIDTH, dtype=dtype))


# -- fused kernels -----------------------------------------------------------------------------------------------------


def train_language_model(session: Session, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.attach(model, optimizer)
    for _ in range(2):
        model(tokens(rows=2)).backward()
        optimizer.step()


def test_kernels_that_the_model_goes_past() -> None:
    """GIVEN a model that calls its norm by the class WHEN a step ends THEN the kernels are named."""
    model = language_model()
    for layer in model.layers:
        layer.forward = partial(lambda layer, x: x + layer.mlp(type(layer.norm).forward(layer.norm, x)), layer)
    action = FusedKernels(modules=("layers.0.norm", "layers.1.norm"))
    with (
        pytest.raises(NoEffectError, match=r"fused kernels in 2 modules has no effect: .* none of them was called"),
        Session(plan=plan_of(model, action)) as session,
    ):
        train_language_model(session, model)


def test_a_loss_that_asks_for_its_logits() -> None:
    model = language_model(is_weighted=True)
    with (
        pytest.raises(
            NoEffectError, match=r"logits for 256 rows at a time.* the logits were made whole for cross_entropy"
        ),
        Session(plan=plan_of(model, FusedKernels(modules=("norm",), chunk_rows=256))) as session,
    ):
        train_language_model(session, model)


# -- accumulation ------------------------------------------------------------------------------------------------------


def train_in_parts(session: Session, model: nn.Module, *, ignores: bool = False, steps_in_each: bool = False) -> None:
    """A loop that takes micro-batches, and two ways to get it wrong."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.attach(model, optimizer)
    batch = torch.ones(8, WIDTH)
    for _ in range(2):
        for micro in session.step(batch):
            session.backward(model(batch if ignores else micro).square().mean())
            if steps_in_each:
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ({"ignores": True}, r"it was called with the undivided batch, a tensor of shape \(8, 64\)"),
        ({"steps_in_each": True}, "the optimizer stepped after 0 calls, with 3 micro-batches to come"),
    ],
    ids=["uses the whole batch", "steps after each part"],
)
def test_a_loop_that_takes_micro_batches_and_does_not_use_them(mistake: dict[str, bool], found: str) -> None:
    model = Model()
    plan = plan_of(model, Accumulate(micro_batch=2, num_micro_batches=4))
    with (
        pytest.raises(NoEffectError, match=f"micro-batches of 2 has no effect: .*{found}"),
        Session(plan=plan) as session,
    ):
        train_in_parts(session, model, **mistake)


def test_a_framework_that_should_divide_batches_and_does_not() -> None:
    """GIVEN accumulation left to the training loop WHEN it feeds larger batches THEN the first step says so."""
    model = Model()
    plan = plan_of(model, Accumulate(micro_batch=2, num_micro_batches=4))
    with (
        pytest.raises(NoEffectError, match="found that it was called with 8 samples at once"),
        Session(plan=plan, set_by_loop=("accumulate",)) as session,
    ):
        train(session, model)


# -- the allocator -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())
def test_a_heap_whose_hook_something_else_takes_away() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    library = heap_library()
    assert library is not None

    def run() -> None:
        with Session(plan=plan_of(model, AllocatorReuse(policy="tensor-heap"))) as session:
            session.attach(model, optimizer)
            loss = model(torch.ones(8, WIDTH)).sum()
            library.heap_unhook()
            loss.backward()
            optimizer.step()

    with pytest.raises(
        NoEffectError, match=r"allocator policy tensor-heap has no effect: .* a new tensor lies elsewhere"
    ):
        run()


# -- the optimizer's state ---------------------------------------------------------------------------------------------


def test_optimizer_state_that_cannot_move(tmp_path: Path) -> None:
    """GIVEN parameters of a tensor subclass, whose moments are too WHEN they should be on disk THEN the run stops."""

    class Tagged(Tensor):
        pass

    model = Model()
    for block in model.blocks:
        for layer in (block.inner, block.outer):
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
    with (
        pytest.raises(NoEffectError, match=r"optimizer state on the disk has no effect: .* state are in memory"),
        Session(plan=plan_of(model, PLACED), disk=str(tmp_path)) as session,
    ):
        train(session, model)


def test_optimizer_state_of_another_optimizer(tmp_path: Path) -> None:
    """GIVEN a session that was given one optimizer WHEN another one trains the model THEN its second step says so."""
    model = Model()
    given, used = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())

    def run() -> None:
        with Session(plan=plan_of(model, PLACED), disk=str(tmp_path)) as session:
            session.attach(model, given)
            for _ in range(3):
                model(torch.ones(8, WIDTH)).sum().backward()
                used.step()

    with pytest.raises(NoEffectError, match=r"another optimizer .AdamW. trains the model"):
        run()
