"""The optimizer's step on the CPU: a device's state is in host memory, and parameters pass by it instead."""

from collections.abc import Iterator, Sequence

from memwall.errors import UsageError
from memwall.planning.action import Action, Exactness
from memwall.planning.location import Location, can_move_optimizer_state
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import DeepSpeedPart, Technique
from memwall.predict.cpu_step_pipeline import STEPPED_DTYPES, gradient_bytes, pipelined_seconds, staging_bytes
from memwall.predict.state_on_disk import movable_state_bytes, with_state_on_disk
from memwall.trace.optimizers import WITH_MOMENTS
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

# Large enough to keep the link busy, and little memory.
_BUCKET_BYTES = 16 << 20
# The CPU has all of the state; the counter of a parameter's steps is no larger, and is left out.
_MIN_STEPPED_BYTES = 16
_HOW_TO_STEP_ON_CPU = "make the plan with `memwall plan SPEC --device NAME --host SIZE --allow cpu-optimizer-step`"


class StepOnCpu(Action, frozen=True, kw_only=True, tag="cpu-step"):
    """Has the CPU step Adam or AdamW of parameters on CUDA: all state is in host memory, parameters pass by."""

    bucket_bytes: int
    """So many bytes of parameters come down, are stepped and go up as one."""
    min_bytes: int
    """Smaller tensors of state stay where torch makes them."""
    exactness: Exactness = "changes-numerics"

    def __post_init__(self) -> None:
        if self.exactness != "changes-numerics":
            raise ValueError(f"a step on the cpu is changes-numerics, not {self.exactness}")


class _CpuStep(Technique[StepOnCpu]):
    record = StepOnCpu
    order = 21
    step_rank = 1
    allow = "cpu-optimizer-step"
    allow_means = "the CPU may step a CUDA device's parameters beside their state; it rounds otherwise than the device"
    uses_tier = True
    choice = "worth-digits"

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        if self.allow not in allow:
            return "a step on the CPU rounds otherwise than on the device; allow it with --allow cpu-optimizer-step"
        if trace.device != "cuda":
            return f"a step is taken to the CPU from CUDA only; the step is for '{trace.device}'; {_HOW_TO_STEP_ON_CPU}"
        if trace.optimizer not in WITH_MOMENTS:
            names = " and ".join(WITH_MOMENTS)
            return f"only {names} are stepped on the CPU; {trace.optimizer or 'nothing'} steps"
        others = _gradient_bytes_by_dtype(steady_step(trace)).keys() - {*STEPPED_DTYPES}
        if others:
            known = " or ".join(STEPPED_DTYPES)
            return f"the CPU steps parameters in {known}; here are some in {', '.join(sorted(others))}"
        if trace.machine.next_tier is None:
            return "a step on the CPU has its state in host memory; pass --host SIZE together with --device NAME"
        if not _bytes_per_second(trace):
            return f"it is not known how fast the CPU steps; {_HOW_TO_STEP_ON_CPU}, which measures it"
        return None

    def check_device(self, device: str) -> None:
        if device != "cuda":
            raise UsageError(
                f"cpu-optimizer-step is allowed to a run whose model is on '{device}', and a step is taken to the CPU "
                "from CUDA only: leave it out of what is allowed, or move the model to CUDA first; for a device that "
                f"is not here {_HOW_TO_STEP_ON_CPU}"
            )

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        trace, steady = inputs.trace, inputs.steady
        if not inputs.settings.can_move_state:
            return ()
        state_bytes, staged_bytes = (
            movable_state_bytes(steady, _MIN_STEPPED_BYTES),
            staging_bytes(steady, _BUCKET_BYTES),
        )
        reason = self.why_not(trace, inputs.settings.allow)
        reason = reason or can_move_optimizer_state(trace, state_bytes, inputs.capacity_bytes)
        if reason is not None:
            return reason
        if state_bytes + staged_bytes > inputs.capacity_bytes:
            return f"state and staging need {format_bytes(state_bytes + staged_bytes)} of host memory"
        action = StepOnCpu(
            bucket_bytes=_BUCKET_BYTES,
            min_bytes=_MIN_STEPPED_BYTES,
            saved_bytes=state_bytes,
            cost_seconds=_cpu_step_seconds(trace, steady, state_bytes),
        )
        # State stays where it is stepped; parameters and gradients come down, and parameters go up.
        lowered_bytes = 2 * gradient_bytes(steady)
        return (
            Location(
                actions=(action,),
                away_bytes=state_bytes,
                staging_bytes=staged_bytes,
                written_bytes=lowered_bytes,
                read_bytes=lowered_bytes // 2,
            ),
        )

    def step(self, trace: Trace, step: Step, action: StepOnCpu) -> Step:
        return with_state_on_disk(
            step, resident_bytes=0, bucket_bytes=action.bucket_bytes, min_bytes=action.min_bytes, comes_back=False
        )

    def what(self, action: StepOnCpu) -> str:
        return "optimizer state to host, stepped on the CPU"

    def where(self, actions: Sequence[StepOnCpu]) -> str:
        return "between steps"

    def lever(self, action: StepOnCpu) -> str:
        return "optimizer state to host"

    def binding(self, trace: Trace, actions: Sequence[StepOnCpu]) -> Iterator[str]:
        for action in actions:
            yield (
                f"{format_bytes(action.saved_bytes or 0)} of optimizer state are in host memory, where the CPU steps "
                f"it with {_kernel_text(trace)}: gradients and parameters come down in each step and "
                "parameters go up, and the CPU rounds otherwise than the device"
            )

    def against(self, trace: Trace, actions: Sequence[Action], rejected: Location) -> Iterator[str]:
        on_cpu = next(action for action in rejected.actions if isinstance(action, StepOnCpu))
        for action in actions:
            if action.__struct_config__.tag == "optimizer-placement":
                yield (
                    f"the CPU, with {_kernel_text(trace)}, would make a step "
                    f"{on_cpu.cost_seconds or 0.0:.3g} s "
                    f"longer; state through the device makes it {action.cost_seconds or 0.0:.3g} s longer"
                )

    def deepspeed(self, action: StepOnCpu) -> DeepSpeedPart:
        return DeepSpeedPart(state_tier="host", bucket_bytes=action.bucket_bytes)

    def host_state_bytes(self, action: StepOnCpu) -> int:
        return action.saved_bytes or 0

    def staged_bytes(self, steady: Step, action: StepOnCpu) -> tuple[int, int]:
        return staging_bytes(steady, action.bucket_bytes), 2 * gradient_bytes(steady)


