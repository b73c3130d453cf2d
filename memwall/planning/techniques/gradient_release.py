"""Gradient release: the optimizer steps parameters within backward, and their gradients are let go of at once."""

from collections import Counter
from collections.abc import Iterator, Sequence

from memwall.planning.action import Action
from memwall.planning.location import Location
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import Technique
from memwall.predict.gradient_release import flushes_of, with_gradients_released
from memwall.trace.optimizers import JOINT, STEPPED_ALONE, counted
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

# Gradients that are used together: enough that steps are few, and little beside all of them.
_WINDOW_BYTES = 64 << 20
_MIN_WINDOW_BYTES = 1 << 20
_WINDOW_SHARE = 1 / 32
# To call an optimizer's step once more, on parameters that are in the caches; and to launch one of its kernels.
_SECONDS_PER_CALL = 60e-6
_SECONDS_PER_LAUNCH = 8e-6


class GradientRelease(Action, frozen=True, kw_only=True, tag="gradient-release"):
    """Steps each parameter within backward, once its gradient is whole, and lets go of the gradient."""

    window_bytes: int
    """So many bytes of gradients are used together; one gradient may always be."""
    waiting: tuple[str, ...] = ()
    """Names of parameters whose gradients wait for the optimizer's step, as it was seen that they must."""

    def __post_init__(self) -> None:
        if self.exactness != "bit-exact":
            raise ValueError(f"a step within backward is bit-exact, not {self.exactness}")


class _GradientRelease(Technique[GradientRelease]):
    record = GradientRelease
    order = 15
    step_rank = 4
    allow = "gradient-release"
    allow_means = "the optimizer may step within backward; bit-exact for a loop whose steps are all alike"
    allow_exactness = "bit-exact"
    choice = "worth-freedom"
    advice_rank = 6

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        """Returns why gradients have to be there when the optimizer begins; None if they need not."""
        if self.allow not in allow:
            return "a loop that does otherwise later could train wrong; allow it with --allow gradient-release"
        use = steady_step(trace).gradient_use
        if trace.device not in ("cpu", "cuda"):
            return f"gradients are released in CPU and CUDA memory only; the trace is of device '{trace.device}'"
        if trace.num_micro_batches > 1:
            return "gradients of several backwards add up before the optimizer steps"
        if JOINT in trace.optimizer:
            return f"several optimizers step the model ({counted(trace.optimizer)})"
        if trace.optimizer not in STEPPED_ALONE:
            return f"{trace.optimizer or 'the optimizer'} is not known to step each parameter alone"
        if trace.autocast == "float16":
            return "gradients of float16 are scaled back before the optimizer steps"
        if use is None:
            return "the recording does not say what becomes of gradients; record the step again"
        return use.reason or None

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        if self.why_not(trace, (self.allow,)) is not None or self.allow in allow:
            return None
        return "step within backward, for a loop whose steps are all alike: --allow gradient-release"

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        trace, steady, settings = inputs.trace, inputs.steady, inputs.settings
        here = dict(settings.not_here).get(self.tag)
        reason = here or self.why_not(trace, settings.allow)
        if reason:
            return reason
        sizes = [s.nbytes for s in steady.storages if s.category == "gradient"]
        window_bytes = min(max(int(sum(sizes) * _WINDOW_SHARE), _MIN_WINDOW_BYTES), _WINDOW_BYTES)
        flushes = flushes_of(steady, window_bytes)
        freed_bytes = sum(flush.num_bytes for flush in flushes) - max((flush.num_bytes for flush in flushes), default=0)
        if freed_bytes <= 0:
            return "all gradients together are no more than what is used at once"
        use = steady.gradient_use
        action = GradientRelease(
            window_bytes=window_bytes,
            waiting=tuple(name for name, _ in use.waiting) if use is not None else (),
            saved_bytes=freed_bytes,
            cost_seconds=_seconds(trace, steady, len(flushes)),
        )
        return (Location(actions=(action,), keeps_batch_whole=True),)

    def step(self, trace: Trace, step: Step, action: GradientRelease) -> Step:
        return with_gradients_released(step, trace.names, window_bytes=action.window_bytes)

    def what(self, action: GradientRelease) -> str:
        return "step within backward, gradients released"

    def where(self, actions: Sequence[GradientRelease]) -> str:
        num_waiting = len(actions[0].waiting)
        return f"{num_waiting} gradients stay" if num_waiting else "everywhere"

    def lever(self, action: GradientRelease) -> str:
        return "gradients released within backward"

    def binding(self, trace: Trace, actions: Sequence[GradientRelease]) -> Iterator[str]:
        for action in actions:
            yield (
                f"the optimizer steps parameters within backward, {format_bytes(action.window_bytes)} of gradients at "
                "a time: a loop can neither clip gradients nor look at them, and a backward that runs out of memory is "
                "not done again"
            )


TECHNIQUE = _GradientRelease()


def _seconds(trace: Trace, steady: Step, num_flushes: int) -> float:
    """Returns how much longer a step takes than with all parameters stepped at once.

    Kernels that a device runs on all parameters together run on a few at a time now; others on one in any case.
    Where the recorded step had its state elsewhere, it stepped some at a time already, each with every kernel.
    """
    num_launches = 0.0
    if trace.device == "cuda":
        names = (trace.names[op.name] for op in steady.ops if op.phase == "optimizer")
        kernels = Counter(name for name in names if "_foreach_" in name or "_fused_" in name)
        num_launches = kernels.total() / min(kernels.values(), default=1)
    launch_seconds = steady.launch_seconds or _SECONDS_PER_LAUNCH
    return max(0, num_flushes - 1) * (_SECONDS_PER_CALL + num_launches * launch_seconds)
