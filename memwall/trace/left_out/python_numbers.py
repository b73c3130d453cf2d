"""The state of the random numbers that Python code takes, which no operation on tensors shows."""

import pickle
import random
import sys
from collections.abc import Hashable


def python_numbers() -> Hashable:
    """Returns what differs once numbers were taken of Python's generator, or of numpy's where that is in use."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))
