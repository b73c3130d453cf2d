"""Seconds of an operation on a device that is not here, from its data sheet: a lower bound, and only an estimate.

An operation takes at least as long as its arithmetic at the peak rate of its dtype, and at least as long as reading and
writing its tensors once at the peak bandwidth (Williams, Waterman, Patterson: Roofline, CACM 2009). No kernel reaches
both, and launches are not counted; ratios between operations, which planning needs, are closer than the sum.
"""

import msgspec

from memwall.machine.hardware import Dtype, Hardware
from memwall.trace.op_work import KernelWork, OpWork
from memwall.trace.records import Step, Trace

_RATES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


class Roofline:
    """Turns the work of an operation into seconds on a device; float32 products run without matrix units."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._rates = {dtype: hardware.flops[rate] for dtype, rate in _RATES.items() if rate in hardware.flops}
        # What has no rate of its own (float64, integers, a dtype without units) is not faster than float32.
        self._other_rate = hardware.flops["float32"]

    def __call__(self, work: OpWork) -> float:
        """Returns the seconds of one operation; none for one that only makes a view."""
        rate = self._rates.get(work.dtype, self._other_rate)
        bandwidth = self._hardware.memory_bytes_per_second
        parts = work.parts or (KernelWork(work.read_bytes + work.written_bytes, work.flops),)
        return sum(max(part.flops / rate, part.moved_bytes / bandwidth) for part in parts)


def with_least_seconds(step: Step, trace: Trace, roofline: Roofline) -> Step:
    """Gives a recorded step the least seconds of its operations on a device, in place of those that were measured.

    Records know bytes and FLOPs, but no dtypes: products count as those of autocast's precision, or else of float32.
    """
    dtype = "float32" if trace.autocast == "none" else trace.autocast
    ops = []
    for number, op in enumerate(step.ops):
        fresh = [index for index in op.outputs if step.storages[index].birth == number]
        changed = {*fresh, *op.writes}
        work = OpWork(
            name=trace.names[op.name],
            dtype=dtype,
            flops=op.flops,
            read_bytes=sum(step.storages[index].nbytes for index in op.inputs) if changed else 0,
            written_bytes=sum(step.storages[index].nbytes for index in changed),
        )
        ops.append(msgspec.structs.replace(op, seconds=roofline(work)))
    return msgspec.structs.replace(step, ops=tuple(ops))
