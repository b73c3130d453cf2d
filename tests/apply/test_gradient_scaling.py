"""Under float16 gradients neither vanish nor stay scaled, whatever the loop does; what cannot be right raises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.apply.precision import GROWTH_STEPS, INITIAL_SCALE, LowerPrecision
from memwall.errors import ApplyError

TINY = 1e-7  # a loss this small has gradients below float16's smallest number


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


Loss = Callable[[Net, Tensor], Tensor]


@pytest.fixture
def lower() -> Iterator[Callable[[Net], LowerPrecision]]:
    """Puts a model under float16, until the test ends."""
    begun = []

    def begin(model: Net) -> LowerPrecision:
        begun.append(LowerPrecision(model, "float16"))
        return begun[-1]

    yield begin
    for each in reversed(begun):
        each.undo()


Lower = Callable[[Net], LowerPrecision]


def gradients(model: Net, loss_of: Loss) -> list[Tensor]:
    loss_of(model, torch.linspace(-1, 1, 16).reshape(2, 8)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean_square(m: Net, x: Tensor) -> Tensor:
    return m(x).square().mean()


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """To float16's precision: 11 bits of significand, over a handful of operations."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8 * 2**-11, atol=float(theirs.abs().max()) * 8 * 2**-11)


def test_gradients_that_would_vanish_arrive_unscaled(lower: Lower):
    def tiny(m: Net, x: Tensor) -> Tensor:
        return mean_square(m, x) * TINY

    def without_scaling(m: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out = m(x)
        return out.float().square().mean() * TINY

    assert not any(g.any() for g in gradients(Net(), without_scaling))
    expected = gradients(Net(), tiny)
    model = Net()
    lower(model)
    assert_close(gradients(model, tiny), expected)


def two_backwards(m: nn.Module, x: Tensor) -> Tensor:
    m(x[:1]).square().mean().backward()
    return m(x[1:]).square().mean()


def penalty_on_the_weights(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().mean() + sum(p.square().sum() for p in m.parameters())


def from_an_edge(m: nn.Module, x: Tensor) -> Tensor:
    loss = m(x).square().mean()
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.tensor(1.0), retain_graph=True)
    return loss


def without_the_root(m: nn.Module, x: Tensor) -> Tensor:
    return m.first(x).square().mean()


@pytest.mark.parametrize("loss_of", [two_backwards, penalty_on_the_weights, from_an_edge, without_the_root])
def test_gradients_are_the_true_ones_in_loops_of_every_kind(lower: Lower, loss_of: Loss):
    expected = gradients(Net(), loss_of)
    model = Net()
    lower(model)
    assert_close(gradients(model, loss_of), expected)


def test_reentrant_checkpointing_inside_the_model_is_scaled_once(lower: Lower):
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(lambda y: torch.relu(self.first(y)), self.first(x), use_reentrant=True))

    expected = gradients(Checkpointed(), mean_square)
    model = Checkpointed()
    lower(model)
    assert_close(gradients(model, mean_square), expected)


def test_a_layer_that_is_unfrozen_later_is_unscaled_too(lower: Lower):
    expected = gradients(Net(), mean_square)
    model = Net()
    model.first.requires_grad_(False)
    lower(model)
    model.first.requires_grad_(True)
    assert_close(gradients(model, mean_square), expected)


def test_autograd_grad_is_left_alone(lower: Lower):
    def of_the_last_bias(model: Net) -> list[Tensor]:
        return list(torch.autograd.grad(mean_square(model, torch.ones(1, 8)), model.last.bias))

    expected = of_the_last_bias(Net())
    model = Net()
    lower(model)
    assert_close(of_the_last_bias(model), expected)


def test_a_step_whose_gradients_overflow_changes_nothing_and_halves_the_scale(lower: Lower):
    model = Net()
    scaling = lower(model).scaling
    assert scaling is not None
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    for factor in (1.0, 1e38):
        before = [p.detach().clone() for p in model.parameters()]
        (model(torch.ones(1, 8)).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}
    assert scaling.num_skipped_steps == 1
    assert scaling.scale == INITIAL_SCALE / 2


