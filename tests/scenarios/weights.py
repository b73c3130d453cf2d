"""What scripts do with weights and optimizers beside stepping them."""

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.corpus import Script, adamw, batch_of, net, scenario, supervised


@scenario()
def freezes_a_block_after_two_steps() -> Script:
    model = net()

    def freeze(number: int) -> None:
        if number == 1:
            model.blocks[0].requires_grad_(False)

    return supervised(model, after_step=freeze)


@scenario()
def trains_the_head_alone() -> Script:
    model = net()
    model.blocks.requires_grad_(False)
    return supervised(model, adamw(model.head))


@scenario()
def adds_a_parameter_group() -> Script:
    model = net()
    optimizer = adamw(model.head)

    def grow(number: int) -> None:
        if number == 1:
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-4})

    return supervised(model, optimizer, after_step=grow)


@scenario()
def saves_and_loads_in_mid_run() -> Script:
    model = net()
    optimizer = adamw(model)
    file = io.BytesIO()

    def save_or_load(number: int) -> None:
        if number == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if number == 2:
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

    return supervised(model, optimizer, after_step=save_or_load)


@scenario()
def copies_the_model_in_mid_run() -> Script:
    model, kept = net(), nn.ModuleList()

    def keep(number: int) -> None:
        kept.append(copy.deepcopy(model))

    return supervised(model, after_step=keep, others=(kept,))


@scenario()
def writes_weights_by_hand() -> Script:
    model = net()

    def shrink(_: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    return supervised(model, after_step=shrink)


@scenario()
def reads_weights_as_numpy() -> Script:
    model = net()
    seen: list[float] = []

    def read(_: int) -> None:
        seen.append(float(model.head.weight.detach().numpy().sum()))

    return supervised(model, after_step=read)


@scenario()
def logs_gradient_norms() -> Script:
    model, norms = net(), []

    def log() -> None:
        norms.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])

    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        log()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() + sum(norms[-1])

    return Script(model, (optimizer,), step)


def _stepped_by(kind: type[torch.optim.Optimizer], **options: Any) -> Script:
    model = net()
    return supervised(model, kind(model.parameters(), **options))


@scenario()
def fused_adam() -> Script:
    return _stepped_by(torch.optim.Adam, lr=1e-3, fused=True)


@scenario()
def foreach_amsgrad() -> Script:
    return _stepped_by(torch.optim.AdamW, lr=1e-3, foreach=True, amsgrad=True)


@scenario()
def adafactor() -> Script:
    return _stepped_by(torch.optim.Adafactor, lr=1e-2)


@scenario()
def rmsprop_centered() -> Script:
    return _stepped_by(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5)


@scenario()
def adagrad() -> Script:
    return _stepped_by(torch.optim.Adagrad, lr=1e-2)


@scenario(refused=dict.fromkeys(("state-on-disk", "parameters-on-disk"), "Signs cannot be kept on disk"))
def an_optimizer_of_ones_own() -> Script:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                        mean.mul_(0.9).add_(p.grad, alpha=0.1)
                        p.sub_(mean.sign(), alpha=group["lr"])

    model = net()
    return supervised(model, Signs(model.parameters()))
