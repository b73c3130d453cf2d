"""The fused kernels against what a user would otherwise run, on this machine's GPU; without one it refuses.

    python benchmarks/gpu_kernels.py [--shape M,H,V ...] [--repetitions N] [--output FILE]

Providers take turns in one process on the same tensors, with the L2 cache flushed before each launch. Prints a table
and writes JSON. A provider that is missing is recorded as absent, with the reason.
"""

import argparse
import importlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.triton_kernels import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNKS = (256, 1024, 2048, 4096)
# Llama 3 8B; two shapes of small models with wide vocabularies.
SHAPES = ((8192, 4096, 128_256), (16_384, 2048, 248_320), (16_384, 1024, 151_936))
_RESULTS = Path(__file__).parent / "results"
_FLUSH_BYTES = 256 << 20
_MIB = 1 << 20


def eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def _compiled() -> Loss:
    return torch.compile(eager)


def _core() -> Loss:
    core = getattr(F, "linear_cross_entropy", None)
    if core is None:
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, w, target: core(x, w, target, options=options)


def _liger() -> Loss:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, w, target: function(x, w, target)


def _cut(implementation: str) -> Callable[[], Loss]:
    def make() -> Loss:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return lambda x, w, target: function(x, w, target, impl=implementation)

    return make


def _quack() -> Loss:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda x, w, target: function(x, w, target)


def _memwall(chunk_rows: int, accum_dtype: torch.dtype) -> Callable[[], Loss]:
    return lambda: (
        lambda x, w, target: linear_cross_entropy(x, w, target, chunk_rows=chunk_rows, accum_dtype=accum_dtype)
    )


PROVIDERS: dict[str, Callable[[], Loss]] = {
    **{f"memwall-{rows}": _memwall(rows, torch.float32) for rows in CHUNKS},
    **{f"memwall-{rows}-bf16-sum": _memwall(rows, torch.bfloat16) for rows in CHUNKS},
    "eager": lambda: eager,
    "torch.compile": _compiled,
    "F.linear_cross_entropy": _core,
    "liger": _liger,
    "cut-cross-entropy": _cut("cce"),
    "cut-cross-entropy-exact": _cut("cce_exact"),
    "quack": _quack,
}


def measured_peaks() -> tuple[float, float]:
    """Copy bandwidth in bytes/s and bf16 matmul rate in FLOP/s: what a share of the peak is taken of."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy_seconds = statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(20))
    matmul_seconds = statistics.median(_seconds(lambda: a @ b) for _ in range(20))
    return 2 * source.numel() / copy_seconds, 2 * 8192**3 / matmul_seconds


def _seconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure(shape: tuple[int, int, int], num_repetitions: int, matmul_rate: float) -> list[dict[str, Any]]:
    """One row for each provider: seconds of forward with backward, memory, and the loss it found."""
    rows, hidden, vocabulary = shape
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5).requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), device="cuda")
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    results: dict[str, dict[str, Any]] = {}
    ready: dict[str, Loss] = {}
    for name, make in PROVIDERS.items():
        results[name] = {"provider": name, "shape": list(shape)}
        try:
            ready[name] = make()
            results[name] |= _memory(ready[name], x, w, target)
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            ready.pop(name, None)
            results[name]["absent"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    stop = time.monotonic() + 2.0
    while time.monotonic() < stop:
        for loss in ready.values():
            _step(loss, x, w, target)
        torch.cuda.synchronize()
    for _ in range(num_repetitions):
        for name, loss in ready.items():
            flush.zero_()
            seconds[name].append(_seconds(lambda loss=loss: _step(loss, x, w, target)))
    floor_seconds = 6 * rows * hidden * vocabulary / matmul_rate
    for name, taken in seconds.items():
        low, median, high = (statistics.quantiles(taken, n=10)[i] for i in (1, 4, 7))
        results[name] |= {"seconds_p20": low, "seconds_median": median, "seconds_p80": high}
        results[name]["share_of_floor"] = floor_seconds / median
    return list(results.values())


def _step(loss: Loss, x: Tensor, w: Tensor, target: Tensor) -> None:
    torch.autograd.grad(loss(x, w, target), (x, w))


def _memory(loss: Loss, x: Tensor, w: Tensor, target: Tensor) -> dict[str, Any]:
    _step(loss, x, w, target)
    torch.cuda.synchronize()
    base_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = loss(x, w, target)
    saved_bytes = torch.cuda.memory_allocated() - base_bytes
    torch.autograd.grad(value, (x, w))
    return {
        "loss": float(value),
        "saved_bytes": saved_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() - base_bytes,
    }


def provenance() -> dict[str, Any]:
    packages = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"device": torch.cuda.get_device_name(), "commit": commit, "versions": versions, "tag": "gpu-measured"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", type=lambda text: tuple(int(n) for n in text.split(",")))
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"gpu_kernels: needs a CUDA device, and torch {torch.__version__} finds none here; nothing was measured, "
            "nothing written. Run it on a GPU machine, with torch's CUDA build and triton.",
            file=sys.stderr,
        )
        return 2
    copy_rate, matmul_rate = measured_peaks()
    rows = [row for shape in options.shape or SHAPES for row in measure(shape, options.repetitions, matmul_rate)]
    for row in rows:
        print(_line(row))
    document = {
        "schema": "memwall.gpu-kernels/1",
        **provenance(),
        "copy_bytes_per_second": copy_rate,
        "matmul_flops_per_second": matmul_rate,
        "rows": rows,
    }
    slug = torch.cuda.get_device_name().lower().replace(" ", "-")
    output = options.output or _RESULTS / slug / "gpu_kernels.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {output}")
    return 0


def _line(row: dict[str, Any]) -> str:
    name = f"{'x'.join(map(str, row['shape'])):>20} {row['provider']:<24}"
    if "absent" in row:
        return f"{name} absent: {row['absent']}"
    return (
        f"{name} {row['seconds_median'] * 1e3:9.2f} ms {row['share_of_floor']:7.1%} of the matmul floor, "
        f"peak +{row['peak_bytes'] / _MIB:,.0f} MiB, saved {row['saved_bytes'] / _MIB:,.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
