"""`make gpu-kernels` where there is no GPU: it lists what it would measure, says why not, and writes nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


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


def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = run("--op", "swiglu", "--output", str(output))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs a CUDA device" in done.stderr
    assert "nothing was measured, nothing written" in done.stderr
    assert not output.exists()


def test_lists_every_operation_with_shapes_and_providers() -> None:
    done = run("--list")
    assert done.returncode == 0
    assert "rms_norm: 32768x1024, 8192x4096, 8192x8192, 2048x32768\n    memwall, memwall-rebuilt, eager" in done.stdout
    listed = {line.partition(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert listed == {"linear_cross_entropy", "swiglu", "geglu", "rms_norm", "add_rms_norm", "layer_norm"}


def test_a_shape_of_another_operation_is_named() -> None:
    done = run("--op", "swiglu", "--shape", "8,16,32")
    assert done.returncode == 2
    assert "has as many numbers as the operation's own" in done.stderr


def test_eager_providers_and_ours_agree_on_the_cpu(operation: Any) -> None:
    """What is compared there is the same mathematics; two shared dimensions tell every operation's tensors."""
    import torch
    from gpu_kernels_cases import CASES

    torch.manual_seed(0)
    vectors = {"swiglu": 0, "geglu": 0, "rms_norm": 1, "add_rms_norm": 1, "layer_norm": 2}
    for name, num_vectors in vectors.items():
        case = CASES[name]
        num_matrices = 1 if name in ("rms_norm", "layer_norm") else 2
        tensors = [*torch.randn(num_matrices, 5, 64), *torch.randn(num_vectors, 64)]
        operation(case.providers["memwall"](), case.eager).check(*tensors)
