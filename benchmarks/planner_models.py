"""The models of the planner benchmark, at the size of a card: one step of each, written on a `Tape`.

Shapes follow published models of their kind. Nothing is random but the widths of `decoder-32-varied`, whose seed is
fixed: the same version of this file gives the same traces.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from planner_tape import CostTable, Tape, Weight

from memwall.trace.records import Step, Trace

HALF, FULL = 2, 4
"""Bytes of bfloat16 and of float32."""

# What a training step reaches of the data sheets in memwall/data/hardware.toml: about half of the FLOP/s, 80 % of the
# memory's and 60 % of the link's bytes per second, which is what torchtitan's planner reached in a step
# (pytorch/torchtitan#3881). The window is a large tensor or two of these models, or what memwall gives it now
# (memwall.planning.menu.WINDOW_BYTES).
WIDE, NARROW = 512 << 20, 32 << 20
TABLES = {
    table.name: table
    for table in (
        CostTable("rtx-3090-pcie3", 35e12, 750e9, 9.6e9, 9.6e9, WIDE),
        CostTable("rtx-4090", 82e12, 800e9, 19e9, 19e9, NARROW),
        CostTable("a100-40gb", 156e12, 1240e9, 19e9, 19e9, WIDE),
        CostTable("h200", 495e12, 3840e9, 38e9, 38e9, WIDE),
        CostTable("a100-slow-nvme", 156e12, 1240e9, 1.5e9, 3e9, NARROW),
        CostTable("a100-no-tier", 156e12, 1240e9, 0.0, 0.0, 0),
    )
}


class PlannedStep(NamedTuple):
    """What is planned for: a trace of one steady step, and the modules a user would checkpoint."""

    workload: str
    costs: CostTable
    trace: Trace
    blocks: tuple[int, ...]
    """Modules called in forward order."""

    @property
    def step(self) -> Step:
        return self.trace.steps[0]


class Shape(NamedTuple):
    """A transformer layer."""

    width: int
    tokens: int
    """In the batch."""
    sequence: int
    """Tokens that attend to each other."""
    feed_forward: int
    num_heads: int = 16
    num_kv_heads: int = 16
    head_width: int = 128
    adapter_rank: int = 0
    """LoRA on every linear layer, all else frozen; 0 for full training."""
    dropout: bool = False
    num_experts: int = 0
    is_causal: bool = True


# -- layers ------------------------------------------------------------------------------------------------------------


def _linear(tape: Tape, x: int, rows: int, fan_in: int, fan_out: int, adapter_rank: int = 0) -> int:
    """A matrix product; under LoRA a frozen one, plus the product of two small trained ones."""

    def product(left: int, inner: int, outer: int, weight: Weight) -> int:
        saves = (left,) if weight.is_trained else ()
        size = HALF * rows * outer
        flops = 2.0 * rows * inner * outer
        return tape.run("aten.mm.default", (left,), (size,), flops=flops, saves=saves, weights=(weight,))[0]

    out = product(x, fan_in, fan_out, tape.weight(fan_in * fan_out, is_trained=not adapter_rank))
    if not adapter_rank:
        return out
    low = product(x, fan_in, adapter_rank, tape.weight(fan_in * adapter_rank))
    correction = product(low, adapter_rank, fan_out, tape.weight(adapter_rank * fan_out))
    return tape.run("aten.add.Tensor", (out, correction), (tape.size(out),), is_alias=True)[0]


def _norm(tape: Tape, x: int, rows: int, width: int, *, is_trained: bool = True) -> int:
    weights = (tape.weight(width, is_trained=is_trained),)
    sizes = (tape.size(x), 2 * FULL * rows)
    name = "aten.native_layer_norm.default"
    return tape.run(name, (x,), sizes, saves=(x,), saves_outputs=(1,), weights=weights)[0]


def _add(tape: Tape, x: int, y: int) -> int:
    return tape.run("aten.add.Tensor", (x, y), (tape.size(x),), is_alias=True)[0]


def _dropout(tape: Tape, x: int) -> int:
    sizes = (tape.size(x), tape.size(x) // HALF)
    return tape.run("aten.native_dropout.default", (x,), sizes, saves_outputs=(1,))[0]


def _rotated(tape: Tape, x: int) -> int:
    return tape.run("aten.mul.Tensor", (x,), (tape.size(x),))[0]


def _attention(tape: Tape, x: int, shape: Shape, memory: int | None = None) -> int:
    """Attention within `x`, or from `x` to `memory`; returns what the residual stream adds."""
    rows, width, rank = shape.tokens, shape.width, shape.adapter_rank
    key_rows = rows if memory is None else tape.size(memory) // (HALF * width)
    source = x if memory is None else memory
    inner, kv_inner = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    query = _linear(tape, x, rows, width, inner, rank)
    key, value = (_linear(tape, source, key_rows, width, kv_inner, rank) for _ in range(2))
    if memory is None:
        query, key = _rotated(tape, query), _rotated(tape, key)
    flops = 4.0 * rows * (shape.sequence * key_rows // rows) * inner / (2 if shape.is_causal else 1)
    mixed, _ = tape.run(
        "aten._scaled_dot_product_flash_attention.default",
        (query, key, value),
        (HALF * rows * inner, FULL * rows * shape.num_heads),
        flops=flops,
        saves=(query, key, value),
        saves_outputs=(0, 1),
        backward_flops=2.5 * flops,
    )
    return _linear(tape, mixed, rows, inner, width, rank)


def _gated(tape: Tape, x: int, rows: int, shape: Shape) -> int:
    """down(silu(gate(x)) * up(x))"""
    width, inner, rank = shape.width, shape.feed_forward, shape.adapter_rank
    gate, up = (_linear(tape, x, rows, width, inner, rank) for _ in range(2))
    (active,) = tape.run("aten.silu.default", (gate,), (tape.size(gate),), saves=(gate,))
    (product,) = tape.run("aten.mul.Tensor", (active, up), (tape.size(up),), saves=(active, up))
    return _linear(tape, product, rows, inner, width, rank)


def _experts(tape: Tape, x: int, shape: Shape) -> int:
    """Two experts per token: routed, gathered, one batched product per matrix of all experts, scattered."""
    rows, width = shape.tokens, shape.width
    scores = _linear(tape, x, rows, width, shape.num_experts)
    chosen, places = tape.run("aten.topk.default", (scores,), (2 * HALF * rows, 16 * rows), saves_outputs=(1,))
    (gathered,) = tape.run("aten.index.Tensor", (x,), (2 * tape.size(x),), saves=(places,))
    mixed = _gated(tape, gathered, 2 * rows, shape)
    (weighted,) = tape.run("aten.mul.Tensor", (mixed, chosen), (tape.size(mixed),), saves=(mixed, chosen))
    return tape.run("aten.index_add.default", (weighted,), (tape.size(x),), saves=(places,))[0]


def _layer(tape: Tape, x: int, shape: Shape, memory: int | None = None) -> int:
    """A pre-norm transformer layer, with attention to `memory` where there is one."""
    is_trained = not shape.adapter_rank

    def branch(start: int, make: Callable[[int], int]) -> int:
        out = make(_norm(tape, start, shape.tokens, shape.width, is_trained=is_trained))
        return _add(tape, start, _dropout(tape, out) if shape.dropout else out)

    x = branch(x, lambda normed: _attention(tape, normed, shape))
    if memory is not None:
        across = shape._replace(is_causal=False)
        x = branch(x, lambda normed: _attention(tape, normed, across, memory))
    if shape.num_experts:
        return branch(x, lambda normed: _experts(tape, normed, shape))
    return branch(x, lambda normed: _gated(tape, normed, shape.tokens, shape))


def _stack(tape: Tape, name: str, x: int, shapes: list[Shape], memory: int | None = None) -> tuple[int, list[int]]:
    """A list of layers, each a block."""
    holder = tape.module(name, "ModuleList")
    blocks = []
    for number, shape in enumerate(shapes):
        block = tape.module(f"{name}.{number}", f"{name}_layer", holder, "list")
        with tape.call(block, (x,) if memory is None else (x, memory)):
            x = _layer(tape, x, shape, memory)
        blocks.append(block)
    return x, blocks


def _embedded(tape: Tape, tokens: int, vocabulary: int, width: int, *, is_trained: bool = True) -> int:
    text = tape.standing(8 * tokens, "input")
    weights = (tape.weight(vocabulary * width, is_trained=is_trained),)
    return tape.run("aten.embedding.default", (text,), (HALF * tokens * width,), weights=weights)[0]


def _language_loss(tape: Tape, x: int, tokens: int, vocabulary: int, width: int, *, is_trained: bool = True) -> None:
    """Final norm, head, cross-entropy in float32, and backward from there."""
    normed = _norm(tape, x, tokens, width, is_trained=is_trained)
    head = tape.weight(vocabulary * width, is_trained=is_trained)
    (logits,) = tape.run(
        "aten.mm.default",
        (normed,),
        (HALF * tokens * vocabulary,),
        flops=2.0 * tokens * vocabulary * width,
        saves=(normed,) if is_trained else (),
        weights=(head,),
    )
    tape.begin_loss()
    size = FULL * tokens * vocabulary
    (logs,) = tape.run("aten._log_softmax.default", (logits,), (size,), saves_outputs=(0,))
    (loss,) = tape.run("aten.nll_loss_forward.default", (logs,), (FULL,))
    tape.backward(loss)


# -- models ------------------------------------------------------------------------------------------------------------


def _decoder(tape: Tape, shapes: list[Shape], vocabulary: int, *, is_foreach: bool = False) -> list[int]:
    tokens, width, is_trained = shapes[0].tokens, shapes[0].width, not shapes[0].adapter_rank
    x = _embedded(tape, tokens, vocabulary, width, is_trained=is_trained)
    x, blocks = _stack(tape, "layers", x, shapes)
    _language_loss(tape, x, tokens, vocabulary, width, is_trained=is_trained)
    tape.optimizer_step(is_foreach=is_foreach)
    return blocks


_PLAIN = Shape(width=2048, tokens=8192, sequence=2048, feed_forward=5632)


def _equal_decoder(tape: Tape, depth: int) -> list[int]:
    return _decoder(tape, [_PLAIN] * depth, 32_000)


def _varied_decoder(tape: Tape) -> list[int]:
    """Layers of different width inside, as after pruning."""
    rng = random.Random(1)
    inner = [128 * rng.randint(16, 72) for _ in range(32)]
    return _decoder(tape, [_PLAIN._replace(feed_forward=size) for size in inner], 32_000)


def _long_context(tape: Tape) -> list[int]:
    shape = Shape(width=4096, tokens=65_536, sequence=65_536, feed_forward=14_336, num_heads=32, num_kv_heads=8)
    return _decoder(tape, [shape] * 16, 128_000)


def _mixture(tape: Tape) -> list[int]:
    return _decoder(tape, [_PLAIN._replace(feed_forward=2816, num_experts=16)] * 16, 32_000)


def _adapted(tape: Tape) -> list[int]:
    shape = Shape(
        width=4096, tokens=8192, sequence=4096, feed_forward=11_008, num_heads=32, num_kv_heads=32, adapter_rank=16
    )
    return _decoder(tape, [shape] * 32, 32_000)


def _embedding_heavy(tape: Tape) -> list[int]:
    shape = Shape(width=1024, tokens=8192, sequence=2048, feed_forward=2816, num_heads=8, num_kv_heads=8)
    return _decoder(tape, [shape] * 12, 256_000, is_foreach=True)


def _encoder_decoder(tape: Tape) -> list[int]:
    """The encoder's output feeds every layer of the decoder; dropout on every branch."""
    source = Shape(
        width=1024, tokens=16_384, sequence=512, feed_forward=4096, head_width=64, dropout=True, is_causal=False
    )
    target = source._replace(tokens=8192, sequence=256, is_causal=True)
    vocabulary = 32_000
    x, encoder = _stack(tape, "encoder", _embedded(tape, source.tokens, vocabulary, source.width), [source] * 12)
    memory = _norm(tape, x, source.tokens, source.width)
    y = _embedded(tape, target.tokens, vocabulary, target.width)
    y, decoder = _stack(tape, "decoder", y, [target] * 12, memory)
    _language_loss(tape, y, target.tokens, vocabulary, target.width)
    tape.optimizer_step()
    return encoder + decoder


