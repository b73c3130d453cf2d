"""The moments of Adam and AdamW in 8 bits, in torchao's form; the optimizer's own step, slice by slice, in float32.

Between steps a moment is torchao's `OptimState8bit`: codes, a scale for each 256 of them, a table. A step opens a slice
of a parameter's moments, has the optimizer itself step that slice, and closes it. The update sees moments as they were
before they are rounded again, as torchao's own AdamW8bit has it; unlike that it needs no compiler, and no learning rate
that is a tensor. What is no whole number of blocks, or small, stays as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.apply.optimizer_state.kept_space import kept_space
from memwall.apply.optimizer_state.low_bit_form import load_torchao, opened
from memwall.apply.optimizer_state.partial_step import Arguments, inner_step_of, step_some
from memwall.apply.optimizer_state.taken_step import TakenStep
from memwall.errors import ApplyError, MemwallError, StoreError
from memwall.predict.low_bit_moments import (
    BLOCK_ELEMENTS,
    DEVICE_SLICE_ELEMENTS,
    SLICE_ELEMENTS,
    can_be_low_bit,
)
from memwall.store.buckets import DiskBucket
from memwall.trace.optimizers import has_moments

# The moments, and whether they have a sign.
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
_FILLED_BYTES = 32 << 20
"""Bounds the parameters whose state, left in float32 by another process, comes into memory at a time to be closed."""


class LowBitMoments:
    """Holds the moments of one optimizer, some of them in 8 bits.

    Args:
        optimizer: torch's Adam or AdamW; all its parameters are on a CPU, or on one CUDA device.

    Raises:
        ApplyError: another optimizer, or torchao is missing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        if not has_moments(optimizer):
            raise ApplyError(
                "the plan keeps moments in 8 bits, which is known for torch.optim's Adam and AdamW, and "
                f"{kind.__module__}.{kind.__qualname__} steps this model; make a plan without --allow low-bit-optimizer"
            )
        self.optimizer = optimizer
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        self.inner_step = inner_step_of(optimizer, kept="in 8 bits", device=device)
        self._form = load_torchao()

    @property
    def num_closed(self) -> int:
        """Counts the tensors that are in 8 bits now."""
        return sum(isinstance(value, self._form) for state in self.optimizer.state.values() for value in state.values())

    def can_close(self, parameter: Tensor) -> bool:
        """Returns whether moments of this parameter are kept in 8 bits."""
        return parameter.dtype == torch.float32 and parameter.is_contiguous() and can_be_low_bit(parameter.numel())

    def close(self, parameters: Sequence[Tensor]) -> None:
        """Puts moments of these parameters into 8 bits, those that are there, can be and are not."""
        for parameter in parameters:
            state = self.optimizer.state.get(parameter)
            if not state or not self.can_close(parameter):
                continue
            for key in _MOMENTS.keys() & state.keys():
                moment = state[key]
                if not isinstance(moment, self._form) and not moment.is_meta:
                    state[key] = self.new(parameter, key)
                    for begin, end in _slices(parameter):
                        self.write(state[key], begin, end, moment.reshape(-1)[begin:end])

    def close_all(self) -> None:
        """Puts the moments of all parameters into 8 bits."""
        for group in self.optimizer.param_groups:
            self.close(group["params"])

    def new(self, parameter: Tensor, key: str) -> Any:
        """Returns a moment of zeros."""
        return self._form.zeros(parameter.shape, _MOMENTS[key], BLOCK_ELEMENTS, parameter.device, parameter.dtype)

    def write(self, moment: Any, begin: int, end: int, values: Tensor) -> None:
        """Closes a slice: codes and scales that torchao finds for it, found in half the time on a CPU.

        In place of torchao's own search for a code, a loop of operations on int64, torch's for a place in a sorted
        tensor (torchao/optim/quant_utils.py, `quantize_8bit_with_qmap`).
        """
        codes, scales, table = _part(moment, begin, end)
        blocks = values.view(-1, BLOCK_ELEMENTS)
        torch.amax(blocks.abs(), -1, out=scales).clip_(1e-12)
        scaled = (blocks / scales.view(-1, 1)).view(-1)
        below = torch.bucketize(scaled, table, out_int32=True, right=True).sub_(1).clamp_(min=0)
        halves = torch.nn.functional.pad((table[1:] - table[:-1]) * 0.5, (0, 1), value=torch.inf)
        rest = scaled.sub_(table[below])
        codes.copy_(below.add_(rest >= halves[below]))

    def opened(self, value: Any, begin: int, end: int) -> Any:
        """Returns a slice of a moment in float32; anything else, as the count of steps, for this slice alone."""
        if isinstance(value, self._form):
            return self._form(*_part(value, begin, end), value.signed, value.dtype).dequantize()
        return value.clone() if isinstance(value, Tensor) else value

    def copy(self, value: Tensor) -> Tensor:
        """As torch would have it."""
        if not isinstance(value, self._form):
            return value.clone()
        return opened(value.codes, value.scale, value.qmap)

    def open_all(self) -> None:
        """Makes all of them torch's again."""
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, self._form):
                    state[key] = self.copy(value)


