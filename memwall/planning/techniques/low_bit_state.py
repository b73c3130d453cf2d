"""Low-bit state: the moments of Adam and AdamW are in 8 bits between steps; a step opens them slice by slice."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

from memwall.errors import IntegrationError
from memwall.planning.action import Action, Exactness
from memwall.planning.location import Location
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import Technique
from memwall.predict.low_bit_moments import device_seconds, low_bit_bytes, low_bit_elements, with_low_bit_state
from memwall.trace.optimizers import WITH_MOMENTS
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

LIBRARY_BYTES = 12 << 20
"""Importing torchao adds so much to a process with an optimizer, for which torch imports the most of the same (torchao
0.18, torch 2.13, Linux; the first line of benchmarks/low_bit_state.py)."""
# To open and close one element of a moment on one core, 40 to 50 ns; two take half (two cores, torch 2.13, the same
# line).
_SECONDS_PER_ELEMENT = 40e-9


class LowBitState(Action, frozen=True, kw_only=True, tag="low-bit-state"):
    """Keeps the moments of Adam and AdamW in 8 bits between steps; a step opens them slice by slice."""

    bits: Literal[8] = 8
    exactness: Exactness = "changes-numerics"


class _LowBitState(Technique[LowBitState]):
    record = LowBitState
    order = 22
    step_rank = 2
    allow = "low-bit-optimizer"
    allow_means = "moments of Adam and AdamW may be kept in 8 bits, which changes numerics"
    choice = "worth-digits"
    advice_rank = 5

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        if self.allow not in allow:
            return "optimizer state in 8 bits changes numerics; allow it with --allow low-bit-optimizer"
        if trace.device not in ("cpu", "cuda"):
            return f"optimizer state is kept in 8 bits in CPU and CUDA memory only; the step is for '{trace.device}'"
        if trace.optimizer not in WITH_MOMENTS:
            return (
                f"only moments of {' and '.join(WITH_MOMENTS)} are kept in 8 bits; {trace.optimizer or 'nothing'} steps"
            )
        if sum(low_bit_elements(steady_step(trace))) == 0:
            return f"{trace.optimizer} has no moment in float32 of 4,096 elements or more, in whole blocks of 256"
        if find_spec("torchao") is None:
            return "optimizer state in 8 bits is kept by torchao, which is not installed: pip install torchao"
        return None

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        if self.why_not(trace, (self.allow,)) is not None or self.allow in allow:
            return None
        return f"keep {trace.optimizer}'s moments in 8 bits, which changes numerics: --allow low-bit-optimizer"

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        if not inputs.settings.can_move_state:
            return ()
        reason = self.why_not(inputs.trace, inputs.settings.allow)
        if reason is not None:
            return reason
        elements = low_bit_elements(inputs.steady)
        action = LowBitState(
            saved_bytes=sum(4 * number - low_bit_bytes(number) for number in elements),
            cost_seconds=_seconds(inputs.trace, inputs.steady),
        )
        # A device's budget has no libraries in it.
        is_free = inputs.settings.is_torchao_loaded or inputs.trace.device != "cpu"
        grown_bytes = 0 if is_free else LIBRARY_BYTES
        return (Location(actions=(action,), grown_bytes=grown_bytes),)

    def step(self, trace: Trace, step: Step, action: LowBitState) -> Step:
        return with_low_bit_state(step)

    def what(self, action: LowBitState) -> str:
        return f"optimizer state in {action.bits} bits, lossy"

    def where(self, actions: Sequence[LowBitState]) -> str:
        return "between steps"

    def lever(self, action: LowBitState) -> str:
        return "optimizer state in 8 bits, lossy"

    def binding(self, trace: Trace, actions: Sequence[LowBitState]) -> Iterator[str]:
        for action in actions:
            yield (
                f"the optimizer's moments are in {action.bits} bits between steps, "
                f"{format_bytes(action.saved_bytes or 0)} less; each is off by up to half of a step of torchao's "
                "table, and updates with it"
            )

    def deepspeed(self, action: LowBitState) -> None:
        raise IntegrationError(
            "the plan keeps the optimizer's moments in 8 bits, which DeepSpeed's optimizers do not; make a plan "
            "without --allow low-bit-optimizer"
        )


TECHNIQUE = _LowBitState()


def _seconds(trace: Trace, steady: Step) -> float:
    """Returns how much longer a step takes that opens and closes moments."""
    if trace.device == "cpu":
        return sum(low_bit_elements(steady)) * _SECONDS_PER_ELEMENT / max(1, trace.num_threads)
    return device_seconds(steady)
