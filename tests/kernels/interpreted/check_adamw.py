"""Run by test_interpreter.py, with TRITON_INTERPRET=1: `FusedAdamW`'s kernels give the CPU path's bits, no others."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.triton_kernels import FusedAdamW
from memwall.triton_kernels.adamw import _kernel as kernel_module
from memwall.triton_kernels.adamw import _ops as ops_module
from memwall.triton_kernels.adamw._kernel import launch_adamw, launch_square_sum
from memwall.triton_kernels.adamw._reference import reference_adamw, reference_square_sum
from memwall.triton_kernels.adamw._state import new_state
from memwall.triton_kernels.adamw._terms import Moments

SOURCE = Path(kernel_module.__file__)
# One block and a part of one, several programs, sizes that are multiples of 16 and not; the last are quantised alone.
SMALL = [(7,), (16, 16), (1,), (0,), (3, 1111)]
LARGE = [(17, 241), (2, 8200), (64, 64)]
NAMES = ("exp_avg", "exp_avg_sq", "exp_avg_unit", "exp_avg_sq_unit")
Arguments = tuple[list[Tensor], list[Tensor], Moments, Tensor, list[int], int | None]


def arguments(
    dtype: torch.dtype, grad_dtype: torch.dtype, shapes: list[tuple[int, ...]], bits: Any, seed: int | None
) -> Arguments:
    """Of a step from state that several steps have left, with values of many sizes, zeros, infinity and NaN."""
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    states = [new_state(p, bits) for p in params]
    moments = Moments(*([state[name] for state in states if name in state] for name in NAMES))
    scalars = torch.empty(len(shapes), 9)
    for step in range(3):
        grads = [(torch.randn(shape) ** 5).to(grad_dtype) for shape in shapes]
        for grad in grads:
            grad.view(-1)[::9] = 0.0
        for row in range(len(shapes)):
            values = [0.7 + row, 0.99, 0.1, 0.999, 0.001, 0.01 * (row + 1), 3.0 / (step + 1), 1e-8, step + 2.0**23]
            scalars[row] = torch.tensor(values)
        if step < 2:
            reference_adamw(params, grads, moments, scalars, list(range(len(shapes))), seed)
    if grads[-1].numel() > 1000:
        grads[-1].view(-1)[900], grads[-1].view(-1)[20] = torch.nan, torch.inf
    return params, grads, moments, scalars, list(range(3, 3 + len(shapes))), seed


def copied(found: Arguments) -> Arguments:
    params, grads, moments, *others = found
    return [p.clone() for p in params], grads, Moments(*([t.clone() for t in ts] for ts in moments)), *others  # type: ignore[return-value]


def assert_same_bits(launch: Callable[..., None], found: Arguments) -> None:
    """Of parameters and moments, by the kernel and by the reference."""
    ours, expected = copied(found), copied(found)
    launch(*ours)
    reference_adamw(*expected)
    for name, mine, theirs in (("param", ours[0], expected[0]), *zip(NAMES, ours[2], expected[2], strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.isnan(), b.isnan()), name
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), name


@pytest.mark.parametrize("seed", [None, 0, (1 << 62) + 5], ids=["nearest", "seed-0", "long-seed"])
@pytest.mark.parametrize("kind", ["fp32", "8-bit"])
@pytest.mark.parametrize("shapes", ["all", "even"])
def test_bits_are_those_of_the_reference_in_bf16(seed: int | None, kind: str, shapes: str) -> None:
    known = LARGE if kind == "8-bit" else SMALL + LARGE
    wanted = known if shapes == "all" else [shape for shape in known if torch.Size(shape).numel() % 16 == 0]
    found = arguments(torch.bfloat16, torch.bfloat16, wanted, 8 if kind == "8-bit" else 32, seed)
    assert_same_bits(launch_adamw, found)


@pytest.mark.parametrize("kind", ["fp32", "8-bit"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_bits_are_those_of_the_reference(kind: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    bits, shapes = (8, LARGE) if kind == "8-bit" else (32, SMALL + LARGE)
    assert_same_bits(launch_adamw, arguments(dtype, grad_dtype, shapes, bits, None))


def test_addresses_that_are_no_multiple_of_16_bytes() -> None:
    params, grads, moments, *others = arguments(torch.bfloat16, torch.bfloat16, [(64, 64)], 8, 3)
    buffer = torch.zeros(4096 + 1, dtype=torch.bfloat16)
    moved = [buffer[1:].view(64, 64).copy_(params[0])]
    expected = copied((params, grads, moments, *others))  # type: ignore[arg-type]
    launch_adamw(moved, grads, moments, *others)
    reference_adamw(*expected)
    assert torch.equal(moved[0].nan_to_num(), expected[0][0].nan_to_num())
    assert buffer[0] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_norm_is_the_references(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = [(torch.randn(shape) * 1e3).to(dtype) for shape in SMALL + LARGE]
    ours, expected, nothing = torch.full((3,), torch.nan, dtype=torch.float64)
    launch_square_sum(grads, ours)
    reference_square_sum(grads, expected)
    launch_square_sum(grads[3:4], nothing)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-14)
    assert nothing == 0.0


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"max_norm": 3.0, "maximize": True},
    "8-bit": {"moment_bits": 8, "stochastic_rounding": True, "max_norm": 2.0, "seed": 9},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_optimizer_launches_them(
    options: dict[str, Any], launches: list[str], poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps, one without a gradient of some tensor: with kernels and without them, to the same bits."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in [(16, 16), (17, 241), (64, 64), (0,)]]
        params.append(torch.nn.Parameter(torch.randn(33)))
        optimizer = FusedAdamW(params, lr=0.1, **options)
        for step in range(3):
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype)
            if step == 1:
                params[1].grad = None
            optimizer.step()
        state = [value for p in params for value in optimizer.state[p].values()]
        return [*(p.detach() for p in params), *state]

    found = trained()
    # Of each step: the norm of both dtypes; bf16 of sizes that are multiples of 16 and not, and of both kinds of state.
    assert launches.count("launch_square_sum") == 6
    num_updates = {"fp32": [3, 2, 3], "8-bit": [4, 3, 4]}["8-bit" if "moment_bits" in options else "fp32"]
    assert launches.count("launch_adamw") == sum(num_updates)
    monkeypatch.setattr(ops_module, "runs_triton", lambda tensor: False)
    for ours, expected in zip(found, trained(), strict=True):
        assert torch.equal(ours, expected)
        assert not ours.is_floating_point() or ours.isfinite().all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("grad = grad * _scalar(scalars_ptr, 0)", "grad = grad"),
        ("param = param * _scalar(scalars_ptr, 1)", "param = param"),
        ("first = first + (grad - first)", "first = first + (grad + first)"),
        ("+ grad * grad * _scalar(scalars_ptr, 4)", "- grad * grad * _scalar(scalars_ptr, 4)"),
        ("+ _scalar(scalars_ptr, 7)", ""),
        ("tl.sqrt_rn(second)", "second"),
        ("root_code < _ROOT_CEILING", "root_code < 0.0"),
        ('tl.where(num_bad > 0, float("nan"), units)', "units"),
        ("blocks = (begin + start) // _QUANTISED", "blocks = begin // _QUANTISED"),
        ("bits = random_bits(seed, (begin + start) // 8 + groups", "bits = random_bits(seed, groups"),
        (
            "8 + groups, _scalar(scalars_ptr, 8).to(tl.int64), number",
            "8 + groups, _scalar(scalars_ptr, 8).to(tl.int64), 0 * number",
        ),
        ("8 + groups, _scalar(scalars_ptr, 8)", "8 + groups, 0 * _scalar(scalars_ptr, 8)"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(mutant: Callable[..., Any], old: str, new: str) -> None:
    wrong = mutant(SOURCE, old, new)
    with pytest.raises(AssertionError):
        assert_same_bits(wrong.launch_adamw, arguments(torch.bfloat16, torch.bfloat16, [(2, 8200)], 8, 5))


FAR = """
import importlib.util, sys
import numpy as np, torch
spec = importlib.util.spec_from_file_location("memwall.triton_kernels.adamw._far", sys.argv[1])
far = importlib.util.module_from_spec(spec); sys.modules[spec.name] = far; spec.loader.exec_module(far)
begin = (1 << 31) + 16384 * 3
def mapped(name, dtype, numel):
    return torch.from_numpy(np.memmap(f"{sys.argv[2]}/{name}", dtype=dtype, mode="w+", shape=(numel,)))
