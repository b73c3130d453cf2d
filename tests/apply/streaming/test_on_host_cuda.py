"""Parameters of a CUDA device that are in pinned host memory between their uses: the same training in less memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.apply.optimizer_state.pinned import PinnedSpace, StreamCopy
from memwall.apply.streaming.open_streaming import open_parameter_streaming
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.errors import NotExactError, StoreError
from memwall.store.pinned_arena import PinnedSlot

pytestmark = [pytest.mark.phantom(card="a100-80gb"), pytest.mark.timeout(120)]
KIB, MIB = 1 << 10, 1 << 20
WIDTH, NUM_BLOCKS, VOCABULARY = 256, 6, 512
BLOCK_BYTES = 4 * 8 * WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    """Its head is its embedding."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


Make = Callable[[Any], torch.optim.Optimizer]


@contextmanager
def below(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, staying: tuple[str, ...] = (), host_bytes: int = 1 << 30
) -> Iterator[ParameterStreaming]:
    """Has parameters, gradients and state in host memory inside."""
    with ExitStack() as closing:
        streaming, close = open_parameter_streaming(
            model,
            disk=None,
            capacity_bytes=None,
            host_limit_bytes=host_bytes,
            window_bytes=MIB,
            min_bytes=64 * KIB,
        )
        closing.callback(close)
        streaming.let_stay(staying)
        _, close_state = open_optimizer_state(
            optimizer,
            tier="host",
            disk=None,
            capacity_bytes=None,
            host_limit_bytes=host_bytes,
            resident_bytes=0,
            bucket_bytes=2 * MIB,
            min_bytes=64 * KIB,
            around_step=streaming.around_step,
        )
        closing.callback(close_state)
        yield streaming


def trained(
    make: Make,
    *,
    is_below: bool,
    num_parts: int = 1,
    clip: float = 0.0,
    recomputes: bool = False,
    staying: tuple[str, ...] = (),
    scale: float = 0.0,
) -> tuple[dict[str, Tensor], list[float], int]:
    """Returns weights and state, losses, and the most bytes that the last step held."""
    torch.manual_seed(0)
    model = Net(recomputes=recomputes).cuda()
    optimizer = make(model.parameters())
    losses: list[float] = []
    scaler = torch.amp.GradScaler("cuda", enabled=scale > 0, init_scale=scale or 1.0)
    with below(model, optimizer, staying=staying) if is_below else nullcontext():
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            for part in range(num_parts):
                torch.manual_seed(10 * step + part)
                tokens = torch.randint(VOCABULARY, (2, 17), device="cuda")
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                scaler.scale(loss).backward()
                losses.append(loss.item())
            if scale and clip:
                scaler.unscale_(optimizer)
            if clip:
                losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        peak_bytes = torch.cuda.max_memory_allocated()
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.cpu() for key, value in values.items() if isinstance(value, Tensor)}
    return found, losses, peak_bytes


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


@pytest.mark.parametrize("make", [adamw, fused, momentum])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_parts": 3},
        {"clip": 0.05},
        {"recomputes": True},
        {"staying": ("blocks.0", "blocks.1"), "num_parts": 2, "clip": 0.05},
        {"scale": 1024.0, "num_parts": 2, "clip": 0.05},
    ],
    ids=["plain", "accumulated", "clipped", "recomputed", "some_stay", "scaled"],
)
def test_a_training_keeps_its_bits_and_holds_less(make: Make, how: dict[str, Any]) -> None:
    expected, losses, plain_bytes = trained(make, is_below=False, **how)
    found, same_losses, held_bytes = trained(make, is_below=True, **how)
    assert same_losses == losses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert held_bytes < plain_bytes - 4 * BLOCK_BYTES


@pytest.mark.parametrize("scale", [1024.0, 1e38])
def test_gradients_stay_away_while_their_scale_is_taken_off(scale: float) -> None:
    """GIVEN gradients in host memory WHEN GradScaler looks at all of them at once THEN none is back for good."""
    torch.manual_seed(0)
    model = Net().cuda()
    before = model.blocks[0].up.weight.detach().cpu()
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cuda", init_scale=scale)
    with below(model, optimizer) as streaming:
        scaler.scale(model(torch.randint(VOCABULARY, (2, 16), device="cuda")).square().sum()).backward()
        scaler.unscale_(optimizer)
        assert all(member.gradient.handle is not None for member in streaming.tier)
        streaming.tier.writes.drain()
        assert streaming.resident_bytes == 0
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(model.blocks[0].up.weight.detach().cpu(), before) == (scale > 1e30)


def test_between_steps_and_while_one_block_runs_the_others_are_away() -> None:
    model = Net().cuda()
    optimizer = adamw(model.parameters())
    held: list[int] = []
    with below(model, optimizer) as streaming:
        model.blocks[3].register_forward_pre_hook(lambda *_: held.append(streaming.resident_bytes))
        tokens = torch.randint(VOCABULARY, (2, 16), device="cuda")
        for _ in range(2):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert streaming.resident_bytes <= MIB  # what may be on its way
        streaming.tier.writes.drain()
        assert streaming.resident_bytes == 0
    assert BLOCK_BYTES <= held[-1] <= 3 * BLOCK_BYTES


def test_a_state_dict_and_an_evaluation_see_the_newest_weights() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = adamw(model.parameters())
    tokens = torch.randint(VOCABULARY, (2, 16), device="cuda")
    with below(model, optimizer) as streaming:
        model(tokens).square().mean().backward()
        optimizer.step()
        saved = {name: value.cpu() for name, value in model.state_dict().items()}
        with torch.no_grad():
            torch.manual_seed(1)
            evaluated = model(tokens)
        streaming.end_showing()
        assert streaming.resident_bytes <= 2 * MIB
    assert all(torch.equal(saved[name], value.cpu()) for name, value in model.state_dict().items())
    with torch.no_grad():
        torch.manual_seed(1)
        assert torch.equal(model(tokens), evaluated)


def test_a_host_without_room_is_refused_and_the_model_stays_whole() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    with pytest.raises(StoreError, match="pinned host memory"), below(model, adamw(model.parameters()), host_bytes=MIB):
        pass
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(before[name], value.cpu()) for name, value in model.state_dict().items())


def test_what_comes_back_different_while_it_is_proven_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().cuda()
    optimizer = adamw(model.parameters())
    tokens = torch.randint(VOCABULARY, (2, 16), device="cuda")
    copy_in = PinnedSpace.copy_in

    def reversed_copy(space: PinnedSpace, slot: PinnedSlot, memory: Tensor, after: StreamCopy | None) -> StreamCopy:
        return copy_in(space, replace(slot, memory=slot.memory.flip(0)), memory, after)

    with below(model, optimizer) as streaming:
        streaming.tier.place.set_proving(True)
        model(tokens).square().mean().backward()  # whose gradients leave
        with monkeypatch.context() as patch:
            patch.setattr(PinnedSpace, "copy_in", reversed_copy)
            with pytest.raises(NotExactError, match=r"the gradient of .* came back different from what left"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()


def test_a_backward_that_is_differentiated_brings_parameters_back(caplog: pytest.LogCaptureFixture) -> None:
    def run(model: nn.Module) -> Tensor:
        x = torch.ones(4, WIDTH, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).cuda()

    expected, model = run(made()), made()
    with below(model, adamw(model.parameters())) as streaming:
        found = run(model)
        assert streaming.away_bytes == 0
    assert torch.equal(found, expected)
    assert "create_graph=True" in caplog.text
