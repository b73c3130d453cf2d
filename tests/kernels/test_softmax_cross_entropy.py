"""The loss of given logits against plain torch: the reference here, the kernels where test_interpreter.py runs this."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.errors import UsageError
from memwall.triton_kernels import softmax_cross_entropy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("launches")


def plain_loss(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """What users write: logits cast to fp32, cross entropy."""
    reduction = options.get("reduction", "mean")
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.get("logit_scale", 1.0)
    if softcap := options.get("softcap"):
        z = softcap * torch.tanh(z / softcap)
    z, flat = z.flatten(0, -2), target.flatten()
    rows = F.cross_entropy(z, flat, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    if "z_loss" in options:
        rows = rows + torch.where(flat != -100, options["z_loss"] * torch.logsumexp(z, 1) ** 2, 0.0)
    if "token_weight" in options:
        rows = rows * torch.where(flat != -100, options["token_weight"].flatten(), 0.0)
    if reduction == "none":
        return rows.reshape(target.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / (flat != -100).sum().clamp(min=1)


def targets(rows: int, vocabulary: int, ignored: str = "some") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    if ignored != "none":
        target[torch.rand(rows, generator=generator) < (0.4 if ignored == "some" else 2.0)] = -100
    return target


@pytest.fixture
def check(operation: Any, poisoned: None) -> Callable[..., None]:
    """As exact as plain torch, whether the gradient has memory of its own or takes the logits' place."""
    torch.manual_seed(0)

    def run(logits: Tensor, target: Tensor, *, overwrites: bool = True, **options: Any) -> None:
        def plain(x: Tensor) -> Tensor:
            return plain_loss(x, target, **options)

        operation(lambda x: softmax_cross_entropy(x, target, **options), plain).check(logits)
        if overwrites:

            def over(x: Tensor) -> Tensor:
                return softmax_cross_entropy(x * 1.0, target, overwrite_logits=True, **options)

            operation(over, plain).check(logits)

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_as_exact_as_torch(check: Callable[..., None], terms: dict[str, Any], dtype: torch.dtype) -> None:
    options = {name: value for name, value in terms.items() if not name.startswith("with_")}
    if "with_token_weight" in terms:
        options["token_weight"] = torch.rand(3) + 0.5
    check((3.0 * torch.randn(3, 123)).to(dtype), targets(3, 123), reduction="none", **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(check: Callable[..., None], reduction: str) -> None:
    check(torch.randn(2, 3, 50), targets(6, 50).view(2, 3), reduction=reduction, token_weight=torch.rand(2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 4096, 9001])
def test_vocabularies(check: Callable[..., None], dtype: torch.dtype, vocabulary: int) -> None:
    logits, target = torch.randn(2, vocabulary).to(dtype), targets(2, vocabulary, "none")
    # The gradient of one smoothed logit is the rounding error of 0.1 - 0.1.
    check(logits, target, overwrites=False, label_smoothing=0.1 if vocabulary > 1 else 0.0, z_loss=0.01)


@pytest.mark.parametrize(("rows", "ignored"), [(1, "none"), (5, "all"), (7, "some")])
def test_rows(check: Callable[..., None], rows: int, ignored: str) -> None:
    check(torch.randn(rows, 50), targets(rows, 50, ignored))


def test_strides(check: Callable[..., None], laid_out: Callable[..., Tensor]) -> None:
    logits = laid_out(4, 70)
    target = targets(logits.shape[:-1].numel(), 70, "none").reshape(logits.shape[:-1])
    check(logits, target, overwrites=False, label_smoothing=0.1)


def test_shifted_logits_cost_no_copy(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`logits[:, :-1]`: two strides of rows, which no single one covers."""
    whole, target = torch.randn(3, 6, 40), targets(15, 40).reshape(3, 5)
    check(whole[:, :-1], target, overwrites=False)
    monkeypatch.setattr(Tensor, "contiguous", None)
    monkeypatch.setattr(Tensor, "clone", None)
    found = softmax_cross_entropy(whole[:, :-1], target)
    torch.testing.assert_close(found, plain_loss(whole[:, :-1], target))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda whole: whole[:, :-1],
    "transposed": lambda whole: whole.transpose(0, 1),
    "sliced": lambda whole: whole[..., ::2],
    "one-row": lambda whole: whole[1, 2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_in_place_of_logits_of_any_strides(layout: str) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(2, 4, 40, requires_grad=True)
    gradients = []
    for overwrites in (True, False):
        whole = leaf * 2.0
        logits, other = LAYOUTS[layout](whole), whole.detach().clone()
        target = targets(logits.shape[:-1].numel(), logits.shape[-1]).reshape(logits.shape[:-1])
        loss = softmax_cross_entropy(logits, target, overwrite_logits=overwrites)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient.data_ptr() == logits.data_ptr()) == overwrites
        gradients.append(gradient.clone())
        if overwrites:
            # What is not theirs stays as it is.
            LAYOUTS[layout](other).copy_(gradient)
        assert torch.equal(whole, other)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("values", ["offset", "equal", "infinite", "nan", "masked", "all-masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_logits(values: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5000)
    if values == "offset":
        logits += 1e4
    elif values == "equal":
        logits.fill_(3.0)
    elif values == "masked":
        logits[:, :4500] = float("-inf")
    else:
        logits[1, 17:] = float({"infinite": "inf", "nan": "nan", "all-masked": "-inf"}[values])
        logits[1, :17] = float("-inf") if values == "all-masked" else logits[1, :17]
    leaf, target = logits.to(dtype).requires_grad_(), torch.tensor([4700, 4701, 4999])
    double = leaf.detach().double().requires_grad_()
    truth = F.cross_entropy(double, target, reduction="none")
    loss = softmax_cross_entropy(leaf, target, reduction="none")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)
    (found,), (expected,) = torch.autograd.grad(loss.sum(), leaf), torch.autograd.grad(truth.sum(), double)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=max(1e-7, eps**2), equal_nan=True)


def test_target_out_of_range_is_nan_in_its_row_only() -> None:
    logits, target = torch.randn(5, 40, requires_grad=True), torch.tensor([0, 40, -1, 1 << 40, 39])
    loss = softmax_cross_entropy(logits, target, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, True, True, True, False]
    assert gradient.isnan().all(1).tolist() == loss.isnan().tolist() == gradient.isnan().any(1).tolist()


def test_lse_is_that_of_the_scaled_logits() -> None:
    logits, target = torch.randn(6, 30, requires_grad=True), targets(6, 30)
    loss, lse = softmax_cross_entropy(logits, target, logit_scale=0.5, out_lse=True)
    torch.testing.assert_close(lse, torch.where(target != -100, torch.logsumexp(0.5 * logits, 1), 0.0))
    assert loss.requires_grad
    assert not lse.requires_grad


def test_token_weights_receive_their_gradient() -> None:
    logits, target = torch.randn(6, 30), targets(6, 30)
    weight = (torch.rand(6) + 0.5).requires_grad_()
    found, expected = (
        torch.autograd.grad(run(logits, target, token_weight=weight), weight)[0]
        for run in (softmax_cross_entropy, plain_loss)
    )
    torch.testing.assert_close(found, expected)


def test_one_step_of_n_micro_batches_is_n_steps_of_one() -> None:
    """Liger #802, #322; TRL #5890; transformers #42444: micro-batches with different numbers of valid rows."""
    logits, target = torch.randn(12, 30, requires_grad=True), targets(12, 30)
    num_items = (target != -100).sum()
    (expected,) = torch.autograd.grad(softmax_cross_entropy(logits, target), logits)
    parts = [
        softmax_cross_entropy(logits[part], target[part], num_items=num_items) for part in torch.arange(12).split(4)
    ]
    torch.testing.assert_close(torch.autograd.grad(sum(parts), logits)[0], expected)


def test_inputs_are_never_written() -> None:
    tensors = [torch.randn(5, 40, requires_grad=True), targets(5, 40), torch.rand(5)]
    before = [(tensor._version, tensor.detach().clone()) for tensor in tensors]
    upstream = torch.rand(5)
    kept = upstream.clone()
    loss = softmax_cross_entropy(*tensors[:2], token_weight=tensors[2], reduction="none")
    torch.autograd.grad(loss, tensors[0], upstream)
    assert torch.equal(upstream, kept)
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)


def test_backward_twice_and_two_runs_are_bitwise_equal() -> None:
    logits, target = torch.randn(5, 300, requires_grad=True), targets(5, 300)
    results = []
    for _ in range(2):
        loss = softmax_cross_entropy(logits, target)
        results += [torch.autograd.grad(loss, logits, retain_graph=True)[0], torch.autograd.grad(loss, logits)[0]]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_in_place_change_between_forward_and_backward_is_noticed() -> None:
    """Liger #272, #273, #343 and others: autograd's own check must keep working."""
    for overwrites in (False, True):
        logits = torch.randn(5, 30, requires_grad=True) * 2.0
        loss = softmax_cross_entropy(logits, targets(5, 30), overwrite_logits=overwrites)
        logits.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_logits_given_away_go_backward_once() -> None:
    leaf = torch.randn(5, 30, requires_grad=True)
    for hooks in (False, True):
        logits = leaf * 2.0
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else torch.enable_grad():
            loss = softmax_cross_entropy(logits, targets(5, 30), overwrite_logits=True)
        torch.autograd.grad(loss, leaf, retain_graph=True)
        with pytest.raises(RuntimeError, match="goes backward once: its logits are their gradient now"):
            torch.autograd.grad(loss, leaf)


def test_who_saved_the_logits_as_well_is_told_that_they_are_gone() -> None:
    """Liger #1251, #1305 and others wrote over tensors without a word to autograd."""
    logits = torch.randn(5, 30, requires_grad=True) * 2.0
    other = logits.square().sum()
    loss = softmax_cross_entropy(logits, targets(5, 30), overwrite_logits=True)
    version = logits._version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()
    assert logits._version > version


def test_an_evaluation_and_frozen_logits_are_left_alone() -> None:
    logits, target = torch.randn(5, 30), targets(5, 30)
    before = logits.clone()
    loss = softmax_cross_entropy(logits, target, overwrite_logits=True)
    assert not loss.requires_grad
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.randn(5, 30, requires_grad=True), "write over a leaf that requires a gradient"),
        (lambda: torch.randn(9, 30, requires_grad=True)[:5], "write over a leaf that requires a gradient"),
        (lambda: (torch.randn(30, requires_grad=True) * 2).expand(5, 30), r"memory of their own.*strides \[0, 1\]"),
    ],
    ids=["leaf", "view-of-a-leaf", "expanded"],
)
def test_logits_that_are_not_the_callers_to_give_are_refused(
    make: Callable[[], Tensor], message: str, launches: list[str]
) -> None:
    launches.append("none is wanted")
    with pytest.raises(UsageError, match=message):
        softmax_cross_entropy(make(), targets(5, 30), overwrite_logits=True)
