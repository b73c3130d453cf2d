"""Digests tell tensors of other bits, places, shapes and layouts apart, and need no copy's worth of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.apply.blocks.digests import Digest, Digesting, difference, digest_of, weighted_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128, torch.float8_e4m3fn])
def test_equal_tensors_have_equal_digests_and_one_other_element_changes_it(dtype: torch.dtype) -> None:
    tensor = (torch.arange(5000).reshape(50, 100) % 2).to(dtype)
    other = tensor.clone()
    other[3, 7] = 0 if bool(other[3, 7]) else 1
    assert difference([digest_of(tensor)], [digest_of(tensor.clone())]) == ""
    assert "has other values" in difference([digest_of(tensor)], [digest_of(other)])


@pytest.mark.parametrize(
    "change",
    [lambda t: t.flip(0), lambda t: t.t(), lambda t: t.roll(1, 1), lambda t: t.reshape(20, 80), lambda t: t.double()],
)
def test_the_same_numbers_elsewhere_are_others(change: "type[Tensor]") -> None:
    tensor = torch.randn(40, 40)
    assert difference([digest_of(tensor)], [digest_of(change(tensor))])


def test_gaps_and_repetitions_do_not_count() -> None:
    tensor = torch.randn(7, 6, 9)[:, 1:4]
    assert digest_of(tensor) == digest_of(tensor.contiguous())
    assert digest_of(torch.ones(3, 1).expand(3, 9)).value == digest_of(torch.ones(3, 1)).value


def test_what_has_no_bits_is_compared_by_its_shape() -> None:
    first, second = torch.empty(3, device="meta"), torch.empty(4, device="meta")
    assert difference([digest_of(first)], [digest_of(first)]) == ""
    assert "is [3] float32 the first time and [4] float32 then" in difference([digest_of(first)], [digest_of(second)])
    assert "keeps 1 tensors the first time and 0 the second" in difference([digest_of(first)], [])


def test_a_devices_sum_depends_on_every_element_and_its_place() -> None:
    """As on CUDA, here on the CPU; larger than what is worked on at a time."""
    words = torch.randint(-1000, 1000, (3, 1 << 20), dtype=torch.int32)
    other = words.clone()
    other[2, 77] += 1
    sums = [int(weighted_sum(tensor)) for tensor in (words, words.clone(), words.flip(0), other, words.flatten())]
    assert sums[0] == sums[1] == sums[4]
    assert len(set(sums)) == 3


def largest_made_bytes(words: Tensor) -> int:
    """Returns the size of the largest tensor that a device's sum makes."""
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            made.append(0 if found._is_view() else found.nbytes) if isinstance(found, Tensor) else None
            return found

    with Sizes():
        weighted_sum(words)
    return max(made)


@pytest.mark.parametrize("shape", [(1 << 20,), (4, 1 << 18), (1 << 12, 256)])
def test_a_devices_sum_needs_little_memory_beside_the_tensor(shape: tuple[int, ...]) -> None:
    """In the step in which plans are proved it lies on top of what was forecast."""
    words = torch.zeros(shape, dtype=torch.int32)
    # Weights, and what they are mixed with.
    assert 0 < 2 * largest_made_bytes(words) <= words.nbytes // 4


def test_a_devices_sum_needs_no_more_for_a_larger_tensor() -> None:
    small, large = (torch.zeros(num_words, dtype=torch.int32) for num_words in (1 << 20, 1 << 23))
    assert largest_made_bytes(large) == largest_made_bytes(small)


@pytest.mark.parametrize("place", range(8))
def test_a_devices_sum_sees_the_sign_of_one_number_of_double_precision(place: int) -> None:
    numbers = torch.ones(8, dtype=torch.float64)
    other = numbers.clone()
    other[place] = -1
    sums = [int(weighted_sum(one.view(torch.int64))) for one in (numbers, other)]
    assert sums[0] != sums[1]


def test_digests_that_stay_on_a_device_are_compared() -> None:
    one, other = ([Digest((3,), torch.float32, (0,), torch.tensor(n))] for n in (1, 2))
    assert difference(one, one) == ""
    assert "has other values" in difference(one, other)


def test_a_mode_that_watches_operations_sees_nothing_of_a_comparison_on_a_device() -> None:
    """A checkpoint that keeps results has such a mode, and ends with an error where an operation is new to it."""

    class Unknown(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was not in the first run")

    digests = [Digest((3,), torch.float32, (0,), torch.tensor(1))]
    with Unknown():
        assert difference(digests, digests) == ""


def test_a_mode_that_watches_operations_sees_nothing() -> None:
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, op: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    tensor = torch.randn(4, 4).t()
    with Watching():
        digest_of(tensor)
    assert seen == []


def test_of_two_runs_with_the_same_bits_only_the_later_ones_tensors_are_kept() -> None:
    """A proof keeps what the first run saved while the block runs again: it would need twice the block's bytes."""
    x = torch.randn(100, requires_grad=True)
    first = Digesting(keeps=True)
    with first:
        out = x.exp()
    earlier = out.data_ptr()
    with Digesting(repeats=first):
        again = x.detach().requires_grad_().exp()
    assert out.grad_fn is not None
    assert out.grad_fn._saved_result.data_ptr() == again.data_ptr() != earlier  # type: ignore[attr-defined]


def test_of_two_runs_with_other_bits_backward_has_the_first_ones() -> None:
    x = torch.randn(100, requires_grad=True)
    first = Digesting(keeps=True)
    with first:
        out = x.exp()
    with Digesting(repeats=first):
        (x.detach() + 1).requires_grad_().exp()
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().exp(), rtol=0, atol=0)
