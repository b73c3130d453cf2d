"""Parameters and gradients on disk: the same bits as in memory, with a window of them in memory."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from block_models import executor_of
from combinations import every_value
from optimizer_runs import OPTIMIZERS, Net, in_groups
from streamed_models import GPT, KIB, everything, loss_of, streamed, train_gpt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.planning.techniques.recompute import Recompute
from memwall.store.transfer import TransferPool

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def plain_run() -> tuple[list[float], dict[str, Tensor]]:
    return train_gpt(None)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# The same bits.


class Encoder(nn.Module):
    """Uses a matrix of its own before, between and after its children."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(64, 64) / 8)
        self.inner = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.own
        for number, layer in enumerate(self.inner):
            x = layer(x).tanh()
            if number == 1:
                x = x + x @ self.own
        return x @ self.own


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_module_around_others_may_use_a_parameter_of_its_own_at_any_time(
    is_frozen: bool, state_pool: TransferPool
) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Encoder(), nn.Linear(64, 64))
        model[1].own.requires_grad_(not is_frozen)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with streamed(model, state_pool) if is_streamed else nullcontext():
            for step in range(3):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(everything(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("window_bytes", [1, 64 * KIB, 1 << 20], ids=["one parameter", "a few", "all"])
def test_training_is_bitwise_equal(
    window_bytes: int, state_pool: TransferPool, plain_run: tuple[list[float], dict[str, Tensor]]
) -> None:
    numbers, left = train_gpt(state_pool, window_bytes=window_bytes)
    assert numbers == plain_run[0]
    assert_equal(left, plain_run[1])
    assert state_pool.bytes_written > 20 * 16 * KIB


@pytest.mark.slow
def test_without_the_optimizers_state_too(
    state_pool: TransferPool, plain_run: tuple[list[float], dict[str, Tensor]]
) -> None:
    numbers, left = train_gpt(state_pool, has_state=False)
    assert numbers == plain_run[0]
    assert_equal(left, plain_run[1])


def recomputed_by_plan(model: nn.Module) -> None:
    blocks = [f"layers.{number}" for number in range(4)]
    executor_of(model, *(Recompute(block=block) for block in blocks), order=blocks).apply()


def recomputed_by_loop(model: nn.Module, *, use_reentrant: bool) -> None:
    for layer in model.get_submodule("layers").children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)


def recomputed_by_the_layer(model: nn.Module, *, use_reentrant: bool) -> None:
    """As layers of transformers do, within their own forward."""
    for layer in model.get_submodule("layers").children():
        forward: Any = layer.forward
        if hasattr(forward, "__wrapped__"):
            forward.__wrapped__ = partial(checkpoint, forward.__wrapped__, use_reentrant=use_reentrant)


def recomputed_in_pairs(model: nn.Module) -> None:
    """One recomputation runs several blocks, and within it others are recomputed again."""
    layers = list(model.get_submodule("layers").children())
    recomputed_by_loop(nn.ModuleDict({"layers": nn.ModuleList(layers[1::2])}), use_reentrant=False)
    for first, second in zip(layers[::2], layers[1::2], strict=True):
        one, other = first.forward, second.forward
        first.forward = partial(checkpoint, lambda x, one=one, other=other: other(one(x)), use_reentrant=False)
        second.forward = nn.Identity().forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare",
    [
        recomputed_by_plan,
        partial(recomputed_by_loop, use_reentrant=False),
        partial(recomputed_by_loop, use_reentrant=True),
        partial(recomputed_by_the_layer, use_reentrant=False),
        partial(recomputed_by_the_layer, use_reentrant=True),
        recomputed_in_pairs,
    ],
    ids=[
        "by the plan",
        "by the loop",
        "by the loop, reentrant",
        "by itself",
        "by itself, reentrant",
        "in nested pairs",
    ],
)
def test_blocks_may_be_recomputed(
    prepare: Callable[[nn.Module], None],
    state_pool: TransferPool,
    plain_run: tuple[list[float], dict[str, Tensor]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers, left = train_gpt(state_pool, prepare=prepare)
    assert numbers == plain_run[0]
    assert_equal(left, plain_run[1])
    # Nothing was kept in memory for it; that a loop's own wrapper stays on top is another matter.
    assert not [record for record in caplog.records if record.name != "memwall.patches"]


@pytest.mark.parametrize(
    ("name", "has_state"),
    every_value(sorted(OPTIMIZERS), {"with its state on disk": True, "with its state in memory": False}),
)
def test_every_optimizer_steps_to_the_same_bits(name: str, has_state: bool, state_pool: TransferPool) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = OPTIMIZERS[name](in_groups(model))

        def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for step in range(4):
                for micro in range(2):
                    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(10 * step + micro))
                    (model(x, step).square().mean() / 2).backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)

        if is_streamed:
            with streamed(model, state_pool, optimizer if has_state else None, window_bytes=20 * KIB, min_bytes=KIB):
                run()
        else:
            run()
        found.append(everything(model, optimizer))
    assert_equal(*found)
    assert state_pool.bytes_read > 0


