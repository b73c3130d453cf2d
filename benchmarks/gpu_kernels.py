"""The fused kernels against what a user would otherwise run, on this machine's GPU; without one it refuses.

    python benchmarks/gpu_kernels.py [--list] [--op NAME ...] [--shape N,N,... ...] [--repetitions N] [--seconds N]
        [--output FILE]

Providers take turns in one process on the same tensors, with the L2 cache flushed and work queued before each launch.
Before anything is timed each one must agree with fp32. Prints a table and writes JSON. A provider that is missing is
recorded as absent, with the reason; an operation that breaks is named, and the rest runs. What an earlier result for
the same device, commit and versions has is kept, so that a second call goes on. `--tiny` is there to see that nothing
breaks: small tensors, few repetitions. `--list` shows operations, shapes and providers, and needs no GPU.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_device import device_name, has_device, slug_of, tag
from gpu_kernels_adamw import OPTIMIZER_CASES, line_of, measure_steps
from gpu_kernels_cases import CASES as OPERATION_CASES
from gpu_kernels_cases import Case, Run
from gpu_kernels_layers import LAYER_CASES
from revision import git
from torch import Tensor

_RESULTS = Path(__file__).parent / "results"
CASES = {**OPERATION_CASES, **LAYER_CASES}
_EVERYTHING = {**CASES, **OPTIMIZER_CASES}
_FLUSH_BYTES = 256 << 20
_PROBE_WIDTH = 8192
_TINY = {"rms_norm": (16, 256), "adamw": (64, 1)}
"""Operations and shapes of a run that only shows that nothing breaks."""
_QUEUED_CYCLES = 1_000_000  # about half a millisecond, in which the host gets ahead
_MAX_ERROR_RATIO = 2.0
_MIB = 1 << 20


class _Consumer(torch.autograd.Function):
    """A layer that saves its input, as a linear one does, and costs nothing."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return grad


def measured_peaks(width: int = _PROBE_WIDTH) -> tuple[float, float]:
    """Copy bandwidth in bytes/s and bf16 matmul rate in FLOP/s: what a share of the peak is taken of."""
    source = torch.empty(16 * width**2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy_seconds = statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(20))
    matmul_seconds = statistics.median(_seconds(lambda: a @ b) for _ in range(20))
    return 2 * source.numel() / copy_seconds, 2 * width**3 / matmul_seconds


def _seconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_QUEUED_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _forward(run: Run, tensors: tuple[Tensor, ...]) -> Tensor:
    return _Consumer.apply(run(*tensors))


