"""Run by test_interpreter.py, with TRITON_INTERPRET=1: a kernel of `dropout` with one thing wrong must be caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memwall.triton_kernels._dropout_kernel as kernel_module
from memwall.triton_kernels import dropout
from memwall.triton_kernels._dropout_reference import reference_dropout

SOURCE = Path(kernel_module.__file__)


def check() -> None:
    torch.manual_seed(0)
    for x, residual in (torch.randn(2, 3, 1500), torch.randn(2, 40, 33).transpose(1, 2)):
        found, expected = torch.empty(2, *x.shape)
        given = (torch.tensor((3 << 40) + 5), 20_000, 65_536 / 45_536, 7)
        kernel_module.launch_dropout(x, residual, found, *given)
        reference_dropout(x, residual, expected, *given)
        assert torch.equal(found, expected)


def test_the_kernel_as_it_is_gives_the_bits_of_the_reference(poisoned: None) -> None:
    check()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bits >= threshold", "bits > threshold + 100"),
        ("begin // 8 + groups", "groups"),
        ("columns * x_column_stride", "columns"),
        ("columns * residual_column_stride", "columns"),
        ("tl.cast(site, tl.int64)", "tl.cast(site, tl.int64) * 0"),
        ("values += tl.load(residual", "values -= tl.load(residual"),
        ("mask = elements < num_elements", "mask = elements < num_elements - 1"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(
    mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: str, new: str, poisoned: None
) -> None:
    monkeypatch.setattr(kernel_module, "launch_dropout", mutant(SOURCE, old, new).launch_dropout)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zeros + third.to(tl.uint32)", "zeros"),
        ("zeros + fourth.to(tl.uint32)", "zeros + 1"),
        ("element < 4, b,", "element < 4, a,"),
        ("(element % 2) * 16", "(element % 2) * 8"),
        ("(groups >> 32).to(tl.uint32)", "low"),
    ],
)
def test_random_bits_with_one_thing_wrong_fail(
    mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    wrong = mutant(SOURCE, old, new, parts=["_random_bits"])
    monkeypatch.setattr(kernel_module, "launch_dropout", wrong.launch_dropout)
    with pytest.raises(AssertionError):
        check()


def test_a_kernel_that_writes_its_input_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40)
    before = x.clone()
    dropout(x, 0.5)
    assert torch.equal(x, before)
    wrong = mutant(SOURCE, "store_rounded(result_ptr + elements", "store_rounded(x_ptr + elements")
    monkeypatch.setattr(kernel_module, "launch_dropout", wrong.launch_dropout)
    dropout(x, 0.5)
    assert not torch.equal(x, before)
