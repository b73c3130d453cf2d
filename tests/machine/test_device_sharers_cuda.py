"""Memory of other processes on a device is no part of what this one is measured to hold, or may have."""

import ctypes
import os
from typing import Any

import pytest
import torch

from memwall.machine.device_sharers import note_sharers, others_bytes
from memwall.machine.limits import own_bytes
from memwall.machine.meter import CudaMeter

GIB = 1 << 30
CONTEXT_BYTES = 500 << 20
OTHERS_BYTES = 7 * GIB


def shared(listed: str) -> Any:
    return pytest.mark.phantom(card="l4", numbers=False, nvml=listed, others_bytes=OTHERS_BYTES)


def meter_beside_a_tensor() -> tuple[CudaMeter, torch.Tensor]:
    return CudaMeter(torch.device("cuda")), torch.empty(GIB, dtype=torch.uint8, device="cuda")


@shared("all")
def test_a_process_is_known_by_its_number() -> None:
    meter, tensor = meter_beside_a_tensor()
    assert meter.now_bytes() == meter.peak_bytes() == tensor.nbytes + CONTEXT_BYTES
    assert meter.base_bytes(tensor.nbytes) == CONTEXT_BYTES
    assert meter.others_bytes() == OTHERS_BYTES


@shared("all")
def test_others_come_and_go_while_it_runs() -> None:
    meter, tensor = meter_beside_a_tensor()
    device = ctypes.CDLL(os.environ["PHANTOM_LIBRARY"])
    for others in (2 * GIB, 11 * GIB, 0):
        device.phantom_others_hold(ctypes.c_size_t(others))
        assert meter.now_bytes() == tensor.nbytes + CONTEXT_BYTES
        assert meter.others_bytes() == others


@pytest.mark.parametrize("_", [pytest.param("", marks=shared("numbers")), pytest.param("", marks=shared("nobody"))])
def test_where_numbers_are_another_containers_it_is_told_by_what_was_in_use_before(_: str) -> None:
    note_sharers()
    meter, tensor = meter_beside_a_tensor()
    note_sharers()  # too late, which changes nothing
    assert meter.now_bytes() == tensor.nbytes + CONTEXT_BYTES
    assert meter.others_bytes() == OTHERS_BYTES


@shared("numbers")
def test_where_nobody_looked_before_all_counts_as_its_own() -> None:
    meter, tensor = meter_beside_a_tensor()
    assert meter.others_bytes() is None
    assert meter.now_bytes() == tensor.nbytes + CONTEXT_BYTES + OTHERS_BYTES


@pytest.mark.phantom(card="l4", numbers=False, nvml="numbers")
def test_the_only_process_of_a_device_is_this_one() -> None:
    meter, tensor = meter_beside_a_tensor()
    assert meter.now_bytes() == tensor.nbytes + CONTEXT_BYTES
    assert others_bytes(meter.place) == 0


@shared("all")
def test_all_of_a_device_is_what_others_leave() -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    assert own_bytes("cuda") == total_bytes - OTHERS_BYTES
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert own_bytes("cuda:0") == total_bytes - OTHERS_BYTES
