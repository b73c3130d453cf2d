"""What an operation should give, by plain torch in fp64, and how far a kernel may be from it."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# Root mean square of the error over that of the truth: what is demanded where torch itself does not do worse.
MAX_RMS_RATIO = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Problem:
    """Inputs of one call."""

    x: Tensor
    w: Tensor
    target: Tensor
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """What changes the loss: the reference understands these."""
    how: dict[str, Any] = field(default_factory=dict)
    """What does not: chunk_rows."""


@dataclass(frozen=True)
class Outcome:
    """Holds a loss and the gradients of its sum."""

    loss: Tensor
    gradients: dict[str, Tensor]


def plain_loss(problem: Problem, wide: torch.dtype) -> Tensor:
    """What users write: a linear layer, logits cast to `wide`, cross entropy."""
    options = {"reduction": "mean", "ignore_index": -100, **problem.options}
    z = F.linear(problem.x, problem.w, problem.bias).to(wide) * options.get("logit_scale", 1.0)
    if softcap := options.get("softcap"):
        z = softcap * torch.tanh(z / softcap)
    is_valid = problem.target != options["ignore_index"]
    rows = F.cross_entropy(
        z,
        problem.target,
        ignore_index=options["ignore_index"],
        reduction="none",
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    if options["reduction"] == "none":
        return rows
    if options["reduction"] == "sum":
        return rows.sum()
    return rows.sum() / is_valid.sum().clamp(min=1)


def _outcome(problem: Problem, loss: Callable[[Problem], Tensor], frozen: tuple[str, ...]) -> Outcome:
    leaves = {
        name: tensor.detach().requires_grad_()
        for name in ("x", "w", "bias")
        if name not in frozen and (tensor := getattr(problem, name)) is not None
    }
    value = loss(replace(problem, **leaves))
    # Neither 1 nor uniform: a factor that is forgotten shows.
    upstream = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    value.backward(upstream)
    return Outcome(value.detach(), {name: leaf.grad for name, leaf in leaves.items()})


def kernel_outcome(problem: Problem, frozen: tuple[str, ...] = ()) -> Outcome:
    """By the operator."""
    from memwall.triton_kernels import linear_cross_entropy

    def loss(p: Problem) -> Tensor:
        return linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, **p.options, **p.how)

    return _outcome(problem, loss, frozen)


def plain_outcome(problem: Problem, frozen: tuple[str, ...] = ()) -> Outcome:
    """By torch in the problem's own dtype."""
    wide = torch.promote_types(problem.x.dtype, torch.float32)
    return _outcome(problem, lambda p: plain_loss(p, wide), frozen)


def true_outcome(problem: Problem, frozen: tuple[str, ...] = ()) -> Outcome:
    """By torch in fp64, from the very same values."""
    double = {name: tensor.double() for name in ("x", "w", "bias") if (tensor := getattr(problem, name)) is not None}
    return plain_outcome(replace(problem, **double), frozen)


def assert_as_good_as_torch(problem: Problem, frozen: tuple[str, ...] = ()) -> Outcome:
    """Error at most twice that of plain torch in the same dtype plus one ulp of the largest value, against fp64."""
    ours, plain, truth = (run(problem, frozen) for run in (kernel_outcome, plain_outcome, true_outcome))
    assert ours.gradients.keys() == plain.gradients.keys()
    _assert_close("loss", ours.loss, plain.loss, truth.loss, problem.x.dtype)
    for name, gradient in ours.gradients.items():
        assert gradient.dtype == problem.x.dtype
        _assert_close(name, gradient, plain.gradients[name], truth.gradients[name], problem.x.dtype)
    return ours


