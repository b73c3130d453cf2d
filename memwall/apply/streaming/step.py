"""An optimizer's step on parameters that are on disk: a window of them, with their gradients, in memory at a time.

It stands between the optimizer's own step and whoever calls that for some of its parameters, `OptimizerState` say.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from memwall.apply.optimizer_state.partial_step import Part, step_some
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.streamed_parameter import StreamedParameter


class StreamedStep:
    """Steps what is in memory anyway, then the rest window by window; it reads ahead in the order of the last step.

    Args:
        tier: has the parameters; its window is the one used here.
    """

    def __init__(self, tier: ParameterTier) -> None:
        self._tier = tier
        # Which parameter was stepped after which.
        self._after: dict[StreamedParameter, StreamedParameter] = {}
        self._last: StreamedParameter | None = None
        self._ahead: list[StreamedParameter] = []

    def end(self) -> None:
        """Says that a step is over: what is stepped next is not stepped after what was stepped last."""
        self._last = None
        self._stop_reading_ahead_but(())
        self._tier.end_phase()

    def around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step that brings in a window of the parameters that it steps."""

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            for part, members in self._windows(optimizer):
                with self._stepping(members):
                    step_some(optimizer, inner, part, (args, kwargs))

        return step

    def _windows(self, optimizer: torch.optim.Optimizer) -> list[tuple[Part, list[StreamedParameter]]]:
        """Lists what is stepped together, in order: all that is in memory anyway, then as much as the window holds."""
        standing: dict[int, list[Tensor]] = {}
        windows: list[tuple[dict[int, list[Tensor]], list[StreamedParameter]]] = []
        num_bytes = self._tier.window_bytes
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                member = self._tier.get(parameter)
                if member is None:
                    standing.setdefault(number, []).append(parameter)
                elif member.has_gradient:
                    if num_bytes + member.values.num_bytes > self._tier.window_bytes:
                        windows.append(({}, []))
                        num_bytes = 0
                    num_bytes += member.values.num_bytes
                    windows[-1][0].setdefault(number, []).append(parameter)
                    windows[-1][1].append(member)
        return [(tuple(part.items()), members) for part, members in ((standing, []), *windows) if part]

    @contextmanager
    def _stepping(self, members: Sequence[StreamedParameter]) -> Iterator[None]:
        """Has parameters and their gradients in memory, and begins to read those that came after them last time."""
        if members and self._last is not None:
            self._after[self._last] = members[0]
        for one, other in pairwise(members):
            self._after[one] = other
        if members:
            self._last = members[-1]
        following = self._next(members)
        self._stop_reading_ahead_but((*members, *following))
        self._ahead = following
        for member in (*members, *following):
            member.values.begin_read()
            member.gradient.begin_load()
        spilled = [member for member in members if member.gradient.handle is not None]
        self._tier.hold(members, is_exposed=True)
        try:
            for member in members:
                member.values.changed()
            for member in spilled:
                member.parameter.grad = member.gradient.load()
            yield
        finally:
            for member in spilled:
                member.parameter.grad = None
                member.gradient.unload()
            self._tier.release(members, is_exposed=True)

    def _stop_reading_ahead_but(self, members: Sequence[StreamedParameter]) -> None:
        """Lets go of what was read ahead in vain: steps may come in another order than the last time."""
        wrong = [member for member in self._ahead if member not in members]
        self._ahead = []
        self._tier.put_away(wrong)
        for member in wrong:
            member.gradient.unload()

    def _next(self, members: Sequence[StreamedParameter]) -> list[StreamedParameter]:
        """Returns as many of those to come as are stepped now, but one at least."""
        found: list[StreamedParameter] = []
        left_bytes = sum(member.values.num_bytes for member in members)
        following = self._after.get(members[-1]) if members else None
        while (
            following is not None and following.has_gradient and (not found or left_bytes >= following.values.num_bytes)
        ):
            found.append(following)
            left_bytes -= following.values.num_bytes
            following = self._after.get(following)
        return found
