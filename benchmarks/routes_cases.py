"""Cases of the zoo as SPECs: `benchmarks/routes_cases.py:resnet/float32/sgd-momentum`, at the batch that a GPU ran."""

from gpu_truth_case import SAMPLES_FACTOR
from prediction_zoo import FAMILIES, workload

from memwall.trace.workload import Workload


def __getattr__(name: str) -> Workload:
    """Returns the case that a SPEC names."""
    family, _, rest = name.partition("/")
    precision, _, optimizer = rest.partition("/")
    if family not in FAMILIES or not optimizer:
        raise AttributeError(name)
    return workload(family, optimizer, precision, SAMPLES_FACTOR * FAMILIES[family].num_samples)  # type: ignore[arg-type]
