"""The optimizer's part of gpu_kernels.py: a step of AdamW over a model's parameters, by everybody who can do it."""

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memwall.triton_kernels.adamw_8bit import adamw_8bit_, new_moments

Step = Callable[[], Any]
_LR = 1e-3


@dataclass(frozen=True)
class OptimizerCase:
    """Models by hidden size and number of layers, and for each provider what makes its step."""

    shapes: tuple[tuple[int, ...], ...]
    providers: dict[str, Callable[[list[Tensor]], Step]]


def model_parameters(hidden: int, num_layers: int) -> list[Tensor]:
    """Of layers like Llama's: two norms, attention with a quarter of the keys, an MLP 3.5 times as wide; in bf16."""
    layer = [(hidden,), (hidden, hidden), (hidden // 4, hidden), (hidden // 4, hidden), (hidden, hidden), (hidden,)]
    layer += [(7 * hidden // 2, hidden), (7 * hidden // 2, hidden), (hidden, 7 * hidden // 2)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(num_layers) for shape in layer]
    for p in found:
        p.requires_grad_()
        p.grad = torch.randn_like(p)
    return found


def _ours(params: list[Tensor]) -> Step:
    moments, number = [new_moments(p) for p in params], count(1)

    def step() -> None:
        now = next(number)
        for p, own in zip(params, moments, strict=True):
            assert p.grad is not None
            adamw_8bit_(p, p.grad, own, step=now, lr=_LR)

    return step


def _torchs(**options: Any) -> Callable[[list[Tensor]], Step]:
    return lambda params: torch.optim.AdamW(params, lr=_LR, **options).step


def _imported(module: str, name: str, **options: Any) -> Callable[[list[Tensor]], Step]:
    def make(params: list[Tensor]) -> Step:
        step: Step = getattr(importlib.import_module(module), name)(params, lr=_LR, **options).step
        return step

    return make


OPTIMIZER_CASES = {
    "adamw": OptimizerCase(
        # 1.7e9 and 0.43e9 elements in 72 tensors each.
        shapes=((4096, 8), (2048, 8)),
        providers={
            "memwall-8bit": _ours,
            "torch-foreach": _torchs(foreach=True),
            "torch-fused": _torchs(fused=True),
            "torchao-8bit": _imported("torchao.optim", "AdamW8bit"),
            "torchao-8bit-stochastic": _imported("torchao.optim", "AdamW8bit", bf16_stochastic_round=True),
            "flashoptim-24bit": _imported("flashoptim", "FlashAdamW"),
            "flashoptim-16bit": _imported("flashoptim", "FlashAdamW", master_weight_bits=None),
            "bitsandbytes-8bit": _imported("bitsandbytes.optim", "AdamW8bit"),
        },
    )
}


def measure_steps(
    case: OptimizerCase, shape: tuple[int, ...], num_repetitions: int, seconds_of: Callable[[Step], float], copy: float
) -> list[dict[str, Any]]:
    """One row for each provider: seconds of a step, bytes of its state and at its peak, error of the first step.

    Args:
        case: the optimizers.
        shape: hidden size and layers.
        num_repetitions: steps of each that are timed, taking turns.
        seconds_of: times one call on the device.
        copy: measured copy bandwidth, bytes/s.
    """
    results: dict[str, dict[str, Any]] = {}
    ready: dict[str, Step] = {}
    start = model_parameters(*shape)
    truth = _after_one_step(_torchs(foreach=False), start, torch.float32)
    for name, make in case.providers.items():
        results[name] = {"provider": name, "shape": list(shape)}
        try:
            params = _copied(start, torch.bfloat16)
            torch.cuda.synchronize()
            base_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step = make(params)
            step()
            torch.cuda.synchronize()
            saved_bytes = torch.cuda.memory_allocated() - base_bytes
            peak_bytes = torch.cuda.max_memory_allocated() - base_bytes
            results[name] |= {"saved_bytes": saved_bytes, "peak_bytes": peak_bytes}
            # Parameters are rounded to bf16 here, and that is most of the error of all.
            results[name]["error"] = _error(params, truth)
            ready[name] = step
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            results[name]["absent"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    reference = results["torch-foreach"]
    for row in results.values():
        if "error" in row and "error" in reference:
            row["error_ratio"] = row["error"] / reference["error"]
    taken: dict[str, list[float]] = {name: [] for name in ready}
    for repetition in range(num_repetitions + 5):
        for name, step in ready.items():
            seconds = seconds_of(step)
            if repetition >= 5:
                taken[name].append(seconds)
    num_elements = sum(p.numel() for p in start)
    for name, values in taken.items():
        low, median, high = (statistics.quantiles(values, n=10)[i] for i in (1, 4, 7))
        floor = _bytes_moved(name, num_elements) / copy
        found = {"step_seconds_p20": low, "step_seconds_median": median, "step_seconds_p80": high}
        results[name] |= {**found, "step_share_of_floor": floor / median}
    return list(results.values())


def _bytes_moved(name: str, num_elements: int) -> int:
    """At least: parameter read and written, gradient read, and both moments read and written, in bf16 or 8 bits."""
    moment_bytes = 1 + 4 / 256 if "8bit" in name or "flash" in name else 2
    return int((6 + 4 * moment_bytes) * num_elements)


def _copied(params: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    found = []
    for p in params:
        q = p.detach().to(dtype, copy=True).requires_grad_()
        q.grad = None if p.grad is None else p.grad.to(dtype, copy=True)
        found.append(q)
    return found


def _after_one_step(make: Callable[[list[Tensor]], Step], start: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    params = _copied(start, dtype)
    make(params)()
    return [p.detach() for p in params]


def _error(params: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative error of a parameter, root mean square."""
    return max(float((p.detach().float() - true).norm() / true.norm()) for p, true in zip(params, truth, strict=True))


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{row['op']:>20} {'x'.join(map(str, row['shape'])):>20} {row['provider']:<32}"
    if "absent" in row:
        return f"{name} absent: {row['absent']}"
    return (
        f"{name} {row['step_seconds_median'] * 1e3:8.3f} ms, {row['step_share_of_floor']:6.1%} of the floor, state "
        f"{row['saved_bytes'] / (1 << 20):,.0f} MiB, peak +{row['peak_bytes'] / (1 << 20):,.0f} MiB, error "
        f"{row['error_ratio']:.2f}x foreach's"
    )
