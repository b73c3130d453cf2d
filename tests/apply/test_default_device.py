"""A default device that the script has set: what memwall makes on the CPU is there all the same."""

import pytest
import torch
from torch import nn

from memwall.apply.kernels.head import head_disagreement
from memwall.apply.kernels.match import candidates, disagreement
from memwall.apply.offload.packed import pack_seconds_per_element
from memwall.machine.memory_speed import copy_seconds_per_byte

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_are_compared_with_a_module_where_that_is() -> None:
    norm, head = nn.RMSNorm(64), nn.Linear(64, 16)
    with torch.device("meta"):
        assert [disagreement(norm, found) for found in candidates(norm)] == [None]
        assert head_disagreement(head) is None


def test_the_cpu_is_measured() -> None:
    with torch.device("meta"):
        assert pack_seconds_per_element() > 0
        assert copy_seconds_per_byte() > 0
