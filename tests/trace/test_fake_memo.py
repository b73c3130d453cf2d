"""Remembered results of fake operators are those that torch makes, and torch is not asked for them again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.torch_internals.fake import FakeTensorMode
from memwall.torch_internals.trees import tensors_in
from memwall.trace.fakes.fake_memo import ResultMemo

_aten = torch.ops.aten


class _Asked:
    """Runs operators on fake tensors, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.memo = ResultMemo(self._run)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        return func(*args, **kwargs)


def _layouts(out: Any, args: tuple[Any, ...]) -> list[Any]:
    """Returns how results are laid out, and which arguments they are or share their bytes with."""
    storages = [given.untyped_storage()._cdata for given in tensors_in(args)]
    return [
        (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.untyped_storage().nbytes(),
            [tensor is given for given in tensors_in(args)],
            [tensor.untyped_storage()._cdata == storage for storage in storages],
        )
        for tensor in tensors_in((out,))
    ]


_CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "product": (_aten.mm.default, lambda: (torch.ones(4, 3), torch.ones(3, 5).half().float())),
    "in place": (_aten.add_.Tensor, lambda: (torch.ones(4, 3), torch.ones(3))),
    "view": (_aten.view.default, lambda: (torch.ones(4, 6), [2, 12])),
    "part": (_aten.slice.Tensor, lambda: (torch.ones(9, 2), 0, 3, 7)),
    "parts": (_aten.split.Tensor, lambda: (torch.ones(9, 2), 4)),
    "transposed": (_aten.relu.default, lambda: (torch.ones(4, 6).t(),)),
    "norm": (_aten.native_layer_norm.default, lambda: (torch.ones(2, 8), [8], torch.ones(8), None, 1e-5)),
    "empty": (_aten.add.Tensor, lambda: (torch.ones(0, 8), 1)),
    "many": (_aten._foreach_mul_.Scalar, lambda: ([torch.ones(2), torch.ones(3), torch.ones(2)], 0.5)),
    "many anew": (_aten._foreach_add.List, lambda: ([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)])),
}


@pytest.mark.parametrize("name", _CALLS)
def test_second_result_is_made_without_torch_and_is_laid_out_as_the_first(name: str) -> None:
    func, given = _CALLS[name]
    asked = _Asked()
    with FakeTensorMode():
        first, second = given(), given()
        expected = _layouts(func(*first), first)
        assert _layouts(asked.memo.result(func, first, {}), first) == expected
        num_calls = asked.num_calls
        assert _layouts(asked.memo.result(func, second, {}), second) == expected
    assert num_calls > 0
    assert asked.num_calls == num_calls


def test_tensors_of_a_list_that_are_alike_are_asked_for_once() -> None:
    asked = _Asked()
    with FakeTensorMode():
        made = asked.memo.result(_aten._foreach_sqrt.default, ([torch.ones(2, 3) for _ in range(5)],), {})
        assert [tensor.shape for tensor in made] == [(2, 3)] * 5
        assert len({tensor.untyped_storage()._cdata for tensor in made}) == 5
    assert asked.num_calls == 1


@pytest.mark.parametrize(("number", "dtype"), [(1, torch.int64), (1.0, torch.float32), (True, torch.int64)])
def test_numbers_that_are_equal_are_told_apart_by_their_type(number: Any, dtype: torch.dtype) -> None:
    asked = _Asked()
    with FakeTensorMode():
        for other in (1, 1.0, True):
            asked.memo.result(_aten.mul.Tensor, (torch.ones(3, dtype=torch.int64), other), {})
        again: Tensor = asked.memo.result(_aten.mul.Tensor, (torch.ones(3, dtype=torch.int64), number), {})
    assert again.dtype is dtype
    assert asked.num_calls == 3


def test_operator_that_lays_its_argument_out_anew_is_torchs_each_time() -> None:
    asked = _Asked()
    with FakeTensorMode():
        for _ in range(2):
            turned = torch.ones(4, 6)
            asked.memo.result(_aten.t_.default, (turned,), {})
            assert turned.shape == (6, 4)
    assert asked.num_calls == 2


def test_lists_of_other_lengths_are_refused_by_torch() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError):
        _Asked().memo.result(_aten._foreach_add.List, ([torch.ones(2)] * 3, [torch.ones(2)] * 2), {})