def _leaves(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def measure(
    case: Case,
    shape: tuple[int, ...],
    num_repetitions: int,
    rates: tuple[float, float],
    flush_bytes: int = _FLUSH_BYTES,
    warm_seconds: float = 2.0,
) -> list[dict[str, Any]]:
    """One row for each provider: seconds of forward and backward, memory, and how exact it is."""
    torch.manual_seed(0)
    tensors = case.make(*shape)
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")
    results: dict[str, dict[str, Any]] = {}
    ready: dict[str, Run] = {}
    wide = tuple(t.detach().float().requires_grad_() if t.requires_grad else t for t in tensors)
    truth = _outcome("eager", case.eager, wide)
    allowed = _error(_outcome("eager", case.eager, tensors), truth)
    for name, make in case.providers.items():
        results[name] = {"provider": name, "shape": list(shape)}
        try:
            run = make()
            results[name]["error_ratio"] = _error(_outcome(name, run, tensors), truth) / allowed
            results[name] |= _memory(case, name, run, tensors)
            ready[name] = run
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            results[name]["absent"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    del truth, wide
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    stop = time.monotonic() + warm_seconds
    while time.monotonic() < stop:
        for name, run in ready.items():
            _step(name, run, tensors, flush)
        torch.cuda.synchronize()
    for _ in range(num_repetitions):
        for name, run in ready.items():
            taken[name].append(_step(name, run, tensors, flush))
    for name, seconds in taken.items():
        results[name] |= _times(case, shape, seconds, rates)
    return list(results.values())


def _measured(
    name: str, shape: tuple[int, ...], num_repetitions: int, rates: tuple[float, float], *, is_tiny: bool
) -> list[dict[str, Any]]:
    if name not in CASES:
        return measure_steps(OPTIMIZER_CASES[name], shape, num_repetitions, _seconds, rates[0])
    return measure(CASES[name], shape, num_repetitions, rates, *((1 << 20, 0.1) if is_tiny else ()))


def _step(name: str, run: Run, tensors: tuple[Tensor, ...], flush: Tensor) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    values: list[Tensor] = []
    flush.zero_()
    forward = _seconds(lambda: values.append(_forward(run, tensors)))
    upstream = torch.ones_like(values[0])
    flush.zero_()
    return forward, _seconds(lambda: torch.autograd.grad(values[0], _leaves(tensors), upstream))


def _times(
    case: Case, shape: tuple[int, ...], seconds: list[tuple[float, float]], rates: tuple[float, float]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    parts = {
        "forward": [f for f, _ in seconds],
        "backward": [b for _, b in seconds],
        "step": [f + b for f, b in seconds],
    }
    for name, values in parts.items():
        low, median, high = (statistics.quantiles(values, n=10)[i] for i in (1, 4, 7))
        found |= {f"{name}_seconds_p20": low, f"{name}_seconds_median": median, f"{name}_seconds_p80": high}
    if case.elements_moved is None:
        assert case.matmul_flops is not None
        floors = {"step": case.matmul_flops(*shape) / rates[1]}
    else:
        forward, backward = (2 * shape[0] * shape[1] * count / rates[0] for count in case.elements_moved)
        floors = {"forward": forward, "backward": backward, "step": forward + backward}
    return found | {f"{name}_share_of_floor": floor / found[f"{name}_seconds_median"] for name, floor in floors.items()}


def _outcome(name: str, run: Run, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    value = _forward(run, tensors)
    upstream = torch.linspace(0.5, 1.5, value.numel(), device=value.device).reshape(value.shape).to(value.dtype)
    return [value.detach(), *torch.autograd.grad(value, _leaves(tensors), upstream)]


def _error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative error of result and gradients, root mean square."""
    return max(
        float((ours.float() - true.float()).norm() / true.float().norm())
        for ours, true in zip(found, truth, strict=True)
    )


def _memory(case: Case, name: str, run: Run, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """Bytes held from forward to backward, and at the peak; activations count where something keeps them."""
    _outcome(name, run, tensors)
    torch.cuda.synchronize()
    base_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    inside = tensors
    if case.elements_moved is not None:
        inside = tuple(tensor * 1.0 if tensor.dim() > 1 else tensor for tensor in tensors)
    value = _forward(run, inside)
    del inside
    # The result itself lives on only where something kept it.
    total = value.sum()
    del value
    saved_bytes = torch.cuda.memory_allocated() - base_bytes
    torch.autograd.grad(total, _leaves(tensors))
    return {"saved_bytes": saved_bytes, "peak_bytes": torch.cuda.max_memory_allocated() - base_bytes}


def provenance() -> dict[str, Any]:
    packages = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels")
    packages += ("torchao", "flashoptim", "bitsandbytes")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {"device": device_name(), "commit": git("rev-parse", "HEAD"), "versions": versions, "tag": tag()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="operations, shapes and providers")
    parser.add_argument("--op", action="append", choices=tuple(_EVERYTHING), help="default: all")
    parser.add_argument("--shape", action="append", type=lambda text: tuple(int(n) for n in text.split(",")))
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing further after so long")
    parser.add_argument("--tiny", action="store_true", help="small tensors, few repetitions")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    names = options.op or list(_EVERYTHING)
    if options.shape and any(
        len(shape) != len(_EVERYTHING[name].shapes[0]) for shape in options.shape for name in names
    ):
        parser.error(f"--shape has as many numbers as the operation's own: see --list; asked for {', '.join(names)}")
    if options.list:
        for name in names:
            shapes = ", ".join("x".join(map(str, shape)) for shape in _EVERYTHING[name].shapes)
            print(f"{name}: {shapes}\n    {', '.join(_EVERYTHING[name].providers)}")
        return 0
    if not has_device("gpu_kernels"):
        return 2
    stop = time.monotonic() + options.seconds
    if options.tiny:
        wanted, num_repetitions = list(_TINY.items()), 3
    else:
        wanted = [(name, shape) for name in names for shape in options.shape or _EVERYTHING[name].shapes]
        num_repetitions = options.repetitions
    output = options.output or _RESULTS / slug_of(device_name()) / "gpu_kernels.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"schema": "memwall.gpu-kernels/2", **provenance(), "failures": [], "missed": []}
    rows = _earlier_rows(output, document)
    done = {(row["op"], tuple(row["shape"])) for row in rows}
    rates = measured_peaks(*([256] if options.tiny else []))
    document |= {"copy_bytes_per_second": rates[0], "matmul_flops_per_second": rates[1]}
    left = [case for case in wanted if case not in done]
    while left and time.monotonic() < stop:
        name, shape = left.pop(0)
        try:
            found = [
                {"op": name, **row} for row in _measured(name, shape, num_repetitions, rates, is_tiny=options.tiny)
            ]
        except Exception as error:
            document["failures"].append(f"{name} {shape}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        finally:
            torch.cuda.empty_cache()
        for row in found:
            print(line_of(row) if name in OPTIMIZER_CASES else _line(row), flush=True)
        rows += found
        _write(output, document, rows, left)
    _write(output, document, rows, left)
    print(f"wrote {output}; {'; '.join(document['failures'] + document['missed']) or 'every kernel is exact'}")
    return 1 if document["failures"] or document["missed"] else 0


def _write(output: Path, document: dict[str, Any], rows: list[dict[str, Any]], left: list[Any]) -> None:
    """Writes the result so far, what is inexact in it, and what it does not have."""
    document["not_reached"] = [f"{name} {'x'.join(map(str, shape))}" for name, shape in left]
    document["missed"] = [
        f"{row['op']} {row['shape']}: {row['provider']}'s error is {row['error_ratio']:.1f} times eager's"
        for row in rows
        if row["provider"].startswith("memwall") and not row.get("error_ratio", 0) <= _MAX_ERROR_RATIO
    ]
    output.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n")


def _earlier_rows(path: Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier result that still stand: same device, commit and versions."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    same = all(earlier.get(key) == document[key] for key in ("schema", "commit", "device", "versions"))
    return list(earlier["rows"]) if same else []


def _line(row: dict[str, Any]) -> str:
    name = f"{row['op']:>20} {'x'.join(map(str, row['shape'])):>20} {row['provider']:<24}"
    if "absent" in row:
        return f"{name} absent: {row['absent']}"
    return (
        f"{name} {row['forward_seconds_median'] * 1e3:8.3f} + {row['backward_seconds_median'] * 1e3:8.3f} ms, "
        f"{row['step_share_of_floor']:6.1%} of the floor, peak +{row['peak_bytes'] / _MIB:,.0f} MiB, "
        f"saved {row['saved_bytes'] / _MIB:,.0f} MiB, error {row['error_ratio']:.2f}x eager's"
    )


if __name__ == "__main__":
    sys.exit(main())
