"""Seconds of an operation on a device that is not here."""

from typing import Any

from memwall.machine.hardware import Hardware, hardware_named
from memwall.predict.roofline import Roofline
from memwall.trace.op_work import OpWork


def work(**changes: Any) -> OpWork:
    return OpWork(
        **{"name": "aten.mm.default", "dtype": "bfloat16", "flops": 0, "read_bytes": 0, "written_bytes": 0, **changes}
    )


def test_an_operation_takes_as_long_as_its_arithmetic_or_its_bytes() -> None:
    hardware: Hardware = hardware_named("h100-80gb")
    seconds = Roofline(hardware)
    assert seconds(work(flops=hardware.flops["bfloat16"])) == 1.0
    assert seconds(work(flops=hardware.flops["float32"], dtype="float32")) == 1.0
    assert seconds(work(flops=hardware.flops["float32"], dtype="float64")) == 1.0
    bandwidth = int(hardware.memory_bytes_per_second)
    assert seconds(work(flops=1000, read_bytes=bandwidth, written_bytes=bandwidth)) == 2.0
    assert seconds(work()) == 0.0
