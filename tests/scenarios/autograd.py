"""Uses of autograd beyond one backward from one loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scenarios.corpus import Mlp, Net, Script, adamw, batch_of, learning, net, scenario, stepping, supervised


@scenario(refused={"parameters-on-disk": "create_graph=True"})
def gradient_penalty() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).sum()

    return learning(model, loss_of)


@scenario()
def two_losses_one_after_the_other() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        out = model(x)
        first, second = F.cross_entropy(out, y), out.pow(2).mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first.detach() + second.detach()

    return Script(model, (optimizer,), step)


@scenario()
def two_forwards_one_backward() -> Script:
    model = net()
    return learning(model, lambda x, y: F.mse_loss(model(x), model(x.flip(0)).detach()) + F.cross_entropy(model(x), y))


@scenario()
def backward_of_two_graphs_in_reverse() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        (a, y), (b, z) = batch_of(number), batch_of(50 + number)
        first, second = F.cross_entropy(model(a), y), F.cross_entropy(model(b), z)
        first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first.detach() + second.detach()

    return Script(model, (optimizer,), step)


@scenario()
def gradients_by_autograd_grad() -> Script:
    model = net()
    optimizer = adamw(model)
    parameters = list(model.parameters())

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def gradients_by_torch_func() -> Script:
    model = net()
    optimizer = adamw(model)

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        parameters = dict(model.named_parameters())
        gradients, loss = torch.func.grad_and_value(loss_of)(parameters, x, y)
        for name, p in parameters.items():
            p.grad = gradients[name].detach()
        optimizer.step()
        optimizer.zero_grad()
        return torch.as_tensor(loss).detach()

    return Script(model, (optimizer,), step)


@scenario()
def checkpoint_of_its_own() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    return supervised(Net(Block(), Block()))


@scenario(refused=dict.fromkeys(("recompute", "offload-inputs"), "another checkpoint calls the block again"))
def checkpoint_around_the_model() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    return learning(model, loss_of)


@scenario()
def saved_on_the_cpu_around_the_model() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out = model(x)
        return F.cross_entropy(out, y) + out.exp().mean()

    return learning(model, loss_of)


@scenario()
def hooks_of_its_own_around_the_step() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved + 0, lambda saved: saved):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario(refused=dict.fromkeys(("recompute", "offload-inputs"), "another checkpoint calls the block again"))
def reentrant_checkpoint_around_blocks() -> Script:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            out: Tensor = self.head(x)
            return out

    return supervised(Checkpointed(Mlp(), Mlp()))


@scenario()
def a_block_that_runs_a_backward_of_its_own() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            (0.1 * y.mean()).backward(retain_graph=True)
            return y

    return supervised(Net(Block(), Block()))


@scenario()
def a_function_of_ones_own() -> Script:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.scale = 2.0
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return ctx.scale * x * gradient

    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            out: Tensor = Square.apply(y)
            return out

    return supervised(Net(Block(), Block()))


@scenario()
def in_place_operations() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            y.mul_(2).add_(1).relu_()
            return x + self.down(y)

    return supervised(Net(Block(), Block()))


@scenario()
def writes_into_its_input() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    class Fresh(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    return supervised(Fresh(Block(), Block()))


@scenario()
def detaches_a_part() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            left, right = y.chunk(2, dim=1)
            return torch.cat([left.detach() * right, right], dim=1)

    return supervised(Net(Block(), Block()))


@scenario()
def a_part_without_gradients() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            with torch.no_grad():
                scale = y.abs().amax()
            return y / scale

    return supervised(Net(Block(), Block()))


@scenario()
def autocast_inside_a_block() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    return supervised(Net(Block(), Block()))


@scenario()
def autocast_around_the_model() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    return learning(model, loss_of)


@scenario()
def complex_numbers() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            return torch.fft.ifft(torch.fft.fft(y) * 0.5).real

    return supervised(Net(Block(), Block()))


@scenario()
def double_precision() -> Script:
    model = net().double()
    return learning(model, lambda x, y: F.cross_entropy(model(x.double()), y))


@scenario()
def per_sample_gradients_of_the_head() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        for block in model.blocks:
            x = block(x)
        features = x.detach()
        weights = {name: p.detach() for name, p in model.head.named_parameters()}

        def one(given: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model.head, given, (feature,)), label)

        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, features, y)
        loss = F.cross_entropy(model.head(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() + each["bias"].norm(dim=1).sum()

    return Script(model, (optimizer,), step)


@scenario()
def gradients_once_more_after_a_backward() -> Script:
    model = net()
    parameters = list(model.parameters())

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        again = torch.autograd.grad(loss, parameters)
        return loss + sum(gradient.square().sum() for gradient in again)

    return stepping(model, gradients)


@scenario()
def a_second_backward_that_torch_refuses() -> Script:
    model = net()

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return loss

    return stepping(model, gradients)


@scenario(refused={"parameters-on-disk": "create_graph=True"})
def a_product_with_the_hessian() -> Script:
    model = net()
    parameters = list(model.parameters())

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        product = torch.autograd.grad(first, parameters, [torch.ones_like(p) for p in parameters], retain_graph=True)
        loss.backward()
        return loss + sum(each.square().sum() for each in product)

    return stepping(model, gradients)


@scenario()
def a_row_of_the_jacobian_at_a_time() -> Script:
    model = net()
    parameters = list(model.parameters())

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch_of(number)
        out = model(x)
        found = torch.zeros(())
        for row in range(out.shape[1]):
            each = torch.autograd.grad(out[:, row].sum(), parameters, retain_graph=True)
            found += sum(gradient.square().sum() for gradient in each)
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss + found

    return stepping(model, gradients)


@scenario(refused={"parameters-on-disk": "create_graph=True"})
def forces_within_a_block() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(torch.tanh(self.up(x)).sum(), x, create_graph=True)
            return super().forward(x) + force

    class Positions(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.requires_grad_())

    return supervised(Positions(Block(), Block()))


@scenario()
def an_optimum_is_sought_within_a_block() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            moved = torch.zeros_like(x, requires_grad=True)
            for _ in range(2):
                energy = super().forward(x.detach() + moved).square().mean()
                (gradient,) = torch.autograd.grad(energy, moved)
                moved = (moved - 0.1 * gradient).detach().requires_grad_()
            return super().forward(x + moved.detach())

    return supervised(Net(Block(), Block()))
