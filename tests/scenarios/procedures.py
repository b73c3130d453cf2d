"""Scripts whose steps go another way: several losses, adversaries, meta-learning, threads, exceptions and retries."""

import copy
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.corpus import NUM_CLASSES, WIDTH, Mlp, Net, Script, adamw, batch_of, learning, net, scenario, stepping


@scenario()
def three_losses_in_one_backward() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        out = model(x)
        losses = (F.cross_entropy(out, y), out.square().mean(), out.softmax(1).std())
        torch.autograd.backward(losses, [torch.tensor(1.0), torch.tensor(0.1), torch.tensor(-0.2)])
        return sum(losses, start=torch.zeros(()))

    return stepping(model, gradients)


@scenario()
def losses_weighted_by_learned_uncertainty() -> Script:
    model = net()
    model.register_parameter("log_variances", nn.Parameter(torch.zeros(2)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        losses = torch.stack([F.cross_entropy(out, y), out.square().mean()])
        return (losses * (-model.log_variances).exp() + model.log_variances).sum()

    return learning(model, loss_of)


@scenario()
def gradients_of_two_tasks_projected() -> Script:
    model = net()

    def gradients(optimizer: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        out = model(x)
        parameters = list(model.parameters())
        first = torch.autograd.grad(F.cross_entropy(out, y), parameters, retain_graph=True)
        second = torch.autograd.grad(out.square().mean(), parameters)
        for parameter, one, other in zip(parameters, first, second, strict=True):
            along = (one * other).sum().clamp(max=0) / one.square().sum().clamp(min=1e-12)
            parameter.grad = one + other - along * one
        return out.detach().sum()

    return stepping(model, gradients)


@scenario()
def a_contrastive_loss_of_two_views() -> Script:
    model = net()

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        one, other = (F.normalize(model(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        return F.cross_entropy(one @ other.t() / 0.5, torch.arange(len(x)))

    return learning(model, loss_of)


@scenario()
def a_triplet_loss_of_three_calls() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        outs = [model(batch_of(number + 10 * k)[0]) for k in range(3)]
        loss = F.triplet_margin_loss(*outs)
        loss.backward()
        return loss

    return stepping(model, gradients)


@scenario()
def a_target_network_that_is_copied_now_and_then() -> Script:
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        wanted = 0.9 * target(x).max(1).values + y
        loss = F.smooth_l1_loss(model(x).gather(1, y[:, None])[:, 0], wanted)
        loss.backward()
        return loss

    def copied(number: int) -> None:
        if number % 2:
            target.load_state_dict(model.state_dict())

    return stepping(model, gradients, others=(target,), after_step=copied)


@scenario()
def a_policy_gradient_with_draws() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=model(x))
        action = chosen.sample()
        return -(chosen.log_prob(action) * (action == y).float()).mean() - 0.01 * chosen.entropy().mean()

    return learning(model, loss_of)


@scenario()
def a_variational_bottleneck() -> Script:
    class Bottleneck(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            mean, width = x.chunk(2, 1)
            x = torch.cat([mean + width.exp() * torch.randn_like(width), mean], 1)
            out: Tensor = self.head(self.blocks[1](x))
            return out

    model = Bottleneck(Mlp(), Mlp())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return learning(model, loss_of)


@scenario()
def an_adversarial_example_within_the_step() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.05 * slope.sign()).detach()), y)

    return learning(model, loss_of)


@scenario()
def virtual_adversarial_training() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = model(x).softmax(1)
        move = torch.randn_like(x).requires_grad_()
        distance = F.kl_div(model(x + 0.1 * move).log_softmax(1), wanted, reduction="batchmean")
        (slope,) = torch.autograd.grad(distance, move)
        moved = model(x + 0.1 * F.normalize(slope)).log_softmax(1)
        return F.cross_entropy(model(x), y) + F.kl_div(moved, wanted, reduction="batchmean")

    return learning(model, loss_of)


@scenario()
def mixes_samples() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        share, order = torch.rand(()), torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return learning(model, loss_of)


@scenario()
def a_gradient_that_is_not_finite_is_skipped() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y) * (float("inf") if number == 1 else 1.0)
        loss.backward()
        if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()
        return torch.nan_to_num(loss.detach(), posinf=0.0)

    return Script(model, (optimizer,), step)


@scenario()
def fails_in_backward_and_goes_on() -> Script:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
            ctx.fails = fails
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            if ctx.fails:
                raise ValueError("a bad batch")
            return gradient, None

    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(Refuses.apply(model(x), number == 1), y)
        try:
            loss.backward()
        except ValueError:
            optimizer.zero_grad()
            return loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def fails_inside_a_block_and_goes_on() -> Script:
    class Fails(Mlp):
        num_calls = 0

        def between(self, y: Tensor) -> Tensor:
            if y.shape[0] == 3:
                raise ValueError("a bad batch")
            return y

    model = Net(Mlp(), Fails())
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number, 3 if number == 1 else 8, WIDTH)
        try:
            loss = F.cross_entropy(model(x), y)
        except ValueError:
            return torch.zeros(())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def backward_twice_through_a_retained_graph() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        return loss

    return stepping(model, gradients)


@scenario(refused=dict.fromkeys(("planner's choice at 70 %", "planner's least"), "or in another thread"))
def backward_in_another_thread() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss

    return stepping(model, gradients)


@scenario()
def a_thread_that_reads_weights_meanwhile() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(sum(p.numel() for p in model.parameters())))
        thread.start()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        thread.join()
        return loss + 0 * found[0]

    return stepping(model, gradients)


@scenario()
def evaluates_in_the_middle_of_accumulation() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        total = torch.zeros(())
        for part in range(3):
            x, y = batch_of(10 * number + part)
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += loss.detach()
            with torch.inference_mode():
                model(x)
        return total

    return stepping(model, gradients)


@scenario()
def gradients_clipped_by_value_and_noise_added() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.01 * torch.randn_like(parameter.grad))
        return loss

    return stepping(model, gradients)


@scenario()
def layers_that_are_frozen_and_thawed_in_turn() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index == number % 2)
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return stepping(model, gradients)


@scenario()
def input_gradients_in_a_physics_loss() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = model(x).tanh().sum()
        (slope,) = torch.autograd.grad(out, x)
        return slope.square().mean() + F.cross_entropy(model(x), y)

    return learning(model, loss_of)


@scenario()
def jacobian_vector_products_of_the_head() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        hidden = x
        for block in model.blocks:
            hidden = block(hidden)
        _out, moved = torch.func.jvp(model.head, (hidden.detach(),), (torch.ones_like(hidden),))
        return F.cross_entropy(model.head(hidden), y) + 0.1 * moved.square().mean()

    return learning(model, loss_of)


@scenario()
def an_ensemble_by_vmap_beside_training() -> Script:
    model = net()
    heads = torch.randn(3, NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(2))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        hidden = model.blocks[1](model.blocks[0](x))
        outs = torch.func.vmap(lambda head: hidden @ head.t())(heads)
        return F.cross_entropy(outs.mean(0) + model.head(hidden), y)

    return learning(model, loss_of)
