"""How figures were obtained: every record of them that is printed or stored says so."""

from typing import Literal

from memwall.trace.records import Trace

Tag = Literal["simulated", "cpu-measured", "gpu-measured", "external"]
"""`external`: somebody else's measurement, as a snapshot that was handed in. A record in another has that one's tag."""

Route = Literal["translate", "phantom"]
"""Says how a step is recorded for a device that is not here: on tensors of this CPU, whose operations are translated,
or by torch's own CUDA build on a phantom device."""


def measured_tag(device: str) -> Tag:
    """Returns the tag of what a run on a device has shown."""
    return "cpu-measured" if device == "cpu" else "gpu-measured"


def trace_tag(trace: Trace) -> Tag:
    """Returns how the bytes of a trace were obtained."""
    return measured_tag(trace.device) if trace.source == "recorded" else "simulated"


def route_of(trace: Trace) -> Route:
    """Returns how the trace of a device that is not here was recorded."""
    return "phantom" if trace.is_phantom else "translate"
