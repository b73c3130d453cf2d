"""Training loops of other shapes than forward, backward, step."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.corpus import WIDTH, Mlp, Net, Script, adamw, batch_of, learning, net, scenario, supervised


def _net(*, dropout: float = 0.0) -> Net:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            return F.dropout(y, dropout, self.training) if dropout else y

    return Net(Block(), Block())


@scenario()
def dropout() -> Script:
    return supervised(_net(dropout=0.3))


@scenario()
def clips_gradients() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def accumulates_by_hand() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        total = torch.zeros(())
        for part in range(3):
            x, y = batch_of(10 * number + part)
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Script(model, (optimizer,), step)


@scenario()
def zeroes_gradients_in_place() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def follows_a_schedule() -> Script:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    return supervised(model, optimizer, after_step=lambda _: schedule.step())


@scenario()
def evaluates_between_steps() -> Script:
    model = _net(dropout=0.2)

    def evaluate(number: int) -> None:
        model.eval()
        with torch.no_grad():
            model(batch_of(100 + number)[0])
        model.train()

    return supervised(model, after_step=evaluate)


@scenario()
def evaluates_between_forward_and_backward() -> Script:
    model = _net(dropout=0.2)

    def evaluate(number: int) -> None:
        model.eval()
        with torch.no_grad():
            model(batch_of(100 + number)[0])
        model.train()

    return supervised(model, after_forward=evaluate)


@scenario()
def goes_to_eval_before_backward() -> Script:
    model = _net(dropout=0.2)
    return supervised(model, after_forward=lambda _: model.eval(), after_step=lambda _: model.train())


@scenario()
def generates_without_gradients_inside_the_step() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            sampled = model(x).argmax(1)
        return F.cross_entropy(model(x), torch.where(sampled == y, y, sampled.clone()))

    return learning(model, loss_of)


@scenario()
def keeps_a_moving_average() -> Script:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return supervised(model, after_step=lambda _: average.update_parameters(model), others=(average,))


@scenario()
def learns_from_a_teacher() -> Script:
    model = net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, _ = batch_of(number)
        with torch.no_grad():
            target = teacher(x).softmax(1)
        loss = F.kl_div(model(x).log_softmax(1), target, reduction="batchmean") + model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        return loss.detach()

    return Script(model, (optimizer,), step, (teacher,))


@scenario(refused=dict.fromkeys(("state-on-disk", "parameters-on-disk"), "is stepped by several"))
def two_optimizers_for_two_parts() -> Script:
    model = net()
    head = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    body = adamw(model.blocks)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Script(model, (body, head), step)


@scenario(refused=dict.fromkeys(("state-on-disk", "parameters-on-disk"), "is stepped by several"))
def generator_and_critic_in_turn() -> Script:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Mlp(), Mlp()])
            self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

        def forward(self, x: Tensor, *, is_judged: bool = True) -> Tensor:
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.critic(x) if is_judged else x
            return out

    model = Both()
    maker, judge = adamw(model.blocks), adamw(model.critic)

    def step(number: int) -> Tensor:
        x, _ = batch_of(number)
        fake = model(x, is_judged=False).detach()
        bad = F.softplus(model.critic(fake)).mean() + F.softplus(-model.critic(x)).mean()
        bad.backward()
        judge.step()
        judge.zero_grad()
        good = F.softplus(-model(x)).mean()
        good.backward()
        maker.step()
        maker.zero_grad()
        judge.zero_grad()
        return good.detach() + bad.detach()

    return Script(model, (maker, judge), step)


@scenario()
def closure_of_adamw() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)

        def closure() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        return torch.tensor(optimizer.step(closure))

    return Script(model, (optimizer,), step)


@scenario(refused=dict.fromkeys(("state-on-disk", "parameters-on-disk"), "LBFGS cannot be kept on disk"))
def closure_of_lbfgs() -> Script:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(number: int) -> Tensor:
        x, y = batch_of(0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return torch.as_tensor(optimizer.step(closure)).detach()

    return Script(model, (optimizer,), step)


@scenario()
def sharpness_aware_steps() -> Script:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def gradients(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def step(number: int) -> Tensor:
        gradients(number)
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = gradients(number)
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(model, (optimizer,), step)


@scenario()
def skips_a_step() -> Script:
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def fails_in_forward_and_goes_on() -> Script:
    class Block(Mlp):
        fails = False

        def between(self, y: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("a bad sample")
            return y

    model = Net(Block(), Block())
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        x, y = batch_of(number)
        block: Any = model.blocks[1]
        block.fails = number == 2
        try:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        except ValueError:
            block.fails = False
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x / 2), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Script(model, (optimizer,), step)


@scenario()
def forward_whose_backward_never_comes() -> Script:
    model = net()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        model(x).sum()  # thrown away, with its graph
        return F.cross_entropy(model(x), y)

    return learning(model, loss_of)


@scenario()
def batches_of_many_lengths() -> Script:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        return batch_of(number, 2 + 5 * number, WIDTH)

    return supervised(net(), batch=batch)


@scenario()
def calls_forward_directly() -> Script:
    class Direct(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block.forward(x)
            out: Tensor = self.head(x)
            return out

    return supervised(Direct(Mlp(), Mlp()))


@scenario()
def detects_anomalies() -> Script:
    script = supervised(net())

    def step(number: int) -> Tensor | float:
        with torch.autograd.detect_anomaly(check_nan=True):
            return script.step(number)

    return Script(script.model, script.optimizers, step)


@scenario()
def carries_a_hidden_state_across_steps() -> Script:
    class Recurrent(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = getattr(self, "hidden", None)
            x = x if hidden is None else x + hidden
            for block in self.blocks:
                x = block(x)
            self.hidden = x.detach()
            out: Tensor = self.head(x)
            return out

    return supervised(Recurrent(Mlp(), Mlp()))
