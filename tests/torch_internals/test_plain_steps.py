"""Each step that is called plain has the same bits with its backward recorded as without."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from memwall.patches import Patches
from memwall.torch_internals.transforms import _PLAIN, without_needless_graphs

WIDE = torch.linspace(-2, 2, 24).reshape(6, 4)
LABELS = torch.tensor([0, 3, 1, 5])
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "AddBackward0": lambda x: x + x.exp(),
    "AddBackward1": lambda x: torch.ops.aten.add.Scalar(x, 3.0),
    "AddmmBackward0": lambda x: torch.addmm(x[:, :4], x, WIDE.to(x), beta=0.5, alpha=3.0),
    "BaddbmmBackward0": lambda x: torch.baddbmm(x[None, :, :4], x[None], WIDE.to(x)[None], beta=0.5, alpha=3.0),
    "BmmBackward0": lambda x: torch.bmm(x[None], x.t()[None]),
    "CatBackward0": lambda x: torch.cat((x, x.exp(), x)),
    "CloneBackward0": lambda x: x.clone(),
    "ConvolutionBackward0": lambda x: F.conv2d(x.expand(2, 3, 4, 6), x.exp()[:2, :3].reshape(2, 3, 1, 1)),
    "DivBackward0": lambda x: x.exp() / (x.square() + 3),
    "DivBackward1": lambda x: torch.ops.aten.div.Scalar(x, 3.0),
    "EmbeddingBackward0": lambda x: F.embedding(torch.tensor([[0, 3], [3, 3]]), x, padding_idx=1),
    "ExpBackward0": torch.exp,
    "ExpandBackward0": lambda x: x.expand(3, 4, 6),
    "GeluBackward0": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "LogBackward0": lambda x: (x.square() + 1).log(),
    "LogSoftmaxBackward0": lambda x: x.log_softmax(-1),
    "MeanBackward0": lambda x: x.exp().mean(),
    "MeanBackward1": lambda x: x.exp().mean(0),
    "MmBackward0": lambda x: x @ x.t(),
    "MseLossBackward0": lambda x: F.mse_loss(x, x.exp()),
    "MulBackward0": lambda x: x * x.exp(),
    "MulBackward1": lambda x: torch.ops.aten.mul.Scalar(x, 3.0),
    "NativeLayerNormBackward0": lambda x: F.layer_norm(x, (6,), x[0].exp(), x[1]),
    "NegBackward0": lambda x: -x,
    "NllLossBackward0": lambda x: F.nll_loss(x.exp(), LABELS, x[0].detach().exp()),
    "PermuteBackward0": lambda x: x.permute(1, 0),
    "PowBackward0": lambda x: x.pow(3) + (x.square() + 1).pow(-0.5),
    "PowBackward1": lambda x: (x.square() + 1).pow(x),
    "ReluBackward0": torch.relu,
    "ReshapeAliasBackward0": lambda x: torch.ops.aten._reshape_alias(x, (6, 4), (4, 1)),
    "SelectBackward0": lambda x: x.select(0, 2),
    "SigmoidBackward0": torch.sigmoid,
    "SliceBackward0": lambda x: x[1:3],
    "SoftmaxBackward0": lambda x: x.softmax(-1),
    "SqueezeBackward0": lambda x: x[None].squeeze(),
    "SqueezeBackward1": lambda x: x[None].squeeze(0),
    "SubBackward0": lambda x: torch.sub(x, x.exp(), alpha=3),
    "SubBackward1": lambda x: torch.ops.aten.sub.Scalar(x, 3.0),
    "SumBackward0": lambda x: x.exp().sum(),
    "SumBackward1": lambda x: x.exp().sum(0, keepdim=True),
    "TBackward0": lambda x: x.t(),
    "TanhBackward0": torch.tanh,
    "ToCopyBackward0": lambda x: x.double(),
    "TransposeBackward0": lambda x: x.transpose(0, 1),
    "UnsafeViewBackward0": lambda x: torch.ops.aten._unsafe_view(x, (6, 4)),
    "UnsqueezeBackward0": lambda x: x.unsqueeze(0),
    "ViewBackward0": lambda x: x.view(6, 4),
}


def test_every_plain_step_is_compared() -> None:
    assert STEPS.keys() == _PLAIN


def weighted(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a loss after a step, each of whose results weighs another amount, which 24 bits do not hold exactly."""

    def loss(x: Tensor) -> Tensor:
        out = step(x)
        return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()

    return loss


@pytest.mark.parametrize("transform", [grad, lambda loss: vmap(grad(loss))], ids=["grad", "vmap of grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_plain_step_has_equal_bits_whether_or_not_it_is_recorded(
    name: str,
    dtype: torch.dtype,
    transform: Callable[..., Callable[[Tensor], Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a step of a backward WHEN its graph is kept, and when it is not, THEN its gradients have equal bits."""
    torch.manual_seed(0)
    loss, seen, original = weighted(STEPS[name]), list[tuple[bool, set[str]]](), torch.autograd.grad

    def computed(outputs: tuple[Tensor, ...], *args: object, create_graph: bool, **kwargs: object) -> object:
        seen.append((create_graph, names_of(outputs[0])))
        return original(outputs, *args, create_graph=create_graph, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.autograd, "grad", computed)
    given = torch.randn(3, 4, 6).to(dtype)
    given = given if transform is not grad else given[0]
    expected = transform(loss)(given)
    with Patches("a test") as patches:
        without_needless_graphs(patches)
        found = transform(loss)(given)
    assert [is_recorded for is_recorded, _ in seen] == [True, False]
    assert all(name in names for _, names in seen)
    assert torch.equal(found, expected)
    assert expected.count_nonzero()


def names_of(output: Tensor) -> set[str]:
    """Returns the names of all steps of a backward."""
    names, left = set[str](), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [following for following, _ in node.next_functions]
    return names
