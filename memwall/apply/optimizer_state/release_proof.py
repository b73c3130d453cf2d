"""Proves that parameters stepped within backward are what the optimizer's own step makes of them, bit for bit.

What a few small parameters began with is copied, their gradients and state with it. When the optimizer steps, it steps
these copies, all of them at once and with what its groups say by then.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memwall.apply.blocks.digests import difference, digest_of
from memwall.apply.optimizer_state.partial_step import Arguments, step_some
from memwall.errors import NotExactError

_MAX_BYTES = 256 << 10
"""Parameters that are copied in one step, with twice or three times that for gradients and state."""


class _Taken(NamedTuple):
    group: int
    parameter: Tensor
    copy: Tensor
    state: dict[str, Any]


class ReleaseProof:
    """Compares a few parameters in one step."""

    def __init__(self) -> None:
        self.is_on = False
        self._taken: list[_Taken] = []
        self._left_bytes = 0

    def begin_step(self) -> None:
        """Forgets the last step."""
        self._taken, self._left_bytes = [], _MAX_BYTES if self.is_on else 0

    def take(self, optimizer: torch.optim.Optimizer, group: int, parameters: Sequence[Tensor]) -> None:
        """Copies those that are small enough, before they are stepped."""
        for parameter in parameters:
            if parameter.nbytes <= self._left_bytes and parameter.grad is not None:
                self._left_bytes -= parameter.nbytes
                copy = torch.nn.Parameter(parameter.detach().clone())
                copy.grad = parameter.grad.clone()
                state = dict(optimizer.state.get(parameter, {}))
                cloned = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
                self._taken.append(_Taken(group, parameter, copy, cloned))

    def check(self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], arguments: Arguments) -> None:
        """Steps the copies.

        Raises:
            NotExactError: a parameter or its state came out different within backward.
        """
        taken, self._taken = self._taken, []
        parts = {one.group: [other.copy for other in taken if other.group == one.group] for one in taken}
        for one in taken:
            if one.state:
                optimizer.state[one.copy] = one.state
        try:
            step_some(optimizer, inner, sorted(parts.items()), arguments)
            for one in taken:
                made, expected = optimizer.state.get(one.parameter, {}), optimizer.state.get(one.copy, {})
                pairs = [(one.parameter, one.copy)]
                pairs += [(made.get(key), value) for key, value in expected.items() if isinstance(value, Tensor)]
                if any(difference([digest_of(b)], [digest_of(a)]) for a, b in pairs):
                    raise NotExactError(
                        action="stepping within backward",
                        found=f"a parameter {list(one.parameter.shape)} or its state is not what the optimizer's own "
                        "step makes of it",
                        way_out="Some parameters are stepped, so the run ends: begin again without --allow "
                        "gradient-release, and report it with the model",
                    )
        finally:
            for one in taken:
                optimizer.state.pop(one.copy, None)
