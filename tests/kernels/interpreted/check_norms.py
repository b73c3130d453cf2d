"""Run by test_interpreter.py, with TRITON_INTERPRET=1: norm kernels that are wrong in one place must be caught."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.triton_kernels import rms_norm
from memwall.triton_kernels.norms import _backward_kernel as backward_module
from memwall.triton_kernels.norms import _kernel as forward_module

FORWARD, BACKWARD = Path(forward_module.__file__), Path(backward_module.__file__)


def check(operation: Any) -> None:
    """All branches: rows that fit and rows that do not, with an offset of the weight, a rounding."""
    torch.manual_seed(0)

    def gemma(x: Tensor, w: Tensor) -> Tensor:
        return (F.rms_norm(x, x.shape[-1:], None, 1e-6) * (1.0 + w)).to(x.dtype)

    for columns in (300, 9000):
        x = torch.randn(5, columns)
        w = torch.randn(columns)
        operation(lambda *ts: rms_norm(*ts, casting="gemma"), gemma).check(x, w)
    x, w = torch.randn(64, 300).half(), torch.randn(300).half()
    exact = F.rms_norm(x.float(), (300,), None, 1e-6).half() * w
    assert (rms_norm(x, w) == exact).float().mean() > 0.99


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (FORWARD, "result = rounded(values * rstd, ROUNDED_TO, INTERPRETED)", "result = values * rstd"),
        (FORWARD, ".to(tl.float32) + weight_offset", ".to(tl.float32) - weight_offset"),
        (FORWARD, "total += tl.sum(values * values, 0)", "total = tl.sum(values * values, 0)"),
        (FORWARD, "rstd = tl.rsqrt(total / size + eps)", "rstd = tl.rsqrt(total / size + 0.1)"),
        (BACKWARD, "grad - normalised * (along / size)", "grad + normalised * (along / size)"),
        (BACKWARD, "weight_sum += grad * rounded", "weight_sum = grad * rounded"),
        (BACKWARD, "along += grad * _normalised", "along = grad * _normalised"),
        (BACKWARD, "end = tl.minimum(begin + rows_per_program, num_rows)", "end = begin + rows_per_program - 1"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(
    operation: Any, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, path: Path, old: str, new: str
) -> None:
    wrong, right = mutant(path, old, new), forward_module if path == FORWARD else backward_module
    for name in ("launch_norm", "launch_norm_backward"):
        if hasattr(right, name):
            monkeypatch.setattr(right, name, getattr(wrong, name))
    with pytest.raises(AssertionError):
        check(operation)


def test_the_kernels_as_they_are_pass(operation: Any, poisoned: None) -> None:
    check(operation)


def test_a_kernel_that_writes_its_input_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's norms wrote their gradient over the upstream one."""
    wrong = mutant(BACKWARD, "store_rounded(grad_x_ptr + row", "store_rounded(grad_ptr + row")
    x, upstream = torch.randn(5, 40, requires_grad=True), torch.randn(5, 40)
    before = upstream.clone()
    rms_norm(x).backward(upstream)
    assert torch.equal(upstream, before)
    monkeypatch.setattr(backward_module, "launch_norm_backward", wrong.launch_norm_backward)
    rms_norm(x).backward(upstream)
    assert not torch.equal(upstream, before)


FAR_ROWS = """
import sys
import numpy as np, torch
import importlib.util
from memwall.triton_kernels.norms._terms import NormTerms
def load(path, name):
    spec = importlib.util.spec_from_file_location("memwall.triton_kernels.norms." + name, path)
    module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
    return module
forward, backward = load(sys.argv[1], "_far_forward"), load(sys.argv[2], "_far_backward")
stride, columns = 1 << 30, 100
memory = np.memmap(sys.argv[3] + "/rows", dtype=np.float16, mode="w+", shape=(3 * stride + 4096,))
x = torch.from_numpy(memory).as_strided((4, columns), (stride, 1))
x.copy_(torch.arange(400.0).reshape(4, 100) % 7 - 3)
terms, empty, rstd = NormTerms(1e-6, "plain"), torch.empty(0), torch.empty(4)
y, grad, weight = (torch.empty(4, columns) for _ in range(3))
expected = torch.nn.functional.rms_norm(x.float(), (columns,), None, 1e-6)
if sys.argv[4] == "forward":
    forward.launch_norm(x, None, y, rstd, terms)
    assert torch.allclose(y, expected, atol=1e-6), y
else:
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
if sys.argv[4] == "backward":
    backward.launch_norm_backward(torch.ones(4, columns), x, None, rstd, grad, empty, terms)
    assert grad.isfinite().all()
"""


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("narrow", "status"), [(True, -11), (False, 0)], ids=["int32", "int64"])
def test_rows_beyond_two_to_the_31_elements(tmp_path: Path, direction: str, narrow: bool, status: int) -> None:
    """A sparse file of 6 GiB; the same kernels with 32-bit program ids die."""
    paths = []
    for number, source in enumerate((FORWARD, BACKWARD)):
        text = source.read_text()
        assert text.count("tl.program_id(0).to(tl.int64)") == (1 if source == FORWARD else 2)
        path = tmp_path / f"far{number}.py"
        if narrow:
            text = text.replace("tl.program_id(0).to(tl.int64)", "tl.program_id(0)").replace(
                "tl.cast(index, tl.int64)", "index"
            )
        path.write_text(text)
        paths.append(str(path))
    command = [sys.executable, "-c", FAR_ROWS, *paths, str(tmp_path), direction]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
