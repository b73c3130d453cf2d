"""The optimizer's moments in 8 bits, where the user allowed it: what that frees and what it costs."""

from memwall.planning.actions import LowBitState
from memwall.planning.legality import can_keep_low_bits
from memwall.predict.low_bit_state import low_bit_bytes, low_bit_elements
from memwall.trace.build import steady_step
from memwall.trace.records import Step, Trace

__all__ = ["LIBRARY_BYTES", "low_bit_state", "why_no_low_bits"]

LIBRARY_BYTES = 12 << 20
"""What importing torchao adds to a process with an optimizer, for which torch imports the most of the same (torchao
0.18, torch 2.13, Linux; the first line of benchmarks/low_bit_state.py)."""
# To open and close one element of a moment on one core, 40 to 50 ns; two take half (two cores, torch 2.13, the same
# line).
_SECONDS_PER_ELEMENT = 40e-9


def low_bit_state(trace: Trace, steady: Step) -> LowBitState:
    """The action for a step in which it is legal."""
    elements = low_bit_elements(steady)
    return LowBitState(
        saved_bytes=sum(4 * number - low_bit_bytes(number) for number in elements),
        cost_seconds=sum(elements) * _SECONDS_PER_ELEMENT / max(1, trace.num_threads),
    )


def why_no_low_bits(trace: Trace, allow: tuple[str, ...]) -> str | None:
    """Why the moments of a trace's optimizer cannot be in 8 bits; None where they can."""
    return can_keep_low_bits(trace, sum(low_bit_elements(steady_step(trace))), allow)