size = begin + 40
bits = sys.argv[3]
p, g = mapped("p", np.float16, size), mapped("g", np.float16, size)
moments = [mapped("m", np.int8, size), mapped("v", np.uint8, size)] if bits == "8" else [
    mapped("m", np.float32, size), mapped("v", np.float32, size)]
units = [torch.zeros(-(-size // 256)) for _ in range(2)] if bits == "8" else []
g[begin:] = 2.0
scalars = torch.tensor([[1.0, 1.0, 0.1, 0.999, 0.001, 1.0, 31.6, 1e-8, 1.0]])
# One program: the one that works on the last elements.
table = far.TensorTable([[p], [g], [moments[0]], [moments[1]], units[:1], units[1:]], [0])
table.rows[7] = -(begin // far.ADAMW_CHUNK)
kernel = far.adamw_8bit_kernel if units else far.adamw_kernel
kinds = [torch.empty(1, dtype=t.dtype) for t in (p, g, *(moments + units[:1] if units else moments[:1]))]
kernel[(1,)](*kinds, table.rows, table.chunks, scalars, 0, IS_STOCHASTIC=False, EVEN=False, INTERPRETED=True,
    CHUNK=far.ADAMW_CHUNK, BLOCK=512)
assert torch.allclose(p[begin:].float(), torch.full((40,), -0.1 / (0.001**0.5 * 31.6)), atol=1e-3), p[begin:]
assert not p[:1000].any()
sums = torch.zeros(1, dtype=torch.float64)
far.square_sum_kernel[(1,)](kinds[1], table.rows, table.chunks, sums, EVEN=False, CHUNK=far.ADAMW_CHUNK, BLOCK=512)
assert sums.item() == 160.0
"""


@pytest.mark.parametrize("bits", ["8", "32"])
@pytest.mark.parametrize(("narrow", "status"), [(True, -11), (False, 0)], ids=["int32", "int64"])
def test_elements_beyond_two_to_the_31(tmp_path: Path, bits: str, narrow: bool, status: int) -> None:
    """Sparse files; the same kernel with offsets of 32 bits dies."""
    text, wide = SOURCE.read_text(), "    return begin, num_elements\n"
    assert text.count(wide) == 1
    path = tmp_path / "far.py"
    path.write_text(
        text.replace(wide, "    return begin.to(tl.int32), num_elements.to(tl.int32)\n") if narrow else text
    )
    command = [sys.executable, "-c", FAR, str(path), str(tmp_path), bits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
