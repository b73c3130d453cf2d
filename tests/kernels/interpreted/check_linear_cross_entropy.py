"""Run by test_interpreter.py, with TRITON_INTERPRET=1: every call below goes through the Triton kernels."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall.triton_kernels import linear_cross_entropy
from memwall.triton_kernels.linear_cross_entropy import _kernel as kernel_module
from memwall.triton_kernels.linear_cross_entropy._reference import Rows, reference_row_loss
from memwall.triton_kernels.linear_cross_entropy._terms import LossTerms

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SOURCE = Path(kernel_module.__file__)


pytestmark = pytest.mark.usefixtures("launches")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 8, 128])
def test_is_as_exact_as_torch(
    losses: Any, terms: dict[str, Any], dtype: torch.dtype, chunk_rows: int, poisoned: None
) -> None:
    for reduction in ("mean", "none"):
        p = losses.make(dtype=dtype, reduction=reduction, rows=17, how={"chunk_rows": chunk_rows}, **terms)
        losses.check(p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 64, 123, 1000, 4096, 4097, 9001])
def test_vocabularies(losses: Any, dtype: torch.dtype, vocabulary: int, poisoned: None) -> None:
    losses.check(losses.make(rows=5, vocabulary=vocabulary, dtype=dtype, label_smoothing=0.1, with_bias=True))


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows(losses: Any, ignored: str, rows: int, reduction: str, poisoned: None, launches: list[str]) -> None:
    p = losses.make(rows=rows, ignored=ignored, reduction=reduction)
    losses.check(p)
    # On the GPU ignored rows reach the kernel: on the CPU they never do.
    ignored_rows(p)
    launches.append("counted")


def ignored_rows(p: Any) -> None:
    """The kernel against the reference on a slab that has ignored rows, between guards that must survive."""
    rows, vocabulary = p.target.shape[0], p.w.shape[0]
    guarded = torch.full((rows + 2, 192), 7.0)
    found: list[torch.Tensor] = []
    for row_loss in (kernel_module.launch_row_loss, reference_row_loss):
        slab = guarded.clone()
        logits = slab[1:-1, :vocabulary]
        logits.copy_(p.x @ p.w.t())
        loss = torch.full((rows,), float("nan"))
        terms = LossTerms(-100, 0.1, 4.0, 0.5)
        row_loss(Rows(logits, p.target, torch.ones(rows), loss), terms, writes_gradient=True)
        assert torch.equal(slab[[0, -1]], guarded[[0, -1]])
        found += [loss, logits]
    for ours, reference in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    is_ignored = p.target == -100
    assert not found[0][is_ignored].any()
    assert not found[1][is_ignored].any()


@pytest.mark.parametrize("values", ["offset", "equal", "infinite", "nan", "masked", "all-masked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits(values: str, dtype: torch.dtype) -> None:
    """The kernel on logits that no product of small matrices gives, against log_softmax in fp64."""
    torch.manual_seed(0)
    slab = torch.randn(3, 5000)
    if values == "offset":
        slab += 1e4
    elif values == "equal":
        slab.fill_(3.0)
    elif values == "infinite":
        slab[1, 17] = float("inf")
    elif values == "nan":
        slab[1, 4999] = float("nan")
    elif values == "masked":
        slab[:, :4500] = float("-inf")
    else:
        slab[1] = float("-inf")
    target, size = torch.tensor([4700, 4701, 4999]), 5056
    padded = torch.full((3, size), float("nan"), dtype=dtype)
    padded[:, :5000] = slab.to(dtype)
    logits = padded[:, :5000]
    double = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(double, target, reduction="none")
    truth.sum().backward()
    loss = torch.empty(3)
    rows = Rows(logits, target, torch.ones(3), loss)
    kernel_module.launch_row_loss(rows, LossTerms(-100, 0.0, 0.0, 1.0), writes_gradient=True)
    torch.testing.assert_close(loss, truth.detach().float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert double.grad is not None
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(
        logits.double(), double.grad, rtol=tolerance, atol=max(1e-7, tolerance**2), equal_nan=True
    )


def test_target_out_of_range_is_nan_and_read_nowhere(losses: Any) -> None:
    p = losses.make(ignored="none", reduction="none", with_bias=True)
    p.target[3], p.target[9] = 1 << 40, -1
    found = losses.ours(p)
    assert found.loss.isnan().nonzero().squeeze(1).tolist() == [3, 9]
    assert found.gradients["x"].isnan().all(1).nonzero().squeeze(1).tolist() == [3, 9]


def test_inputs_are_never_written(losses: Any) -> None:
    p = losses.make(with_bias=True)
    tensors = [p.x, p.w, p.target, p.bias]
    before = [(t._version, t.clone()) for t in tensors]
    losses.ours(p)
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gradient - (1.0 - label_smoothing)", "gradient + (1.0 - label_smoothing)"),
        ("gradient -= share", "gradient += share"),
        ("((shift - origin) + log_sum) - share", "((shift - origin) + log_sum) + share"),
        ("share_of_one = 1.0 / running_sum", "share_of_one = 1.0"),
        ("gradient *= 1.0 - ratio * ratio", "gradient *= 1.0 + ratio * ratio"),
        ("tl.where(x < 0, -far, far)", "tl.where(x < 0, far, far)"),
        ("gradient *= coefficient * logit_scale", "gradient *= logit_scale"),
        ("running_sum * tl.exp2((running_max - shift)", "running_sum * tl.exp2((shift - running_max)"),
    ],
)
def test_a_kernel_with_one_sign_flipped_fails(
    losses: Any, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    p = losses.make(vocabulary=4500, rows=9, label_smoothing=0.3, softcap=2.0, logit_scale=1.5, reduction="none")
    losses.check(p)
    monkeypatch.setattr(kernel_module, "launch_row_loss", mutant(SOURCE, old, new).launch_row_loss)
    with pytest.raises(AssertionError):
        losses.check(p)


FAR_ROWS = """
import sys
import numpy as np, torch
sys.path.insert(0, sys.argv[2])
from memwall.triton_kernels.linear_cross_entropy._reference import Rows
from memwall.triton_kernels.linear_cross_entropy._terms import LossTerms
import importlib.util
spec = importlib.util.spec_from_file_location("memwall.triton_kernels.linear_cross_entropy._far", sys.argv[1])
module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
stride, vocabulary = 1 << 30, 100
memory = np.memmap(sys.argv[2] + "/slab", dtype=np.float16, mode="w+", shape=(3 * stride + 4096,))
logits = torch.from_numpy(memory).as_strided((4, vocabulary), (stride, 1))
logits.copy_(torch.arange(400.0).reshape(4, 100) % 7)
expected = torch.nn.functional.cross_entropy(logits.float(), torch.arange(4), reduction="none")
loss = torch.empty(4)
rows = Rows(logits, torch.arange(4), torch.ones(4), loss)
module.launch_row_loss(rows, LossTerms(-100, 0.0, 0.0, 1.0), writes_gradient=True)
assert torch.allclose(loss, expected), (loss, expected)
assert abs(float(logits[3].float().sum())) < 1e-2
"""


@pytest.mark.parametrize(
    ("old", "status"), [(".to(tl.int64)\n    logits_ptr +=", -11), ("", 0)], ids=["int32", "int64"]
)
def test_rows_beyond_two_to_the_31_elements(tmp_path: Path, old: str, status: int, launches: list[str]) -> None:
    """A sparse file of 6 GiB; the same kernel with 32-bit program ids dies."""
    text = SOURCE.read_text()
    assert text.count(old) == 1 or not old
    path = tmp_path / "far.py"
    path.write_text(text.replace(old, "\n    logits_ptr +=") if old else text)
    command = [sys.executable, "-c", FAR_ROWS, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    launches.append("in the child")


def test_forward_alone(losses: Any) -> None:
    p = losses.make(reduction="mean")
    expected = losses.truth(p).loss
    found = linear_cross_entropy(p.x, p.w, p.target, chunk_rows=8)
    assert abs(found - expected) < 1e-5


def test_frozen_head(losses: Any) -> None:
    losses.check(losses.make(), frozen=("w",))
    losses.check(replace(losses.make(), options={"reduction": "none"}), frozen=("w",))