class Shared(nn.Module):
    """One layer is used three times, twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(self.first(x)).relu())
        out: Tensor = self.last(self.shared(x.tanh() + 1))
        return out


@pytest.mark.parametrize("retain_graph", [False, True], ids=["one backward", "two backwards of a graph"])
def test_a_module_may_be_used_again_and_again(retain_graph: bool, state_pool: TransferPool) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = Shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for step in range(3):
                x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
                # Two graphs at once; the first to be made is the first to be gone through.
                one, other = model(x).square().mean(), model(-x).mean()
                one.backward(retain_graph=retain_graph)
                if retain_graph:
                    one.backward()
                with torch.no_grad():
                    model(x)
                other.backward()
                optimizer.step()
                optimizer.zero_grad()

        if is_streamed:
            with streamed(model, state_pool, optimizer, min_bytes=KIB):
                run()
        else:
            run()
        found.append(everything(model, optimizer))
    assert_equal(*found)


def language_model(kind: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 200, "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=200, n_embd=64, n_layer=3, n_head=4, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, intermediate_size=128))


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("kind", "has_recomputation"), every_value(["gpt2", "mixtral"], {"kept": False, "recomputed": True})
)
def test_models_of_transformers_train_to_the_same_bits(
    kind: str, has_recomputation: bool, state_pool: TransferPool, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model: Any = language_model(kind).train()
        if has_recomputation:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters())

        def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for step in range(4):
                tokens = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(step))
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                if step % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

        if is_streamed:
            with streamed(model, state_pool, optimizer):
                run()
        else:
            run()
        found.append(everything(model, optimizer))
    assert_equal(*found)
    assert "stay in memory" not in caplog.text


# What is in memory.


@pytest.mark.slow
def test_a_window_of_parameters_and_gradients_is_in_memory(state_pool: TransferPool) -> None:
    model = GPT(num_layers=12)
    optimizer = torch.optim.AdamW(model.parameters())
    layer_bytes = sum(p.nbytes for p in model.layers[0].parameters())
    seen: list[int] = []
    with streamed(model, state_pool, optimizer, window_bytes=32 * KIB) as streaming:
        assert streaming.away_bytes > 12 * 0.9 * layer_bytes

        def look(*_: Any) -> None:
            seen.append(streaming.resident_bytes)

        for layer in model.layers:
            layer.down.register_forward_hook(look)
            layer.up.register_full_backward_hook(look)
            layer.up.weight.register_post_accumulate_grad_hook(look)
        optimizer.register_step_post_hook(look)
        for step in range(3):
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            look()
        assert len(seen) == 3 * (3 * 12 + 2)
        # Two blocks, what a step or a write has in its window, and the tied embedding.
        assert max(seen) < 2 * layer_bytes + 5 * 32 * KIB


def test_each_byte_moves_as_often_as_it_must(state_pool: TransferPool) -> None:
    model = GPT(num_layers=8)
    optimizer = torch.optim.AdamW(model.parameters())
    moved: list[tuple[int, int]] = []
    with streamed(model, state_pool, optimizer) as streaming:
        num_bytes = streaming.away_bytes
        for step in range(3):
            before = (streaming.bytes_read, streaming.bytes_written)
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved.append((streaming.bytes_read - before[0], streaming.bytes_written - before[1]))
    # Read: parameters for forward, backward and step, the gradient, two moments. Written: all but the first two. The
    # tied embedding is read once more in each pass, and what is still in memory is not read.
    read, written = moved[-1]
    assert 5.0 < read / num_bytes < 6.3
    assert 3.9 < written / num_bytes < 4.1
