"""Values on fake tensors: real where they follow from the batch, else assumed, or an error that names the line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from torch import Tensor, nn

from memwall.errors import TraceError
from memwall.trace.records import Step, Trace
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def test_branches_on_the_batch_are_the_real_ones(
    names_of: Callable[[Trace, Step], list[str]], sgd: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = model(batch["x"])
        if not batch["mask"].all():
            hidden = hidden.sin()
        return hidden.sum()

    def operations(mask: Tensor) -> list[str]:
        workload = Workload(
            model=lambda: nn.Linear(8, 8),
            batch=lambda: {"x": torch.ones(4, 8), "mask": mask},
            loss=loss,
            optimizer=sgd,
        )
        trace = record_fake(workload)
        return names_of(trace, trace.steps[1])

    assert "aten.sin.default" not in operations(torch.tensor([1, 1, 1, 1], dtype=torch.bool))
    assert "aten.sin.default" in operations(torch.tensor([1, 1, 1, 0], dtype=torch.bool))


def test_rows_that_the_batch_selects_have_their_real_number(sgd: Callable[[Any], torch.optim.Optimizer]) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden: Tensor = model(batch["x"])
        return hidden[batch["labels"] != -100].sum()

    labels = torch.tensor([3, -100, 5, 7])
    workload = Workload(
        model=lambda: nn.Linear(8, 8),
        batch=lambda: {"x": torch.ones(4, 8), "labels": labels},
        loss=loss,
        optimizer=sgd,
    )
    trace = record_fake(workload)
    (chosen,) = [op for op in trace.steps[1].ops if trace.names[op.name] == "aten.index.Tensor"]
    assert trace.steps[1].storages[chosen.outputs[0]].nbytes == 3 * 8 * 4


def test_a_long_mask_of_floats_that_the_model_makes_itself_is_known(
    workload_of: Callable[..., Workload], names_of: Callable[[Trace, Step], list[str]]
) -> None:
    """BART's decoder asks whether the ones that it was not given a mask for are all true."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        hidden: Tensor = model(batch)
        return hidden.sum() if torch.ones(4, 1024).to(torch.bool).all() else hidden.sin().sum()

    trace = record_fake(workload_of(loss))
    assert "aten.sin.default" not in names_of(trace, trace.steps[1])


def test_a_value_that_was_overwritten_with_an_unknown_one_is_unknown(workload_of: Callable[..., Workload]) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        hidden: Tensor = model(batch).sum()
        flags = torch.zeros(2, dtype=torch.bool)
        flags[:1].copy_(hidden > 0)
        return hidden if flags[0] else hidden.sin()

    with pytest.raises(TraceError, match=r"^loss: a bool computed from weights or data becomes a Python value"):
        record_fake(workload_of(loss))


def test_numbers_made_while_the_model_is_built_are_known(sgd: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Stochastic depth: rates from a linspace become Python numbers (timm)."""
    seen: list[float] = []

    def model() -> nn.Module:
        seen.extend(rate.item() for rate in torch.linspace(0, 0.1, 3))
        return nn.Linear(8, 8)

    record_fake(Workload(model=model, batch=torch.ones(4, 8), loss=lambda m, x: m(x).sum(), optimizer=sgd), num_steps=1)
    assert seen == pytest.approx([0.0, 0.05, 0.1])


class Branching(nn.Module):
    """A module whose Python hangs on what it computes."""

    def __init__(self, ask: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.ask(y)
        return y


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda y: bool((y > 0).any()),
            r"^forward of 1 \(Branching\): a bool computed from weights or data becomes a Python value \(\.item\(\), "
            r"int\(\), bool\(\), if, while\) at .*test_fake_values\.py, line \d+; make the branch or size independent "
            r"of tensor values, or record this workload live$",
        ),
        (
            lambda y: y.argmax().item(),
            r"^forward of 1 \(Branching\): an integer computed from weights or data becomes a Python value .*fake_val",
        ),
        (
            lambda y: y[y > 0],
            r"^forward of 1 \(Branching\): aten\.index\.Tensor selects by a mask of 32 elements whose values hang on "
            r"weights or data at .*test_fake_values\.py, line \d+; say which share of it is true \(mask_share, e\.g\. "
            r"0\.25\), or record this workload live$",
        ),
        (lambda y: torch.where(y > 0), r"^forward of 1 \(Branching\): aten\.nonzero\.default selects by a mask"),
        (
            lambda y: torch.unique((y * 8).long()),
            r"^forward of 1 \(Branching\): the result of aten\._unique2\.default has a size that hangs on values "
            r"computed from weights or data at .*; replace the operation by one with a fixed size, or record",
        ),
        (
            lambda y: torch.empty(2, device="cuda"),
            r"^forward of 1 \(Branching\): a tensor is asked for on device 'cuda' at .*test_fake_values\.py, line \d+; "
            r"leave model and batch on the CPU: what differs on the target device is put in afterwards$",
        ),
    ],
    ids=["bool", "int", "index", "where", "unique", "cuda"],
)
def test_a_step_that_needs_values_fails_with_module_line_and_advice(
    ask: Callable[[Tensor], object], message: str, sgd: Callable[[Any], torch.optim.Optimizer]
) -> None:
    workload = Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 8), Branching(ask)),
        batch=lambda: torch.ones(4, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=sgd,
    )
    with pytest.raises(TraceError, match=message):
        record_fake(workload)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_float_that_becomes_a_python_number_counts_as_one(workload_of: Callable[..., Workload]) -> None:
    """Losses are logged, and Adafactor scales its step by a norm: neither changes what is allocated."""
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).sum()
        seen.append(value.item())
        return value

    record_fake(workload_of(loss), num_steps=1)
    assert seen == [1.0]


@pytest.mark.parametrize(("share", "rows"), [(0.0, 0), (0.25, 8), (1.0, 32)])
def test_a_selection_by_an_unknown_mask_takes_the_assumed_share(
    share: float, rows: int, workload_of: Callable[..., Workload]
) -> None:
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        hidden = model(batch)
        seen.extend([hidden[hidden > 0].shape, torch.nonzero(hidden).shape, hidden.masked_select(hidden > 0).shape])
        return hidden.sum()

    record_fake(workload_of(loss), num_steps=1, mask_share=share)
    assert seen == [(rows,), (rows, 2), (rows,)]


def test_an_operator_without_a_fake_version_is_named(workload_of: Callable[..., Workload]) -> None:
    library = torch.library.Library("memwall_tests", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: 2 * x, "CPU")
    try:
        with pytest.raises(
            TraceError,
            match=r"^loss: memwall_tests\.doubled\.default has no fake version at .*test_fake_values\.py, line \d+; "
            r"register one \(torch\.library\.register_fake\), or record this workload live$",
        ):
            record_fake(
                workload_of(lambda model, batch: model(batch).sum() + torch.ops.memwall_tests.doubled(batch).sum())
            )
    finally:
        library._destroy()