class LowBitOptimizerState:
    """Keeps an optimizer's moments in 8 bits until `undo`; a run that is committed is told so."""

    is_on_disk = False
    buckets: Sequence[DiskBucket] = ()

    def __init__(self, moments: LowBitMoments) -> None:
        self.moments, self.optimizer = moments, moments.optimizer
        with torch.no_grad():
            moments.close_all()
        self._taken = TakenStep(
            self.optimizer,
            done_to_state="put its state into 8 bits",
            step=self._step_all,
            copier=lambda: moments.copy,
            after_load=moments.close_all,
        )
        self._space = kept_space()
        if self._space is not None:
            self._space.states.append(self)

    @property
    def failure(self) -> MemwallError | None:
        """Is the first error of a step."""
        return self._taken.failure

    @torch.no_grad()
    def undo(self) -> None:
        """Lets the optimizer step by itself again, on state as torch has it."""
        if self._space is not None:
            self._space.states.remove(self)
        self._taken.give_back()
        self.moments.open_all()

    def keeps_low_bits(self, parameter: Tensor) -> bool:
        """Returns whether the moments of this parameter are in 8 bits."""
        return self.moments.can_close(parameter)

    @torch.no_grad()
    def fill(self, load: Callable[[Sequence[Tensor]], None]) -> None:
        """Takes over the state of another process: what it had in 8 bits as it was, what it had in float32 closed."""
        for parameters in self._few_at_a_time():
            load(parameters)
            self.moments.close(parameters)

    def _few_at_a_time(self) -> Iterator[list[Tensor]]:
        few: list[Tensor] = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if few and sum(one.nbytes for one in (*few, parameter)) > _FILLED_BYTES:
                    yield few
                    few = []
                few.append(parameter)
        yield few

    def _step_all(self, arguments: Arguments) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise StoreError(
                "an optimizer's step is being captured into a CUDA graph, and its moments are in 8 bits, which a "
                "replay would not count on; leave optimizer.step() out of the graph, or plan without "
                "--allow low-bit-optimizer"
            )
        for number, group in enumerate(self.optimizer.param_groups):
            whole = []
            for parameter in group["params"]:
                if parameter.grad is not None and self.moments.can_close(parameter):
                    self._step_slices(number, parameter, arguments)
                else:
                    whole.append(parameter)
            step_some(self.optimizer, self.moments.inner_step, [(number, whole)], arguments)

    def _step_slices(self, number: int, parameter: Tensor, arguments: Arguments) -> None:
        """Gives the optimizer each slice as a parameter of its own, with its own state."""
        moments, every, state = self.moments, self.optimizer.state, self.optimizer.state[parameter]
        before = dict(state)
        gradient = parameter.grad
        assert gradient is not None
        scales = getattr(self.optimizer, "found_inf", None) is not None  # a scaler's, and only while it has it step
        for begin, end in _slices(parameter):
            piece = parameter.detach().view(-1)[begin:end]
            piece.grad = gradient.reshape(-1)[begin:end]
            if before:
                every[piece] = {key: moments.opened(value, begin, end) for key, value in before.items()}
            try:
                step_some(self.optimizer, moments.inner_step, [(number, [piece])], arguments)
            finally:
                stepped = every.pop(piece, {})
            if before and scales and torch.equal(stepped["step"], before["step"]):
                return  # a scaler left the step out inside the fused kernel: nothing is rounded again
            for key, value in stepped.items():
                if key not in _MOMENTS:
                    state[key] = value
                    continue
                if key not in state:
                    state[key] = moments.new(parameter, key)
                moments.write(state[key], begin, end, value)


def _part(moment: Any, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of a slice, which share its memory, and the table."""
    scales = moment.scale[begin // BLOCK_ELEMENTS : end // BLOCK_ELEMENTS]
    return moment.codes.view(-1)[begin:end], scales, moment.qmap


def _slices(tensor: Tensor) -> list[tuple[int, int]]:
    """Begins and end of each, in elements."""
    size, most = tensor.numel(), SLICE_ELEMENTS if tensor.device.type == "cpu" else DEVICE_SLICE_ELEMENTS
    return [(begin, min(begin + most, size)) for begin in range(0, size, most)]
