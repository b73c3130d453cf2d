"""Records what operators allocate for themselves on the CUDA device that is there, block by block, as torch's
allocator saw it.

    phantom/run python benchmarks/cuda_operator_blocks.py h100-80gb [--seed 0] [--rows 60]

Adds rows to tests/golden/cuda_operator_blocks.json in place of the same device's: the golden values of the formulas in
memwall/predict/cuda. The device may be the phantom one (PHANTOM_CARD=NAME): what is compared is torch's own host code.
"""

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from memwall.machine.hardware import hardware_named

GOLDEN = Path(__file__).parents[1] / "tests/golden/cuda_operator_blocks.json"
SIZES = (1, 3, 8, 12, 31, 48, 64, 127, 192, 256, 768, 1000, 3072, 4096, 8192, 12544, 50257)
MOST_ELEMENTS = 2**33
REDUCTIONS = (
    *("sum.dim_IntList", "mean.dim", "var.correction", "var_mean.correction", "amax.default", "any.dims"),
    "linalg_vector_norm.default",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Row = dict[str, Any]


def tensor(shape: list[int], dtype: torch.dtype, strides: list[int] | None = None, offset: int = 0) -> Row:
    """Describes a tensor so that JSON can hold it."""
    strides = strides or list(torch.empty(shape, device="meta").stride())
    return {"shape": shape, "strides": strides, "offset": offset, "dtype": str(dtype).removeprefix("torch.")}


def made(value: Any, device: str) -> Any:
    """Returns an argument as an operator takes it."""
    if isinstance(value, dict):
        last = sum((size - 1) * stride for size, stride in zip(value["shape"], value["strides"], strict=True))
        dtype = getattr(torch, value["dtype"])
        base = torch.empty(last + 1 + value["offset"], dtype=dtype, device=device)
        return base.as_strided(value["shape"], value["strides"], value["offset"])
    return value


def random_calls(rng: random.Random, num_rows: int) -> Iterator[Row]:
    """Makes reductions of tensors in any order of dimensions."""
    while num_rows:
        shape = [rng.choice(SIZES) for _ in range(rng.randint(1, 4))]
        if not 256 < math.prod(shape) <= MOST_ELEMENTS:
            continue
        order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.4 else list(range(len(shape)))
        strides, size = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = size
            size *= shape[dim]
        name, dims = rng.choice(REDUCTIONS), sorted(rng.sample(range(len(shape)), rng.randint(1, len(shape))))
        described = tensor(shape, rng.choice(DTYPES), strides, rng.choice((0, 0, 0, 1, 2)))
        yield {"operator": name, "args": [described, *([2, dims] if "norm" in name else [dims])]}
        num_rows -= 1


def chosen_calls(capability: tuple[int, int]) -> Iterator[Row]:
    """Makes what a training step calls, at sizes on either side of each rule's border."""
    half, full, index = torch.bfloat16, torch.float32, torch.int64
    for rows, width in ((12608, 768), (8192, 30522), (8192, 192), (64, 1000)):
        yield {"operator": "sum.dim_IntList", "args": [tensor([rows, width], half), [0], True]}
    for dtype in (torch.bool, torch.int32, full):
        yield {"operator": "sum.default", "args": [tensor([1000, 1000], dtype)]}
    yield {"operator": "mse_loss.default", "args": [tensor([1024, 1024], full), tensor([1024, 1024], full)]}
    for rows, width in ((65536, 768), (65537, 768), (100_000, 64), (300_000, 100), (70_000, 2111), (70_000, 2112)):
        layer, vector, column = tensor([rows, width], half), tensor([width], half), tensor([rows, 1], full)
        args = [layer, layer, [width], column, column, vector, vector, [True, True, True]]
        yield {"operator": "native_layer_norm_backward.default", "args": args}
        args = [layer, layer, [width], column, vector, [True, True]]
        yield {"operator": "_fused_rms_norm_backward.default", "args": args}
    turned, vector, column = (
        tensor([64, 250, 192], half, [48000, 1, 250]),
        tensor([192], half),
        tensor([64, 250, 1], full),
    )
    yield {"operator": "native_layer_norm.default", "args": [turned, [192], vector, vector, 1e-5]}
    args = [turned, turned, [192], column, column, vector, vector, [True, True, True]]
    yield {"operator": "native_layer_norm_backward.default", "args": args}
    for batch, channels, size, groups, dtype in ((8, 32, 32, 8, full), (64, 128, 32, 8, half), (200, 128, 1, 8, full)):
        image, vector = tensor([batch, channels, size, size], dtype), tensor([channels], dtype)
        sizes, statistics = [batch, channels, size * size, groups], tensor([batch, groups], dtype)
        yield {"operator": "native_group_norm.default", "args": [image, vector, vector, *sizes, 1e-5]}
        args = [image, image, statistics, statistics, vector, *sizes, [True, True, True]]
        yield {"operator": "native_group_norm_backward.default", "args": args}
    for num, weights, width, dtype in (
        # How CUB sorts, which decides where little is added up, is known from compute capability 8.0 on.
        *([(12_010, 400, 64, half)] if capability >= (8, 0) else []),
        *((3072, 1000, 32, full), (3073, 1000, 32, full), (8192, 8192, 192, half), (100_000, 50257, 768, full)),
        *((12_009, 400, 512, half), (12_010, 400, 512, half), (8192, 128, 192, half), (100_000, 1000, 64, half)),
    ):
        args = [tensor([num, width], dtype), tensor([num], index), weights, -1, False]
        yield {"operator": "embedding_dense_backward.default", "args": args}
    yield from products(half)
    yield from products(full)
    image, weight = tensor([128, 64, 96, 96], full), tensor([64, 64, 3, 3], full)
    args = [image, image, weight, [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]]
    yield {"operator": "convolution_backward.default", "args": args}


def products(dtype: torch.dtype) -> Iterator[Row]:
    """Makes products of matrices that lie in rows, in columns, in parts of them, and of expanded ones."""
    wide, square = [64, 48], tensor([48, 48], dtype)
    for strides in ([48, 1], [1, 64], [100, 1], [1, 100], [0, 1], [1, 0], [0, 0], [96, 2], [24, 1]):
        layer = tensor(wide, dtype, strides)
        yield {"operator": "mm.default", "args": [layer, square]}
        yield {"operator": "addmm.default", "args": [tensor([48], dtype), layer, square]}
        for first in (64 * 48, 0):
            layers, squares = tensor([8, *wide], dtype, [first, *strides]), tensor([8, 48, 48], dtype)
            yield {"operator": "bmm.default", "args": [layers, squares]}
        yield {"operator": "baddbmm.default", "args": [tensor([8, 64, 48], dtype), layers, squares]}
    for factors in (([8, 64, 1], [64, 1, 1], [8, 1, 48], [48, 48, 1]), ([8, 64, 1], [64, 1, 0], [8, 1, 48], [0, 0, 1])):
        layers, others = tensor(factors[0], dtype, factors[1]), tensor(factors[2], dtype, factors[3])
        yield {"operator": "bmm.default", "args": [layers, others]}
    column = tensor([8, 48, 1], dtype, [48, 1, 0])
    yield {"operator": "bmm.default", "args": [tensor([8, 64, 48], dtype), column]}


def watched(call: Callable[[], Any]) -> tuple[list[int], int, Any]:
    """Returns the bytes of all blocks that live at a call's peak, how many come ahead of its results, and these."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, clear_history=True)
    result = call()
    live: dict[int, tuple[int, int]] = {}
    peak: list[tuple[int, int]] = []
    for number, event in enumerate(torch.cuda.memory._snapshot()["device_traces"][0]):
        if event["action"] == "alloc":
            live[event["addr"]] = (number, event["size"])
            peak = max(peak, list(live.values()), key=lambda blocks: sum(size for _, size in blocks))
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    first = min(number for number, _ in live.values())
    return [size for _, size in peak], sum(number < first for number, _ in peak), result


def blocks_of(call: Row) -> tuple[list[int], list[int]]:
    """Returns the bytes of the blocks that a call has at its peak besides its results, and which come ahead of them."""
    packet, _, overload = call["operator"].partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    args = [made(value, "cuda") for value in call["args"]]
    peak, num_ahead, out = watched(lambda: operator(*args))
    results = Counter(
        t.untyped_storage().nbytes() for t in (out if isinstance(out, tuple) else (out,)) if t is not None
    )
    blocks = []
    for num_bytes in peak:
        if results[num_bytes]:
            results[num_bytes] -= 1
        else:
            blocks.append(num_bytes)
    return blocks, peak[:num_ahead]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", type=hardware_named)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=60, help="random reductions, beside the chosen calls")
    options = parser.parse_args()
    for dtype in DTYPES:  # cuBLAS has its workspaces now
        one = torch.ones(1, 1, device="cuda", dtype=dtype)
        torch.addmm(one[0], one, one)
        torch.bmm(one[None], one[None])
    calls = [
        *random_calls(random.Random(options.seed), options.rows),
        *chosen_calls(torch.cuda.get_device_capability()),
    ]
    found = [(call, *blocks_of(call)) for call in calls]
    rows = [{"device": options.device.name, **call, "blocks": blocks, "ahead": a} for call, blocks, a in found]
    kept = json.loads(GOLDEN.read_text())["rows"] if GOLDEN.exists() else []
    rows += [row for row in kept if row["device"] != options.device.name]
    rows.sort(key=lambda row: row["device"])
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = f'"command": "phantom/run python benchmarks/{Path(__file__).name} DEVICE", "torch": "{torch.__version__}"'
    GOLDEN.write_text(f'{{\n {head},\n "rows": [\n  {lines}\n ]\n}}\n')
    print(f"{len(calls)} calls on {options.device.name}: {GOLDEN}")


if __name__ == "__main__":
    main()