def _assert_close(name: str, ours: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == truth.shape
    if truth.numel() == 0:
        return
    error, allowed = (ours.double() - truth).abs().max(), (plain.double() - truth).abs().max()
    ulp = torch.finfo(ours.dtype).eps * truth.abs().max()
    # In fp64 torch is the truth and has no error to compare with.
    if dtype != torch.float64:
        assert error <= 2 * allowed + ulp, f"{name}: error {error:.3e}, torch's {allowed:.3e}, ulp {ulp:.3e}"
    ratio, torchs = (_rms_ratio(found, truth) for found in (ours, plain))
    # Logits rounded to bf16 alone can cost torch more than the table allows.
    assert ratio < max(MAX_RMS_RATIO[dtype], 2 * torchs), f"{name}: relative error {ratio:.3e}, torch's {torchs:.3e}"


def _rms_ratio(found: Tensor, truth: Tensor) -> float:
    size = float(truth.square().mean().sqrt())
    return float((found.double() - truth).square().mean().sqrt()) / (size if size > 0.0 else 1.0)


def make_problem(
    *,
    rows: int = 33,
    hidden: int = 24,
    vocabulary: int = 123,
    dtype: torch.dtype = torch.float32,
    ignored: str = "some",
    with_bias: bool = False,
    seed: int = 0,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Problem:
    """Random inputs; logits of a few units."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    if ignored == "some":
        target[torch.rand(rows, generator=generator) < 0.4] = options.get("ignore_index", -100)
    elif ignored == "all":
        target.fill_(options.get("ignore_index", -100))
    return Problem(
        x=normal(rows, hidden),
        w=normal(vocabulary, hidden) * 0.5,
        target=target,
        bias=normal(vocabulary) if with_bias else None,
        options=options,
        how={"chunk_rows": 8} if how is None else how,
    )


@dataclass(frozen=True)
class Losses:
    """The functions above, for tests."""

    Problem = Problem
    make = staticmethod(make_problem)
    check = staticmethod(assert_as_good_as_torch)
    ours = staticmethod(kernel_outcome)
    plain = staticmethod(plain_outcome)
    truth = staticmethod(true_outcome)


@pytest.fixture
def losses() -> Losses:
    return Losses()


@dataclass(frozen=True)
class Operation:
    """An operation of the package beside what users write in plain torch: functions of the same tensors."""

    ours: Callable[..., Tensor | tuple[Tensor, ...]]
    plain: Callable[..., Tensor | tuple[Tensor, ...]]

    def check(self, *tensors: Tensor) -> None:
        """Results and gradients: error at most twice plain torch's plus one ulp of the largest value, against fp64."""
        found = self.results(self.ours, *tensors)
        plain = self.results(self.plain, *tensors)
        truth = self.results(self.plain, *(tensor.double() for tensor in tensors))
        assert [t.dtype for t in found] == [t.dtype for t in plain]
        for number, outcome in enumerate(zip(found, plain, truth, strict=True)):
            _assert_close(f"result or gradient {number}", *outcome, outcome[0].dtype)

    @staticmethod
    def results(function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
        """What the function returns, then the gradients of its inputs for upstream gradients that differ."""
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        values = function(*leaves)
        values = values if isinstance(values, tuple) else (values,)
        upstream = [torch.linspace(0.5, 1.5, v.numel(), dtype=torch.float64).reshape(v.shape).to(v) for v in values]
        gradients = torch.autograd.grad(values, leaves, upstream)
        return [*(value.detach() for value in values), *gradients]


@pytest.fixture
def operation() -> type[Operation]:
    return Operation


def _two_dimensional(layout: str, rows: int, columns: int) -> Tensor:
    if layout == "sliced":
        return torch.randn(rows, 2 * columns)[:, ::2]
    if layout == "row-sliced":
        return torch.randn(rows, 2 * columns)[:, 1 : columns + 1]
    if layout == "transposed":
        return torch.randn(columns, rows).t()
    if layout == "expanded":
        return torch.randn(1, columns).expand(rows, columns)
    if layout == "broadcast":
        return torch.randn(rows, 1).expand(rows, columns)
    return torch.randn(rows, columns)


LAYOUTS = ("contiguous", "sliced", "row-sliced", "transposed", "expanded", "broadcast", "swapped")


@pytest.fixture(params=LAYOUTS)
def laid_out(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Makes random tensors of one layout: [rows, columns], or [4, 3, columns] with its first two dimensions swapped."""
    torch.manual_seed(0)

    def make(rows: int, columns: int) -> Tensor:
        if request.param == "swapped":
            return torch.randn(3, 4, columns).transpose(0, 1)
        return _two_dimensional(request.param, rows, columns)

    return make


def package_of(path: Path) -> str:
    """Returns the name of the package that a file of the kernels is in."""
    from memwall import triton_kernels

    return ".".join((triton_kernels.__name__, *path.parent.relative_to(Path(triton_kernels.__file__).parent).parts))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Counts kernel launches. In the interpreter's process there must be some: a fall-back would prove nothing."""
    from memwall import triton_kernels
    from memwall.triton_kernels._launch import is_interpreting

    counted: list[str] = []
    if not is_interpreting():
        yield counted
        return
    for path in Path(triton_kernels.__file__).parent.rglob("_*kernel.py"):
        module = importlib.import_module(f"{package_of(path)}.{path.stem}")
        for name in [name for name in vars(module) if name.startswith("launch_")]:
            original = getattr(module, name)

            def counting(*args: Any, _original: Callable[..., None] = original, _name: str = name, **how: Any) -> None:
                counted.append(_name)
                _original(*args, **how)

            monkeypatch.setattr(module, name, counting)
    yield counted
    assert counted


@pytest.fixture
def mutant(tmp_path: Path) -> Callable[..., Any]:
    """Makes a kernel module with one thing wrong."""

    def make(source: Path, old: str, new: str) -> Any:
        text = source.read_text()
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        path = tmp_path / source.name
        path.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location(f"{package_of(source)}._mutant_{source.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Whatever is allocated without a value is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "bias": {"with_bias": True},
    "everything": {
        "label_smoothing": 0.2,
        "softcap": 5.0,
        "logit_scale": 1.7,
        "with_bias": True,
    },
}


@pytest.fixture(params=TERMS, ids=str)
def terms(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a row's loss consists of: arguments of `losses.make`."""
    return TERMS[request.param]
