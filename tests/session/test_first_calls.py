"""Functions of MKL whose first call must not be made by several threads at once have been called by one."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.session.session import Session
from memwall.session.vector_functions import FUNCTIONS

# torch's own list: IMPLEMENT_VML_MKL(sqrt, Sqrt), and one line of its own for what a version of MKL may lack.
HEADER = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"


class Calls(TorchDispatchMode):
    """Notes operators with the dtype and the number of elements of their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((func.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not HEADER.exists(), reason="this torch came without its headers")
def test_the_list_is_torchs_own() -> None:
    passed_on = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", HEADER.read_text(), re.MULTILINE)
    assert sorted(passed_on) == sorted(function.__name__ for function in FUNCTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_session_has_made_every_first_call_with_one_number(dtype: torch.dtype) -> None:
    with Calls() as calls, Session(budget_bytes=1 << 40):
        assert {(function.__name__, dtype, 1) for function in FUNCTIONS} <= calls.seen


def test_first_calls_leave_no_trace_in_the_training() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.enable_grad(), Session(budget_bytes=1 << 40):
        assert torch.equal(torch.get_rng_state(), before)
