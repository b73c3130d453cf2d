"""The forecast of a device's meter for a training process: its context, and what the caching allocator reserves.

The allocator is simulated with the profile of a torch release, over a first step and steady ones after it, since what
the first step leaves behind in pieces decides where the next ones find room. Live bytes alone are a lower bound.
"""

import math
from functools import cached_property
from typing import Literal

import msgspec
import torch

from memwall.machine.hardware import Hardware
from memwall.predict.cuda.translate import not_modelled
from memwall.predict.cuda_allocator.advice import AllocatorAdvice, advise
from memwall.predict.cuda_allocator.allocator_events import EventTrace, events_of_steps
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings, parse_settings
from memwall.predict.cuda_allocator.event_replay import Figures, replay
from memwall.predict.cuda_allocator.step_peaks import NUM_STEADY, event_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.curve import live_peak_bytes
from memwall.predict.process import Process, Resident
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step

# What a process may need beyond its forecast: a share of what the allocator reserves, and the workspace that cuDNN may
# take for the largest convolution, as a multiple of the tensors that this one reads and writes. Both are the least that
# cover 96 % of the public runs of 231 timm models on an A100 (GPUMemNet, doi 10.1145/3805621.3807621), rounded up;
# `benchmarks/prediction.py` fits them, and says what those fitted on the other families cover in each. For 97 % the
# second would have to be twice as large.
MARGIN_SHARE, CONVOLUTION_SHARE = 0.07, 1.41
MARGIN_BASIS = (
    "not yet measured on a GPU: the published range of the CUDA context, 7 % of reserved bytes, and 1.41 times the "
    "tensors of the largest convolution; fitted so, it covers 96 % of others' published runs on an A100, of model "
    "families that it was not fitted on"
)
# Other settings of the allocator join a plan that would fit without them if they free so much of what is reserved.
_NOTABLE_SHARE = 0.05
_NUM_KNOWN = 3


def margin_bytes(hardware: Hardware, reserved_bytes: int, largest_convolution_bytes: int) -> int:
    """Returns the bytes that a process may need beyond its forecast; see `MARGIN_SHARE`.

    Args:
        largest_convolution_bytes: see `convolution_bytes`.
    """
    low, high = hardware.context_bytes
    return high - low + int(reserved_bytes * MARGIN_SHARE + largest_convolution_bytes * CONVOLUTION_SHARE)


def convolution_bytes(trace: Trace) -> int:
    """Returns the bytes that a step's largest convolution reads and writes: its library's workspace grows with them."""
    names = {number for number, name in enumerate(trace.names) if "convolution" in name}
    return max(
        (
            sum(step.storages[number].nbytes for number in {*op.inputs, *op.outputs})
            for step in trace.steps
            for op in step.ops
            if op.name in names
        ),
        default=0,
    )


def as_first(step: Step) -> Step:
    """Returns the step that comes before a steady one: the optimizer's state appears when the optimizer first runs."""
    start = next((number for number, op in enumerate(step.ops) if op.phase == "optimizer"), len(step.ops))
    storages = tuple(
        msgspec.structs.replace(storage, birth=start)
        if storage.category == "optimizer_state" and storage.birth < 0 and storage.death > start
        else storage
        for storage in step.storages
    )
    return msgspec.structs.replace(step, kind="first", storages=storages)


