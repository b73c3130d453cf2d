"""Hooks that scripts put on modules, tensors and parameters."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.corpus import Mlp, Net, Script, adamw, batch_of, learning, net, scenario, supervised


@scenario()
def records_activations() -> Script:
    model, seen = net(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: seen.append(float(out.detach().norm())))
    return supervised(model)


@scenario()
def changes_an_input_by_a_hook() -> Script:
    model = net()
    model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 0.9,))
    return supervised(model)


@scenario()
def changes_an_output_by_a_hook() -> Script:
    model = net()
    model.blocks[0].register_forward_hook(lambda _, __, out: out.clamp(-2, 2))
    return supervised(model)


@scenario()
def hooks_of_layers_inside_a_block() -> Script:
    model, seen = net(), []
    for block in model.blocks:
        block.up.register_forward_hook(lambda _, __, out: seen.append(float(out.detach().mean())))
        block.down.register_forward_hook(lambda _, __, out: out * 1.01)
    return supervised(model)


@scenario()
def auxiliary_loss_collected_by_a_hook() -> Script:
    model = net()
    collected: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: collected.append(out.pow(2).mean()))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + 0.1 * sum(collected, torch.zeros(()))
        collected.clear()
        return loss

    return learning(model, loss_of)


@scenario()
def auxiliary_loss_collected_inside_a_block() -> Script:
    model = net()
    optimizer = adamw(model)
    collected: list[Tensor] = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda _, __, out: collected.append(out.pow(2).mean()))

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y) + 0.1 * sum(collected, torch.zeros(()))
        collected.clear()
        loss.backward()
        collected.clear()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def scales_gradients_in_backward() -> Script:
    model = net()
    model.blocks[0].register_full_backward_hook(
        lambda _, given, __: tuple(None if g is None else g * 0.5 for g in given)
    )
    return supervised(model)


@scenario()
def changes_the_gradient_of_an_activation() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return y

    return supervised(Net(Block(), Block()))


@scenario()
def changes_the_gradient_of_a_parameter() -> Script:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.7)
    return supervised(model)


@scenario(
    refused={"state-on-disk": "another optimizer", "parameters-on-disk": "has a hook that runs when its gradient"}
)
def steps_each_parameter_as_its_gradient_arrives() -> Script:
    """The optimizer steps in backward, as in PyTorch's tutorial; the one of the loop has nothing left to do."""
    model = net()
    own = {p: torch.optim.SGD([p], lr=0.05) for p in model.blocks.parameters()}

    def stepped(parameter: nn.Parameter) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.blocks.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    return supervised(model, torch.optim.SGD(model.head.parameters(), lr=0.05))


@scenario()
def counts_calls_of_all_modules() -> Script:
    model, names = net(), []

    def step_of(script: Script) -> Any:
        def step(number: int) -> Tensor | float:
            hook = nn.modules.module.register_module_forward_hook(lambda module, _, __: names.append(type(module)))
            try:
                return script.step(number)
            finally:
                hook.remove()

        return step

    script = supervised(model)
    return Script(model, script.optimizers, step_of(script))


@scenario(refused=dict.fromkeys(("recompute", "offload", "offload-inputs"), "hooks of its own"))
def saves_tensors_through_hooks_of_its_own() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                return super().forward(x)

    return supervised(Net(Block(), Block()))


@scenario()
def optimizer_hooks() -> Script:
    model = net()
    optimizer = adamw(model)
    counted = [0]

    def halve(*_: Any) -> None:
        counted[0] += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / counted[0]

    optimizer.register_step_pre_hook(halve)
    return supervised(model, optimizer)
