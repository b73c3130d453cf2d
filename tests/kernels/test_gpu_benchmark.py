"""`make gpu-kernels` where there is no GPU: it lists what it would measure, says why not, and writes nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    losses = {"linear_cross_entropy", "softmax_cross_entropy"}
    elements = {"swiglu", "geglu", "rope", "dropout", "pack-int8", "pack-fp8"}
    assert listed == losses | elements | {"rms_norm", "add_rms_norm", "layer_norm", "adamw"}


def test_a_shape_of_another_operation_is_named() -> None:
    done = run("--op", "swiglu", "--shape", "8,16,32")
    assert done.returncode == 2
    assert "has as many numbers as the operation's own" in done.stderr


def test_eager_providers_and_ours_agree_on_the_cpu(operation: Any) -> None:
    """What is compared there is the same mathematics; two shared dimensions tell every operation's tensors."""
    import torch
    import torch.nn.functional as F
    from gpu_kernels_cases import CASES

    from memwall.triton_kernels import dropout

    torch.manual_seed(0)
    vectors = {"swiglu": 0, "geglu": 0, "rms_norm": 1, "add_rms_norm": 1, "layer_norm": 2}
    for name, num_vectors in vectors.items():
        case = CASES[name]
        num_matrices = 1 if name in ("rms_norm", "layer_norm") else 2
        tensors = [*torch.randn(num_matrices, 5, 64), *torch.randn(num_vectors, 64)]
        operation(case.providers["memwall"](), case.eager).check(*tensors)
    rotation, tables = CASES["rope"], torch.randn(2, 5, 64)
    ours = rotation.providers["memwall"]()
    operation(lambda x: ours(x, *tables), lambda x: rotation.eager(x, *tables)).check(torch.randn(5, 256))
    dropping, mask = CASES["dropout"], dropout(torch.ones(5 * 64), 0.1, seed=1) > 0.0
    dropping_ours = dropping.providers["memwall"]()
    operation(lambda *ts: dropping_ours(*ts, mask), lambda *ts: dropping.eager(*ts, mask)).check(*torch.randn(2, 5, 64))
    for form in ("int8", "fp8"):
        packing, x = CASES[f"pack-{form}"], torch.randn(5, 256)
        torch.testing.assert_close(packing.providers["memwall"]()(x), packing.eager(x), rtol=1e-5, atol=1e-6)
    loss, target = CASES["softmax_cross_entropy"], torch.randint(0, 64, (5,))
    loss_ours = loss.providers["memwall"]()
    operation(lambda x: loss_ours(x, target), lambda x: F.cross_entropy(x, target)).check(torch.randn(5, 64))


@pytest.mark.parametrize("name", ["memwall", "memwall-clipped", "memwall-8bit-stochastic-clipped"])
def test_optimizers_agree_on_the_cpu(name: str) -> None:
    """One step of each from the same parameters: what rounding to bf16 leaves."""
    import torch
    from gpu_kernels_adamw import OPTIMIZER_CASES, model_parameters

    torch.manual_seed(0)
    start = model_parameters(64, 1)
    found = []
    for provider in (name, "torch-foreach-clipped" if name.endswith("clipped") else "torch-foreach"):
        params = [p.detach().clone() for p in start]
        for p, q in zip(params, start, strict=True):
            p.grad = q.grad.clone()
        OPTIMIZER_CASES["adamw"].providers[provider](params)()
        found.append(params)
    for ours, plain, before in zip(*found, start, strict=True):
        assert (ours - plain).abs().max() <= 2 * 2.0**-7 * before.abs().max()
        assert not torch.equal(ours, before)
