"""`make gpu-kernels` where there is no GPU: it lists what it would measure, says why not, and writes nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.benchmark


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "benchmarks/gpu_kernels.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = run("--op", "swiglu", "--output", str(output))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs a CUDA device" in done.stderr
    assert "nothing was measured, nothing written" in done.stderr
    assert not output.exists()


@pytest.mark.slow
def test_lists_every_operation_with_shapes_and_providers() -> None:
    done = run("--list")
    assert done.returncode == 0
    assert "rms_norm: 32768x1024, 8192x4096, 8192x8192, 2048x32768\n    memwall, eager" in done.stdout
    listed = {line.partition(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")}
    elements = {"swiglu", "geglu", "pack"}
    others = {"linear_cross_entropy", "rms_norm", "adamw", "llama_layers"}
    assert listed == elements | others


@pytest.mark.slow
def test_a_shape_of_another_operation_is_named() -> None:
    done = run("--op", "swiglu", "--shape", "8,16,32")
    assert done.returncode == 2
    assert "has as many numbers as the operation's own" in done.stderr


def test_eager_providers_and_ours_agree_on_the_cpu(operation: Any) -> None:
    """What is compared there is the same mathematics; two shared dimensions tell every operation's tensors."""
    import torch
    from gpu_kernels_cases import CASES

    torch.manual_seed(0)
    vectors = {"swiglu": 0, "geglu": 0, "rms_norm": 1}
    for name, num_vectors in vectors.items():
        case = CASES[name]
        num_matrices = 1 if name == "rms_norm" else 2
        tensors = [*torch.randn(num_matrices, 5, 64), *torch.randn(num_vectors, 64)]
        operation(case.providers["memwall"](), case.eager).check(*tensors)
    packing, x = CASES["pack"], torch.randn(5, 256)
    torch.testing.assert_close(packing.providers["memwall"]()(x), packing.eager(x), rtol=1e-5, atol=1e-6)


FIGURES = ("forward_share_of_floor", "backward_share_of_floor", "step_share_of_floor", "step_seconds_median")


def a_row(op: str, provider: str, *shape: int, **figures: float) -> dict[str, Any]:
    row = {"op": op, "provider": provider, "shape": list(shape), "saved_bytes": 1e9, "peak_bytes": 1e9}
    return row | dict.fromkeys(FIGURES, 1.0) | figures


def test_the_page_says_what_the_results_say() -> None:
    from gpu_kernels_goals import README, measured, section, with_section

    page = README.read_text()
    assert with_section(page, section(measured())) == page


def test_a_goal_without_a_row_is_not_measured_and_others_are_met_or_missed() -> None:
    """The worst shape counts, and a library that is not there answers nothing."""
    from gpu_kernels_goals import GOALS, section

    assert section([]).count("| not measured |") == len(GOALS)
    head, mib = (8192, 4096, 128_256), 1 << 20
    rows = [
        *(a_row(op, "memwall", 8192, 4096, forward_share_of_floor=0.9) for op in ("swiglu", "geglu")),
        a_row("rms_norm", "memwall", 8192, 4096, forward_share_of_floor=0.95),
        a_row("rms_norm", "memwall", 8192, 8192, forward_share_of_floor=0.7),
        a_row("linear_cross_entropy", "memwall-2048", *head, step_share_of_floor=0.93, peak_bytes=3135 * mib),
        a_row("linear_cross_entropy", "memwall-256", *head, step_seconds_median=0.05, peak_bytes=3135 * mib),
        {"op": "linear_cross_entropy", "provider": "liger", "shape": head, "absent": "No module named 'liger_kernel'"},
        a_row("llama_layers", "memwall", 8192, 4096, 4, saved_bytes=7.2e8),
        a_row("llama_layers", "liger", 8192, 4096, 4, saved_bytes=1e9),
    ]
    document = {"device": "NVIDIA H200", "commit": "0123456789abcdef", "rows": rows}
    cells = [line.split(" | ")[-1].removesuffix(" |") for line in section([document]).splitlines()[2 : 2 + len(GOALS)]]
    assert "| NVIDIA H200, commit 0123456789ab |" in section([document])
    assert cells[0] == "70.0%, **missed**"
    assert cells[2] == "93.0%, met"
    assert cells[3] == "not measured"
    assert cells[5] == "0.0%, met"
    assert cells[7] == "not measured"
    assert cells[-2:] == ["72.0%, met", "100.0%, met"]


@pytest.mark.requires("transformers")
def test_a_stack_of_layers_is_the_same_whoever_computes_it() -> None:
    import torch
    from gpu_kernels_layers import LAYER_CASES

    torch.manual_seed(0)
    case = LAYER_CASES["llama_layers"]
    leaves = case.make(12, 64, 2)
    assert len(leaves) == 1 + 2 * 9 + 1
    results = []
    for name in ("eager", "memwall"):
        states = case.providers[name]()(*leaves)
        results.append((states, *torch.autograd.grad(states, leaves, torch.ones_like(states))))
    for ours, own in zip(*results, strict=True):
        assert (ours - own).norm() <= 2e-2 * own.norm()


def test_optimizers_agree_on_the_cpu() -> None:
    """One step of each from the same parameters: what rounding to bf16 leaves."""
    import torch
    from gpu_kernels_adamw import OPTIMIZER_CASES, model_parameters

    torch.manual_seed(0)
    start = model_parameters(64, 1)
    found = []
    for provider in ("memwall-8bit", "torch-foreach"):
        params = [p.detach().clone() for p in start]
        for p, q in zip(params, start, strict=True):
            p.grad = q.grad.clone()
        OPTIMIZER_CASES["adamw"].providers[provider](params)()
        found.append(params)
    for ours, plain, before in zip(*found, start, strict=True):
        assert (ours - plain).abs().max() <= 2 * 2.0**-7 * before.abs().max()
        assert not torch.equal(ours, before)
