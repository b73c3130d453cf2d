"""Compiled graphs: the compiler's partitioner saves less of each graph's forward, whose backward computes it again.

What that gives and costs is known from a step that runs such code, so the action is part of the step that is recorded.
"""

from collections.abc import Sequence

from memwall.planning.action import Action, Exactness
from memwall.planning.technique import Technique
from memwall.trace.records import COMPILED_CODE, Trace


class CompiledGraphs(Action, frozen=True, kw_only=True, tag="compiled-graphs"):
    """Has compiled graphs save less of their forwards, and compute it again in their backwards."""

    ratio: float
    """Part that is saved, as torch's activation_memory_budget counts it: 1 what the compiler would save, 0 nothing."""
    exactness: Exactness = "equivalent"

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"ratio is {self.ratio}; expected 0 to 1")


class _CompiledGraphs(Technique[CompiledGraphs]):
    record = CompiledGraphs
    order = 33
    allow = "graphs"
    allow_means = "compiled graphs may compute again what they save; other kernels may round at other points"
    allow_exactness = "equivalent"
    advice_rank = 3
    is_seen_recorded = True

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        if self.allow not in allow:
            return "compiled graphs that save less may round at other points; allow it with --allow graphs"
        if COMPILED_CODE not in trace.names:
            return "no compiled code runs in the step"
        return None

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        if self.allow in allow or self.why_not(trace, (self.allow,)) is not None:
            return None
        return "let compiled graphs compute again what they save: --allow graphs"

    def what(self, action: CompiledGraphs) -> str:
        return f"compiled graphs save {action.ratio:.0%}"

    def where(self, actions: Sequence[CompiledGraphs]) -> str:
        return "compiled code"

    def lever(self, action: CompiledGraphs) -> str:
        return "recompute in compiled graphs"


TECHNIQUE = _CompiledGraphs()
