"""Small programs over memwall's stream code, each with a digest of all it computed; for the race finder.

A program computes the same in whatever order its streams come to their work, as long as every wait is there.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PROGRAMS"]

WIDTH = 64
NUM_BYTES = WIDTH * WIDTH * 4


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def _random(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def activations() -> str:
    """Saved tensors leave in a small window and come back, fetched ahead or not, some of them in vain."""
    from memwall.apply.offload.engine import ActivationOffload

    seen = []
    x = _random(0).div_(8).requires_grad_()
    with ActivationOffload(
        None, window_bytes=2 * NUM_BYTES, min_bytes=NUM_BYTES, is_excluded=lambda tensor: False
    ) as offload:
        for number in range(2):
            with offload.hooks():
                y = x
                for _ in range(6):
                    y = (y @ x).sin()
            between = [torch.full_like(x, float(number)).cos() for _ in range(3)]
            y.square().sum().backward()
            seen += [one.sum() for one in between]
            for name, is_used in (("in vain", False), ("used", True)):
                with offload.group(name):
                    packed = [offload.pack(torch.full_like(x, i + number).sin().detach()) for i in range(6)]
                after = [torch.full_like(x, -1.0) for _ in range(2)]
                offload.prefetch(name)
                if is_used:
                    seen += [(offload.unpack(one) * 2).sum() for one in packed]
                del packed
                zeros = [torch.zeros_like(x).add_(0.5) for _ in range(6)]
                seen += [one.sum() for one in (*zeros, *after)]
    assert x.grad is not None
    return _digest([x.grad, torch.stack(seen)])


def _stepped(make: Callable[[list[Tensor], Any], Any]) -> str:
    """Trains parameters whose gradients are computed on the device, with an optimizer that `make` changes."""
    parameters = [_random(number) for number in range(8)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    changed = make(parameters, optimizer)
    for number in range(3):
        for parameter in parameters:
            parameter.grad = (parameter * (number + 1)).sin() @ parameter
        optimizer.step()
        optimizer.zero_grad()
        for parameter in parameters:
            (parameter * 2).cos()  # memory changes hands
    state = optimizer.state_dict()["state"]
    found = _digest([*parameters, *(state[n][key] for n in sorted(state) for key in ("exp_avg", "exp_avg_sq"))])
    changed.undo()
    return found


def state() -> str:
    """An optimizer's state lives in pinned memory, and passes through a ring of buffers in a step."""
    from memwall.apply.optimizer_state.bucketed_state import OptimizerState
    from memwall.apply.optimizer_state.pinned import PinnedSpace

    def make(_: list[Tensor], optimizer: Any) -> Any:
        space = PinnedSpace(torch.device("cuda", 0), limit_bytes=1 << 30)
        return OptimizerState(optimizer, space, resident_bytes=0, bucket_bytes=2 * NUM_BYTES, min_bytes=1 << 10)

    return _stepped(make)


def cpu_step() -> str:
    """The optimizer's step is done on the CPU, through stages in pinned memory."""
    from memwall.apply.optimizer_state.cpu_step import CpuStep

    def make(_: list[Tensor], optimizer: Any) -> Any:
        return CpuStep(optimizer, torch.device("cuda", 0), bucket_bytes=2 * NUM_BYTES, limit_bytes=1 << 30)

    return _stepped(make)


def parameters() -> str:
    """Parameters and gradients live in pinned memory, and pass by block by block."""
    from memwall.apply.optimizer_state.open_state import open_optimizer_state
    from memwall.apply.streaming.open_streaming import open_parameter_streaming

    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(6))).cuda()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(_random(number).div_(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    tier = {"disk": None, "capacity_bytes": None, "host_limit_bytes": 1 << 30, "min_bytes": 1 << 10}
    streaming, close = open_parameter_streaming(model, window_bytes=NUM_BYTES, **tier)
    _, close_state = open_optimizer_state(
        optimizer, tier="host", resident_bytes=0, bucket_bytes=NUM_BYTES, around_step=streaming.around_step, **tier
    )
    seen = []
    for number in range(3):
        for part in range(2):
            loss = model(_random(100 + number + part)).square().sum()
            seen.append(loss.detach())
            loss.backward()
            seen += [
                torch.full_like(loss, 1.0).expand(WIDTH, WIDTH).cos().sum() for _ in range(3)
            ]  # memory changes hands
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(_random(number)).sum())
    close_state()
    close()
    return _digest([*model.parameters(), torch.stack(seen)])


_EVERY = (activations, state, cpu_step, parameters)
PROGRAMS: dict[str, Callable[[], str]] = {each.__name__: partial(each) for each in _EVERY}
