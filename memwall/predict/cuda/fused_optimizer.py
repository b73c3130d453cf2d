"""A step whose optimizer runs as one fused kernel in place of foreach ones with their temporaries."""

from collections.abc import Sequence

import msgspec

from memwall.trace.optimizers import FUSED_ON_CUDA
from memwall.trace.records import Step, Storage, Trace

# What foreach implementations of these make new tensors with; the fused ones advance their counters by others.
_PRODUCTS = ("aten._foreach_sqrt.", "aten._foreach_add.", "aten._foreach_mul.", "aten._foreach_neg.")
_COUNTER_BYTES = 8


def can_fuse(trace: Trace) -> bool:
    """Whether the optimizer made temporaries by foreach kernels, and could run `fused=True` on a CUDA device."""
    names = [trace.names[op.name] for op in trace.steps[-1].ops if op.phase == "optimizer"]
    return trace.optimizer in FUSED_ON_CUDA and any(n.startswith(_PRODUCTS) for n in names)


def with_fused_optimizer(trace: Trace) -> Trace:
    """The trace of the same steps under `fused=True`: no temporaries while the optimizer runs, counters on the device.

    Operations keep their names and times, which only bytes are asked of.

    Source: torch/optim/adam.py, adamw.py, sgd.py (2.13): `_fused_adam` and its kin call one kernel that updates in
    place; `_init_group` puts `state['step']` on the parameter's device where `fused` is set.
    """
    return msgspec.structs.replace(trace, steps=tuple(_fused(step, trace.names) for step in trace.steps))


def _fused(step: Step, names: Sequence[str]) -> Step:
    start = next((number for number, op in enumerate(step.ops) if op.phase == "optimizer"), len(step.ops))
    # `torch.tensor(value)`, which foreach and plain implementations start their counters with, copies a constant.
    constants = {
        number for op in step.ops[start:] if names[op.name] == "aten.lift_fresh.default" for number in op.inputs
    }

    def changed(number: int, storage: Storage) -> Storage:
        is_temporary = storage.category == "temporary" and storage.birth >= start
        if is_temporary or (number in constants and storage.category == "input"):
            # In its place still, since operations refer to storages by number.
            return msgspec.structs.replace(storage, nbytes=0, birth=0, dropped=0, death=0)
        if storage.category == "optimizer_state" and storage.nbytes <= _COUNTER_BYTES:
            return msgspec.structs.replace(storage, device="cuda")
        return storage

    storages = tuple(changed(number, storage) for number, storage in enumerate(step.storages))
    return msgspec.structs.replace(step, storages=storages)