def test_an_overflow_in_the_gradients_of_one_of_several_optimizers_leaves_the_step_out_for_all(lower: Lower):
    model = Net()
    model.last.weight.register_hook(lambda gradient: gradient * torch.inf)
    scaling = lower(model).scaling
    assert scaling is not None
    optimizers = [torch.optim.AdamW(part.parameters(), weight_decay=0.5) for part in (model.first, model.last)]
    before = [p.detach().clone() for p in model.parameters()]
    mean_square(model, torch.ones(1, 8)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert (scaling.num_skipped_steps, scaling.scale) == (1, INITIAL_SCALE / 2)


def test_the_scale_grows_again_after_many_good_steps(lower: Lower):
    model = Net()
    scaling = lower(model).scaling
    assert scaling is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaling._steps_at_scale = GROWTH_STEPS - 2
    mean_square(model, torch.ones(1, 8)).backward()
    optimizer.step()
    assert scaling.scale == INITIAL_SCALE
    mean_square(model, torch.ones(1, 8)).backward()
    optimizer.step()
    assert scaling.scale == 2 * INITIAL_SCALE


def test_what_would_keep_a_scaled_gradient_is_refused(lower: Lower):
    model = Net()
    lower(model)
    x = torch.ones(1, 8, requires_grad=True)
    with pytest.raises(ApplyError, match=r"tensor of shape \(1, 8\) that is no parameter of Net"):
        model(x).sum().backward()
    with pytest.raises(ApplyError, match="create_graph"):
        model(x.detach()).sum().backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_in_float16_already_are_refused_and_nothing_has_changed():
    model, backward = Net().half(), torch.autograd.backward
    with pytest.raises(ApplyError, match=r"'first\.weight' is in float16"):
        LowerPrecision(model, "float16")
    assert torch.autograd.backward is backward
    assert "forward" not in model.__dict__


def test_undo_gives_autograd_and_the_parameters_back():
    model, backward = Net(), torch.autograd.backward
    under = LowerPrecision(model, "float16")
    assert torch.autograd.backward is not backward
    under.undo()
    assert torch.autograd.backward is backward
    assert not any(p._backward_hooks for p in model.parameters())
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()


def test_autograds_own_error_stands_for_a_loss_of_many_numbers(lower: Lower):
    model = Net()
    lower(model)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        model(torch.ones(2, 8)).backward()


def test_clipping_by_value_does_not_hide_an_overflow(lower: Lower):
    model = Net()
    scaling = lower(model).scaling
    assert scaling is not None
    (mean_square(model, torch.ones(1, 8)) * 1e38).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert scaling.num_skipped_steps == 1
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_step_with_a_closure_is_refused(lower: Lower):
    model = Net()
    lower(model)
    with pytest.raises(ApplyError, match="closure"):
        torch.optim.SGD(model.parameters(), lr=1.0).step(lambda: 0.0)


def test_gradients_that_a_node_of_the_backward_pass_computes_are_unscaled_once(lower: Lower):
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer, *parameters):
            ctx.layer, ctx.x, ctx.parameters = layer, x.detach(), parameters
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad(), torch.autocast("cpu", dtype=torch.float16):
                x = ctx.x.requires_grad_()
                out = ctx.layer(x)
            found = torch.autograd.grad(out, (x, *ctx.parameters), gradient.to(out.dtype))
            return found[0], None, *found[1:]

    class WithNode(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(Recomputed.apply(self.first(x).relu(), self.middle, *self.middle.parameters()))

    def make() -> WithNode:
        model = WithNode()
        model.middle = nn.Linear(8, 8)
        return model

    expected = gradients(make(), mean_square)
    model = make()
    lower(model)
    assert_close(gradients(model, mean_square), expected)


def test_nan_for_many_steps_leaves_a_scale_that_works(lower: Lower):
    model = Net()
    scaling = lower(model).scaling
    assert scaling is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(40):
        (mean_square(model, torch.ones(1, 8)) * float("nan")).backward()
        optimizer.step()
    assert scaling.scale == 1.0


def test_a_model_under_float16_can_be_saved_whole(lower: Lower, tmp_path: Path):
    model = Net()
    lower(model)
    torch.save(model, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