class DeviceModel(Process):
    """Forecasts steps in the process of a translated trace on its device."""

    def __init__(self, trace: Trace, hardware: Hardware, torch_version: str | None = None) -> None:
        self.base_bytes = hardware.context_bytes[0]
        self.workspace_bytes = 0
        self.next_tier: Literal["host", "disk"] = "host"
        self.profile, self._note = profile_for(torch_version or str(torch.__version__))
        self._trace, self._hardware = trace, hardware
        self._convolution_bytes = convolution_bytes(trace)
        self._known: dict[int, tuple[Step, EventTrace]] = {}
        """Requests of the last few steps to the allocator, by the identity of the storages that decide them."""
        self._figures: dict[int, Figures] = {}
        """Hold what the allocator does with them under torch's default settings, in the same way."""

    def free(self, step: Step) -> Resident:
        return self.untreated(step)

    def untreated(self, step: Step) -> Resident:
        """Forecasts the step with the allocator's caching, from the first step on."""
        figures = self._default_figures(step)
        return self.bare(step) if figures.is_out_of_memory else self._resident(figures.reserved_peak_bytes)

    def treated(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the same; under `allocator_advice` if only that keeps to the limit, or it frees a notable share."""
        plain = self.untreated(step)
        least_bytes = (1 - _NOTABLE_SHARE) * self.reserved_bytes(plain.process_bytes)
        if plain.process_bytes <= limit_bytes and live_peak_bytes(step, "cuda") > least_bytes:
            return plain  # whatever the settings, they free no notable share
        settings = parse_settings(self.allocator_advice.settings, self.profile)
        peaks = None
        if settings != AllocatorSettings():
            peaks = event_peaks(self._events(step), self.profile, settings=settings)
        if peaks is None:
            return plain
        steered = self._resident(max(peak.reserved_bytes for peak in peaks))
        saved_bytes = plain.process_bytes - steered.process_bytes
        is_notable = saved_bytes >= _NOTABLE_SHARE * self.reserved_bytes(plain.process_bytes)
        if saved_bytes <= 0 or (plain.process_bytes <= limit_bytes and not is_notable):
            return plain
        return msgspec.structs.replace(
            steered,
            policy="cuda-settings",
            is_default=False,
            cuda_setting=self.allocator_advice.settings,
            saved_bytes=saved_bytes,
        )

    def crowded(self, step: Step, limit_bytes: int) -> Resident:
        return self.treated(step, limit_bytes)

    @cached_property
    def allocator_advice(self) -> AllocatorAdvice:
        steady = steady_step(self._trace)
        return advise(
            self._events(steady),
            self.profile.version,
            total_bytes=self._hardware.usable_bytes,
            default_figures=self._default_figures(steady),
        )

    def _default_figures(self, step: Step) -> Figures:
        """Returns what the allocator does under torch's default settings, with memory without end."""
        events, key = self._events(step), id(step.storages)
        if key not in self._figures:
            self._figures[key] = replay(events, AllocatorSettings(), self.profile)
        return self._figures[key]

    def _events(self, step: Step) -> EventTrace:
        """Returns the requests of a first step and of steady ones after it."""
        key = id(step.storages)
        known = self._known.get(key)
        if known is None or len(known[0].ops) != len(step.ops):
            if len(self._known) == _NUM_KNOWN:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._figures.pop(oldest, None)
            self._figures.pop(key, None)
            self._known[key] = known = step, events_of_steps((as_first(step), step), num_repeats=NUM_STEADY)
        return known[1]

    def bare(self, step: Step) -> Resident:
        return self._resident(live_peak_bytes(step, "cuda"))

    def fits_untouched(self, process_bytes: int, *, budget_bytes: int, limit_bytes: int) -> bool:
        """Tells whether a forecast keeps to the limit: the allocator was simulated, so nothing is left to chance."""
        return process_bytes <= limit_bytes

    def margin_bytes(self, process_bytes: int) -> int:
        return margin_bytes(self._hardware, process_bytes - self.base_bytes, self._convolution_bytes)

    def budget_for(self, process_bytes: int) -> int:
        constant_bytes = margin_bytes(self._hardware, 0, self._convolution_bytes)
        return self.base_bytes + math.ceil((process_bytes - self.base_bytes + constant_bytes) / (1 - MARGIN_SHARE)) + 1

    def room_bytes(self, budget_bytes: int) -> int:
        """Returns what the allocator may reserve so that the margin for it is left of a budget."""
        constant_bytes = margin_bytes(self._hardware, 0, self._convolution_bytes)
        return max(0, int((budget_bytes - self.base_bytes - constant_bytes) / (1 + MARGIN_SHARE)))

    def reserved_bytes(self, process_bytes: int) -> int:
        return process_bytes - self.base_bytes

    def not_modelled(self) -> tuple[str, ...]:
        return (*self.not_modelled_in_steps(), self.not_modelled_around())

    def not_modelled_around(self, *, is_evaluated: bool = False) -> str:
        """Says of that what lies outside the training steps of a plan, with its evaluation or without."""
        around = (
            "batches larger than this one; data loader workers, and the data set in host memory; other processes on "
            "the device"
        )
        return around if is_evaluated else f"evaluation; {around}"

    def not_modelled_in_steps(self) -> tuple[str, ...]:
        """Says of that what belongs to the training steps."""
        found = not_modelled(self._trace, self._hardware)
        return (*found, self._note) if self._note else found

    def _resident(self, reserved_bytes: int) -> Resident:
        return Resident(
            policy="default",
            is_default=True,
            process_bytes=self.base_bytes + reserved_bytes,
            fault_seconds=0.0,
        )
