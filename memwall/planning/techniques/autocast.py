"""Autocast: forward runs in a lower precision where torch's lists allow it, if the user does and nothing else fits."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from memwall.planning.action import Action, Exactness
from memwall.planning.settings import Settings
from memwall.planning.technique import DeepSpeedPart, Recording, Technique
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step


class Autocast(Action, frozen=True, kw_only=True, tag="autocast"):
    """Runs forward in a lower precision where torch's autocast lists allow it."""

    dtype: Literal["bfloat16", "float16"]
    exactness: Exactness = "changes-numerics"


class _Autocast(Technique[Autocast]):
    record = Autocast
    is_set_by_loop = True
    order = 30
    allow = "precision"
    allow_means = "forward may run under autocast to bfloat16 or float16, which changes numerics"
    advice_rank = 4
    way_out_rank = 4

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        if can_autocast(trace, (self.allow,)) is not None or self.allow in allow:
            return None
        return "allow bfloat16 autocast, which changes numerics: --allow precision"

    def way_out(self, found: Recording) -> tuple[str, Recording] | None:
        settings = found.settings
        allowed = msgspec.structs.replace(settings, allow=(*settings.allow, self.allow))
        lower = self.recording_where_nothing_fits(found.trace, allowed)
        if lower is None:
            return None
        return f"{lower.trace.autocast} autocast, which changes numerics: --allow precision", lower

    def recording_where_nothing_fits(self, trace: Trace, settings: Settings) -> Recording | None:
        recordings = settings.recordings
        if recordings is None or self.allow not in recordings.offered or can_autocast(trace, settings.allow):
            return None
        lower, _, others = recordings.take(self.allow)
        changed = settings.with_standing(Autocast, None if lower.autocast == "none" else Autocast(dtype=lower.autocast))
        return Recording(lower, msgspec.structs.replace(changed, recordings=others))

    def precision(self, action: Autocast) -> Literal["bfloat16", "float16"] | None:
        return action.dtype

    def what(self, action: Autocast) -> str:
        return f"autocast to {action.dtype}"

    def where(self, actions: Sequence[Autocast]) -> str:
        return "forward"

    def training_arguments(self, action: Autocast) -> dict[str, Any]:
        return {"bf16": action.dtype == "bfloat16", "fp16": action.dtype == "float16"}

    def accelerate_kwargs(self, action: Autocast) -> dict[str, Any]:
        return {"mixed_precision": precision_name(action)}

    def environment(self, action: Autocast) -> dict[str, str]:
        return {"ACCELERATE_MIXED_PRECISION": precision_name(action)}

    def deepspeed(self, action: Autocast) -> DeepSpeedPart:
        return DeepSpeedPart(
            dtype=action.dtype,
            remark=f"the plan runs forward under {action.dtype} autocast; DeepSpeed keeps {action.dtype} weights and "
            "float32 master copies of them, which is other rounding and another number of bytes",
        )


TECHNIQUE = _Autocast()


def precision_name(action: Autocast) -> str:
    """Returns what Accelerate and the Trainer call the precision: "bf16" or "fp16"."""
    return "bf16" if action.dtype == "bfloat16" else "fp16"


def can_autocast(trace: Trace, allow: tuple[str, ...]) -> str | None:
    """Returns None if forward may run in lower precision, else why not."""
    if "precision" not in allow:
        return "lower precision changes numerics; allow it with --allow precision"
    if trace.autocast != "none":
        return f"the run already uses autocast to {trace.autocast}"
    if _computes_in_half(trace):
        return "the weights are in half precision already"
    return None


def _computes_in_half(trace: Trace) -> bool:
    """Returns whether most of forward's arithmetic that reads a weight reads one of sixteen bits."""
    step = steady_step(trace)
    flops: Counter[bool] = Counter()
    for op in step.ops:
        read = (step.storages[number] for number in op.inputs)
        dtypes = {storage.dtype for storage in read if storage.category == "parameter"}
        if op.phase == "forward" and dtypes:
            flops[not dtypes.isdisjoint(("bfloat16", "float16"))] += op.flops
    return flops[True] > flops[False]
