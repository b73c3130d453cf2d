"""Records a real step on this CPU where fake tensors lack values that it needs: the last way from SPEC to trace."""

import logging

import psutil

from memwall.errors import MemwallError, NeedsValuesError, TraceError
from memwall.machine.hardware import Hardware
from memwall.machine.limits import memory_limit_bytes
from memwall.predict.cuda.translate import translated
from memwall.trace.fake import fake_run
from memwall.trace.records import Trace
from memwall.trace.seeding import drawing_alike
from memwall.trace.spec import describe_error
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# Weights, gradients, two moments and a foreach temporary, and as much again for what the step saves.
_COPIES_OF_WEIGHTS = 10


def real_trace(
    workload: Workload,
    hardware: Hardware,
    failure: NeedsValuesError,
    *,
    num_micro_batches: int = 1,
    host_bytes: int = 0,
) -> Trace:
    """Returns two steps recorded on this CPU, translated to the device as far as records can be.

    Args:
        failure: why fake tensors do not do; it is raised where the model is too large to be run here.
        num_micro_batches: forwards and backwards in each step.
        host_bytes: see `memwall.predict.cuda.translate.translated`.

    Raises:
        NeedsValuesError: a real step would not fit into the memory of this machine.
        TraceError: the workload does not run a whole training step.
    """
    with fake_run(workload, []) as run:
        weight_bytes = sum(parameter.nbytes for parameter in run.model.parameters())
    room_bytes = min(psutil.virtual_memory().available, memory_limit_bytes())
    if _COPIES_OF_WEIGHTS * weight_bytes > room_bytes:
        raise NeedsValuesError(
            f"{failure} (a real step is not tried here: with {format_bytes(weight_bytes)} of weights it may take more "
            f"than the {format_bytes(room_bytes)} that are free)"
        ) from failure
    _log.warning("%s; two real steps are recorded on this CPU instead, which takes their time and memory", failure)
    try:
        with drawing_alike():
            trace = record(workload, num_micro_batches=num_micro_batches)
    except MemwallError:
        raise
    except Exception as error:  # whatever a model's own code raises
        raise TraceError(f"{failure}; a real step on this CPU failed as well: {describe_error(error)}") from error
    return translated(trace, hardware, host_bytes=host_bytes)
