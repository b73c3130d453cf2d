"""Accumulation handler: splits batches, and weighs each part's loss as the undivided batch would.

The gradient of the undivided batch is the sum over all loss terms divided by their number. A part that returns the
mean over its own terms therefore counts with its share of the terms; parts are never weighed alike by default.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memwall.errors import ApplyError
from memwall.machine.process_group import num_processes

# transformers and torch.nn.functional.cross_entropy leave labels of this value out of the mean.
IGNORED_LABEL = -100


class MicroBatches:
    """Splits batches into parts of at most `micro_batch` samples; None leaves them whole."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        self.shifts_labels = True
        """Whether the model compares position t with label t+1, as a causal language model does."""
        self.num_left = 0
        """Parts of the present batch that the loop has not taken yet."""
        self.is_comparing = False
        """Whether parts are compared with each other, by calls of the model that are no part of the step."""
        self._weight: float | None = None
        self._without_reduction: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._divided: set[tuple[torch.Size, torch.dtype]] = set()

    def divide_into(self, micro_batch: int | None) -> None:
        """Sets the size of the parts of batches that come from here on, in samples; None leaves them whole."""
        self.micro_batch = micro_batch

    def follow(self, model: nn.Module) -> None:
        """Counts loss terms from here on as this model does."""
        self.shifts_labels = shifts_labels(model)
        if isinstance(model, DistributedDataParallel):
            self._without_reduction = model.no_sync

    def split(
        self, batch: Any, count: Callable[[Any], int] | None, *, total_of: Callable[[int], float] = float
    ) -> Iterator[Any]:
        """Yields the parts one after the other; `backward` is to be called within each.

        Under DistributedDataParallel gradients are reduced with those of the last part alone.

        Args:
            total_of: by how many loss terms those of a part are divided, from the number of terms in the batch.
        """
        size = num_samples(batch)
        part = self.micro_batch or size
        total = total_of(self.num_terms(batch, count))
        if total == 0:
            raise ApplyError("the batch has no loss term (all labels are ignored); skip this batch")
        begins = range(0, size, part)
        try:
            for number, begin in enumerate(begins):
                micro = batch if part >= size else take(batch, begin, min(begin + part, size), size)
                self._weight = self.num_terms(micro, count) / total
                self.num_left = len(begins) - number - 1
                self._divided = _kinds_in(batch) - _kinds_in(micro)
                with self._without_reduction() if self.num_left else nullcontext():
                    yield micro
        finally:
            self._weight, self.num_left, self._divided = None, 0, set()

    def num_terms(self, batch: Any, count: Callable[[Any], int] | None) -> int:
        """Returns the number of loss terms in a batch, or a part of it, by the loop's own count where it has one."""
        return count_terms(batch, is_shifted=self.shifts_labels) if count is None else count(batch)

    def is_undivided(self, tensor: Tensor) -> bool:
        """Returns whether it looks like a tensor of the batch that is divided, and like none of the present part."""
        return (tensor.shape, tensor.dtype) in self._divided

    def backward(self, loss: Tensor) -> Tensor:
        """Runs backward of the present part's mean loss, with its weight; returns that share of the batch's loss.

        A part without a loss term has no mean, where it is computed as 0/0; then it adds nothing to loss and gradient.
        """
        if self._weight is None:
            raise ApplyError("session.backward(loss) was called outside `for micro in session.step(batch)`")
        if self._weight == 0.0 and not bool(loss.detach().isfinite().all()):
            if num_processes() > 1:  # others wait for this backward
                (loss * 0.0).backward()
            return torch.zeros_like(loss.detach())
        share = loss if self._weight == 1.0 else loss * self._weight
        share.backward()
        return share.detach()


def num_samples(batch: Any) -> int:
    """Returns the number of samples in a batch: the first dimension of its first tensor.

    Raises:
        ApplyError: there is no tensor with a dimension in it.
    """
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            raise ApplyError("the batch is a tensor without dimensions; samples are counted in the first one")
        return batch.shape[0]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for value in values:
        if isinstance(value, (list, tuple, Mapping)) or (isinstance(value, Tensor) and value.dim() > 0):
            return num_samples(value)
    raise ApplyError(
        f"a batch of type {type(batch).__name__} holds no tensor; pass a tensor, tuple, list or dict of them"
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Returns the tensors in a batch, or in what a model returned: in dictionaries, lists and tuples, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def take(batch: Any, begin: int, end: int, size: int) -> Any:
    """Returns samples [begin, end) of a batch of `size`; what has not that many in its first dimension stays whole."""
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() > 0 and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        parts = {key: take(value, begin, end, size) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take(value, begin, end, size) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(take(value, begin, end, size) for value in batch)
    return batch


def count_terms(batch: Any, *, is_shifted: bool = True) -> int:
    """Returns the number of loss terms of a batch: labels that count where there are any, else samples.

    Args:
        is_shifted: whether of labels [samples, positions] the first position is never compared with.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return num_samples(batch)
    if labels.dim() > 1 and is_shifted:
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def _kinds_in(batch: Any) -> set[tuple[torch.Size, torch.dtype]]:
    return {(tensor.shape, tensor.dtype) for tensor in tensors_in(batch)}


def shifts_labels(model: nn.Module) -> bool:
    """Returns whether a model of transformers compares position t with label t+1; one that is not of transformers may.

    Encoder-decoder models shift their input instead, and those that label tokens compare them as they stand.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return not type(model).__name__.endswith(("ForMaskedLM", "ForTokenClassification", "ForPreTraining"))
