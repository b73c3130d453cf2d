"""Whether a step computes in sixteen bits already, told from the sizes of what its products read and write."""

from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step

_PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
# Between two and four bytes: a product whose factor is a part of its storage looks wider than it is, never narrower.
_MOST_BYTES = 3.0


def computes_in_half(trace: Trace) -> bool:
    """Whether most arithmetic of forward's products with a weight is on elements of two bytes.

    A trace keeps no dtypes. A product of [m, k] and [k, n] takes 2 m k n operations, and its three matrices have
    m k, k n and m n elements: so the product of their bytes is (m k n)^2 times the cube of an element's.
    """
    step = steady_step(trace)
    in_half = total = 0
    for op in step.ops:
        if op.phase != "forward" or not op.flops or trace.names[op.name] not in _PRODUCTS or len(op.outputs) != 1:
            continue
        matrices = _matrices(step, op.inputs)
        if not any(step.storages[number].category == "parameter" for number in matrices) or len(matrices) != 2:
            continue
        left, right, result = (step.storages[number].nbytes for number in (*matrices, op.outputs[0]))
        element_bytes = (left * right * result / (op.flops / 2) ** 2) ** (1 / 3)
        total += op.flops
        in_half += op.flops if element_bytes < _MOST_BYTES else 0
    return 2 * in_half > total


def _matrices(step: Step, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """The two factors: the largest of the inputs, the smallest of three being what is added."""
    return tuple(sorted(inputs, key=lambda number: step.storages[number].nbytes, reverse=True)[:2])
