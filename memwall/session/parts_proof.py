"""Proves that parts of a batch have the gradient of the whole: of one micro-batch and of its two halves, which fit.

Both are added up in the parameters' own gradients, the whole one with its sign turned, so that what is left is their
difference, and no memory is taken for a second gradient. What the script can tell of them is put back: gradients, of
parameters outside of the model too, buffers, and random numbers. What a forward counts in plain attributes is not.

The comparison belongs to the step in two ways: what it needs counts in the step's peak, and calls of blocks in it show
that recompute and offload have an effect (`memwall.apply.effect`). Their proofs are made again in the step itself.

A false alarm would end a run that is right, so that only what nothing else explains ends it.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.applied import AppliedPlan
from memwall.apply.blocks.digests import pieces
from memwall.apply.blocks.held_values import is_generator
from memwall.apply.memory.exhaustion import is_exhaustion
from memwall.apply.microbatch import MicroBatches, count_terms, num_samples, take
from memwall.apply.precision import leaves
from memwall.apply.streaming.guard import GuardedParameter
from memwall.apply.streaming.stream_units import hooked_parameters
from memwall.checkpoint.companions import generator_state, set_generator_state
from memwall.checkpoint.reachable import reachable
from memwall.checkpoint.redivision import are_equal
from memwall.checkpoint.training_state import random_states, restore_random_states
from memwall.errors import MemwallError, NotExactError
from memwall.machine.process_group import num_processes
from memwall.session.step_state import StepState
from memwall.trace.gradients.gradient_hooks import has_foreign_hook

ROUNDING_RATIO = 1e-3
"""The most that gradients of the same mathematics differ by in single precision, as a share of their norm."""
_LOW_PRECISION_RATIO = 3e-2
"""The same where arithmetic is in half precision, which a loop does not say of itself."""
_HIGH_PRECISION = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_LEAST_SCALE = 1e-2
"""The least that a gradient must be, as a share of that at the first proof: a model that fits its data has noise."""
# Larger buffers outside of the model are tables, as a rule.
_SMALL_BYTES = 1 << 20


class PartsProof:
    """Compares parts with their halves under each plan that divides batches, and knows what could not be.

    What was proven is again every 1,000 steps, when actions prove themselves.

    Args:
        note: is told why parts of the run so far could not be compared, whenever there is more to say of that.
    """

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self._tell = note
        self._past = self._present = ""
        self._current: Callable[[], AppliedPlan | None] = lambda: None
        """Returns the plan that `_present` is said of, while that is there."""
        self._is_settled = False
        self._proven_at, self._scale = 0, 0.0
        """Steps under the present plan when it was last to be proven, and how large gradients were at first."""

    @property
    def unproven(self) -> str:
        """Returns why parts that the run has taken, under whichever plan, could not be compared; "" where all were."""
        return self._past or self._present

    def knows(self, applied: AppliedPlan | None) -> bool:
        """Returns whether nothing of a plan is left to be compared."""
        if applied is None or applied.micro.micro_batch is None:
            return True
        is_known = self._is_settled and applied is self._current()
        return is_known and (bool(self._present) or not applied.is_proof_due(self._proven_at))

    def not_asked(self, applied: AppliedPlan | None) -> None:
        """Notes that a loop takes parts without a function that computes their losses."""
        if applied is not None and not self.knows(applied):
            self._note(applied, "the loop computes its losses itself", is_settled=False)

    def before_step(
        self,
        applied: AppliedPlan | None,
        batch: Any,
        loss_of: Callable[[Any], Tensor],
        count: Callable[[Any], int] | None,
    ) -> None:
        """Compares, before the first step under a plan that divides its batch, and before later ones now and then.

        Raises:
            NotExactError: the parts have another gradient; none of them is left in the parameters.
        """
        if applied is None or self.knows(applied):
            return
        micro, size, at = applied.micro, num_samples(batch), applied.num_steps
        assert micro.micro_batch is not None
        if micro.micro_batch >= size:
            return
        reason = _why_not(applied.model, micro.micro_batch)
        if reason:
            self._note(applied, reason)
        else:
            counter = count or (lambda some: count_terms(some, is_shifted=micro.shifts_labels))
            begins = range(0, size - micro.micro_batch + 1, micro.micro_batch)
            parts = (take(batch, begin, begin + micro.micro_batch, size) for begin in begins)
            part = next((part for part in parts if all(counter(half) for half in _halves(part))), None)
            if part is None:
                self._note(applied, "no part so far has loss terms in both of its halves", is_settled=False)
            else:
                self._note(applied, self._prove(applied, part, loss_of, counter))
        self._proven_at = at

    def _prove(
        self, applied: AppliedPlan, part: Any, loss_of: Callable[[Any], Tensor], counter: Callable[[Any], int]
    ) -> str:
        """Compares a part with its halves; returns why that says nothing, or ""."""
        is_first = applied is not self._current() or not self._is_settled
        ratio, doubt, scale = _compare(applied, applied.micro, part, loss_of, counter)
        if is_first:
            self._scale = scale
        if not doubt and ratio > ROUNDING_RATIO and scale >= _LEAST_SCALE * self._scale:
            raise NotExactError(
                action=f"dividing the batch into parts of {applied.micro.micro_batch}",
                found=(
                    f"the gradient of {applied.micro.micro_batch} samples is not that of its halves together, it "
                    f"differs by {ratio:.0%}: the loss is no mean over samples, or over as many terms as are counted "
                    "(give the number of terms by `count`, or a budget in which the batch fits undivided)"
                ),
            )
        return doubt

    def _note(self, applied: AppliedPlan, reason: str, *, is_settled: bool = True) -> None:
        """Notes what became of a plan's proof; what steps under earlier plans were not proven stays said.

        A later comparison that says nothing takes back nothing of what was proven.
        """
        if applied is not self._current():
            self._past, self._current = self.unproven, weakref.ref(applied)
        elif self._is_settled and not self._present:
            return
        self._present, self._is_settled = reason, is_settled
        self._tell(self.unproven)


class _Kept:
    """Holds what a comparison changes, and the gradients that it adds up.

    Attributes:
        has_hook: whether somebody's hook runs when a gradient outside of the model is there.
        scale: the larger norm of the halves' gradients so far.
    """

    def __init__(self, applied: AppliedPlan) -> None:
        self._random = random_states()
        self._state = StepState(applied.model)
        self._state.take()
        self._own = {id(parameter): parameter for parameter in applied.model.parameters()}
        self._outside: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.has_hook, self.scale = False, 0.0
        found = [value for _, value in reachable()]
        self._generators = [(value, generator_state(value)) for value in found if is_generator(value)]
        own = {id(buffer) for buffer in applied.model.buffers()}
        modules = [value for value in found if isinstance(value, nn.Module)]
        buffers = {id(buffer): buffer for module in modules for buffer in module.buffers() if type(buffer) is Tensor}
        small = [b for key, b in buffers.items() if key not in own and b.nbytes <= _SMALL_BYTES]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in small]
        for optimizer in applied.optimizers:
            self._set_aside(parameter for group in optimizer.param_groups for parameter in group["params"])

    @property
    def gradients(self) -> list[Tensor]:
        """Returns the gradients that are there."""
        tensors = [*self._own.values(), *(tensor for tensor, _ in self._outside.values())]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def add(self, loss: Tensor, weight: float) -> None:
        """Adds the gradient of a loss, times its weight; not where somebody's hook would run."""
        if loss.grad_fn is not None:
            self._set_aside(leaves((loss,)))
        if not self.has_hook:
            (loss * weight).backward()

    @torch.no_grad()
    def clear(self) -> None:
        """Makes every gradient zero."""
        for gradient in self.gradients:
            gradient.zero_()

    def has_drawn(self) -> bool:
        """Returns whether random numbers were drawn since."""
        now = random_states()
        return not all(are_equal(now.get(key), state) for key, state in self._random.items()) or not all(
            are_equal(generator_state(generator), state) for generator, state in self._generators
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts back gradients, buffers and random numbers as they were before the comparison."""
        self._state.restore()
        for tensor, gradient in self._outside.values():
            tensor.grad = gradient
        for buffer, copied in self._buffers:
            if not buffer.is_inference():
                buffer.copy_(copied)
        restore_random_states(self._random)
        for generator, state in self._generators:
            set_generator_state(generator, state)

    def _set_aside(self, tensors: Iterable[Tensor]) -> None:
        """Takes the gradients that tensors outside of the model have away, until all is put back."""
        for tensor in tensors:
            if id(tensor) not in self._own and id(tensor) not in self._outside:
                self._outside[id(tensor)] = (tensor, tensor.grad)
                self.has_hook = self.has_hook or has_foreign_hook(tensor)
                tensor.grad = None


def _why_not(model: nn.Module, micro_batch: int) -> str:
    """Returns why a part cannot be compared with its halves before the step."""
    if micro_batch < 2:
        return "the parts are of one sample, and more do not fit"
    if num_processes() > 1:
        return "several ranks train together"
    if any(isinstance(parameter, GuardedParameter) for parameter in model.parameters()):
        return "parameters and gradients leave memory"
    hooked = next((name for name, _ in hooked_parameters(model)), None)
    if hooked is not None:
        return f"a hook runs when the gradient of {hooked} is there"
    if any(bool(_dense(p.grad).any()) for p in model.parameters() if p.grad is not None):
        return "gradients from before the step are there"
    return ""


def _compare(
    applied: AppliedPlan,
    micro: MicroBatches,
    part: Any,
    loss_of: Callable[[Any], Tensor],
    counter: Callable[[Any], int],
) -> tuple[float, str, float]:
    """Returns by which share the gradient of a part differs from its halves', why that says nothing, or "", and the
    larger norm of theirs."""
    kept = _Kept(applied)
    micro.is_comparing = True
    try:
        ratio, doubt = _difference(kept, part, loss_of, counter)
        return ratio, doubt, kept.scale
    finally:
        micro.is_comparing = False
        kept.put_back()
        applied.prove_again()


def _difference(
    kept: _Kept, part: Any, loss_of: Callable[[Any], Tensor], counter: Callable[[Any], int]
) -> tuple[float, str]:
    """Returns what `_compare` does, and leaves gradients behind."""
    total, scale = counter(part), 0.0
    for half in _halves(part):
        try:
            loss = loss_of(half)
        except Exception as error:
            if isinstance(error, MemwallError) or is_exhaustion(error):
                raise
            return math.nan, f"the loss of half a part cannot be computed ({type(error).__name__})"
        kept.add(loss, counter(half) / total)
        del loss
        # Where the halves all but cancel out, rounding is small beside either of them and not beside their sum.
        norm = _norm(kept.gradients)
        kept.scale = scale = max(scale, norm) if math.isfinite(norm) else math.inf
    kept.add(loss_of(part), -1.0)
    if kept.has_hook:
        return math.nan, "a hook runs when the gradient of a parameter outside of the model is there"
    ratio = _norm(kept.gradients) / scale if 0.0 < scale < math.inf else math.nan
    if ratio <= ROUNDING_RATIO:
        return ratio, ""
    if kept.has_drawn():
        return ratio, "its forward draws random numbers, other ones in each part"
    if not math.isfinite(ratio):
        return ratio, "the gradient of a part is not finite" if scale else "the gradient of the halves is zero"
    if ratio <= _LOW_PRECISION_RATIO or any(gradient.dtype not in _HIGH_PRECISION for gradient in kept.gradients):
        return ratio, f"the gradients differ by {ratio:.1%}, which rounding in half precision may do"
    kept.clear()
    kept.add(loss_of(part), 1.0)
    kept.add(loss_of(part), -1.0)
    if not _norm(kept.gradients) <= ROUNDING_RATIO * scale:
        return ratio, "the gradient of the same samples is another one each time"
    return ratio, ""


def _halves(part: Any) -> tuple[Any, Any]:
    """Returns the first and the second half of a part's samples."""
    size = num_samples(part)
    return take(part, 0, size // 2, size), take(part, size // 2, size, size)


def _norm(gradients: Iterable[Tensor]) -> float:
    """Returns the norm of all gradients together, computed piece by piece: in float64 each would be copied."""
    norms: dict[torch.device, list[Tensor]] = {}
    for gradient in map(_dense, gradients):
        for piece in pieces(gradient, is_copied=True) if gradient.numel() else ():
            norms.setdefault(piece.device, []).append(torch.linalg.vector_norm(piece, dtype=torch.float64))
    return math.sqrt(sum(float(torch.stack(each).square().sum()) for each in norms.values()))


def _dense(gradient: Tensor) -> Tensor:
    """Returns the numbers in a gradient, which are its own if it is dense."""
    dense = gradient.detach()
    if dense.layout is torch.sparse_coo:
        dense = dense.coalesce().values()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