TECHNIQUE = _CpuStep()


def _gradient_bytes_by_dtype(step: Step) -> dict[str, int]:
    """Returns the bytes of a step's gradients in each dtype; what has none is in float32."""
    found: dict[str, int] = {}
    for storage in step.storages:
        if storage.category == "gradient":
            dtype = storage.dtype or "float32"
            found[dtype] = found.get(dtype, 0) + storage.nbytes
    return found


def _bytes_per_second(trace: Trace) -> float:
    """Returns how fast the CPU steps what a trace has gradients for, of all dtypes; 0.0 where that is not known."""
    machine = trace.machine
    rates = {"float32": machine.cpu_step_bytes_per_second, "bfloat16": machine.cpu_step_bfloat16_bytes_per_second}
    found = _gradient_bytes_by_dtype(steady_step(trace)) or {"float32": 1}
    if not all(rates[dtype] for dtype in found):
        return 0.0
    return sum(found.values()) / sum(nbytes / rates[dtype] for dtype, nbytes in found.items())


def _kernel_text(trace: Trace) -> str:
    return f"torch's fused kernel at {format_bytes(_bytes_per_second(trace))}/s as measured here"


def _cpu_step_seconds(trace: Trace, steady: Step, state_bytes: int) -> float:
    """Returns how much longer a step takes on the CPU than with all state on the device.

    Gradients and parameters come down and parameters go up, which share the link: it copies either down or up. The
    CPU reads all of that and the state, and writes parameters and state, while other buckets pass. The device
    computes nothing meanwhile.
    """
    tier = trace.machine.next_tier
    assert tier is not None
    state_share = state_bytes / max(1, gradient_bytes(steady))
    # Gradients are made from the last parameter to the first, and parameters stepped from the first to the last.
    sizes = [storage.nbytes for storage in reversed(steady.storages) if storage.category == "gradient"]
    seconds = pipelined_seconds(
        sizes,
        _BUCKET_BYTES,
        down_seconds=2 / tier.write_bytes_per_second,
        up_seconds=1 / tier.read_bytes_per_second,
        cpu_seconds=(3 + 2 * state_share) / _bytes_per_second(trace),
    )
    return max(0.0, seconds - sum(op.seconds for op in steady.ops if op.phase == "optimizer"))
