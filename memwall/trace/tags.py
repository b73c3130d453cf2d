"""How figures were obtained: every record of them that is printed or stored says so."""

from typing import Literal

from memwall.trace.records import Trace

Tag = Literal["simulated", "cpu-measured", "gpu-measured", "external"]
"""`external`: somebody else's measurement, as a snapshot that was handed in. A record in another has that one's tag."""


def measured_tag(device: str) -> Tag:
    """Returns the tag of what a run on a device has shown."""
    return "cpu-measured" if device == "cpu" else "gpu-measured"


def trace_tag(trace: Trace) -> Tag:
    """Returns how the bytes of a trace were obtained."""
    return measured_tag(trace.device) if trace.source == "recorded" else "simulated"