def _convolution(tape: Tape, x: int, pixels: int, channels_in: int, channels_out: int, area: int, grow: int = 1) -> int:
    """A convolution over `pixels` of its output; `area` taps."""
    weight = tape.weight(channels_in * channels_out * area)
    flops = 2.0 * pixels * channels_in * channels_out * area / grow
    size = HALF * pixels * channels_out
    return tape.run("aten.convolution.default", (x,), (size,), flops=flops, saves=(x,), weights=(weight,))[0]


def _residual(tape: Tape, x: int, pixels: int, channels_in: int, channels_out: int) -> int:
    """Twice norm, activation, convolution; a shortcut around them."""
    y, channels = x, channels_in
    for _ in range(2):
        name = "aten.native_group_norm.default"
        weights = (tape.weight(channels),)
        y = tape.run(name, (y,), (tape.size(y), 4096), saves=(y,), saves_outputs=(1,), weights=weights)[0]
        (y,) = tape.run("aten.silu.default", (y,), (tape.size(y),), saves=(y,))
        y = _convolution(tape, y, pixels, channels, channels_out, 9)
        channels = channels_out
    shortcut = x if channels_in == channels_out else _convolution(tape, x, pixels, channels_in, channels_out, 1)
    return _add(tape, shortcut, y)


def _unet(tape: Tape, num_levels: int, per_level: int) -> list[int]:
    """As in diffusion models: each block of the way down hands its output to one of the way up, over the whole net."""
    base, image, batch = 128, 128, 32
    blocks: list[int] = []
    downs, ups = tape.module("downs", "ModuleList"), tape.module("ups", "ModuleList")

    def block(holder: int, path: str, x: int, pixels: int, channels_in: int, channels_out: int) -> int:
        index = tape.module(path, "Residual", holder, "list" if holder else "none")
        with tape.call(index, (x,)):
            x = _residual(tape, x, pixels, channels_in, channels_out)
        blocks.append(index)
        return x

    pixels, channels = batch * image * image, base
    x = _convolution(tape, tape.standing(HALF * pixels * 4, "input"), pixels, 4, base, 9)
    skips: list[tuple[int, int]] = []
    for level in range(num_levels):
        for number in range(per_level):
            x = block(downs, f"downs.{level * per_level + number}", x, pixels, channels, base << level)
            channels = base << level
            skips.append((x, channels))
        pixels //= 4
        x = _convolution(tape, x, pixels, channels, channels, 9)
    x = block(0, "bottom", x, pixels, channels, channels)
    for level in reversed(range(num_levels)):
        pixels *= 4
        x = _convolution(tape, x, pixels, channels, channels, 9, grow=4)
        for number in range(per_level):
            skip, skip_channels = skips.pop()
            (joined,) = tape.run("aten.cat.default", (x, skip), (tape.size(x) + tape.size(skip),), is_alias=True)
            path = f"ups.{(num_levels - 1 - level) * per_level + number}"
            x = block(ups, path, joined, pixels, channels + skip_channels, base << level)
            channels = base << level
    x = _convolution(tape, x, pixels, channels, 4, 9)
    tape.begin_loss()
    (loss,) = tape.run("aten.mse_loss.default", (x,), (FULL,), saves=(x,))
    tape.backward(loss)
    tape.optimizer_step()
    return blocks


WORKLOADS: dict[str, Callable[[Tape], list[int]]] = {
    **{f"decoder-{depth}": partial(_equal_decoder, depth=depth) for depth in (5, 24, 32, 64, 96, 128)},
    "decoder-32-varied": _varied_decoder,
    "gqa-long-context": _long_context,
    "encoder-decoder": _encoder_decoder,
    "unet-5": partial(_unet, num_levels=2, per_level=1),
    "unet-17": partial(_unet, num_levels=4, per_level=2),
    "moe": _mixture,
    "lora": _adapted,
    "embedding-heavy": _embedding_heavy,
}


FEW_TABLES = dict.fromkeys(("decoder-5", "decoder-64", "decoder-96", "decoder-128"), ("a100-40gb", "a100-no-tier"))
"""Where two tables are enough: what differs between the others, shallower decoders show in less time."""


def planned_step(workload: str, table: str) -> PlannedStep:
    """One of `WORKLOADS` on one of `TABLES`."""
    tape = Tape(TABLES[table])
    blocks = WORKLOADS[workload](tape)
    return PlannedStep(workload, TABLES[table], tape.trace(workload), tuple(blocks))
