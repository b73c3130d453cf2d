"""The context of a CUDA process as two processes on the machine show it; here they are stand-ins that print figures."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from memwall.errors import MemwallError
from memwall.machine.hardware import hardware_named
from memwall.predict.cuda import context
from memwall.predict.cuda.context import measured_context_bytes, with_measured_context

MIB = 1 << 20
# Counts the processes that have come before it in a file, and says what the device would.
STAND_IN = """
import pathlib, sys
others, own, held = {others}, {own}, {held}
path = pathlib.Path({path!r})
number = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (number + 1))
print(others + (number + 1) * own + number * held, held, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device_with(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A machine with one A100 on which others hold memory and each new process takes `own` and `held` in tensors."""
    measured_context_bytes.cache_clear()

    def having(*, own: int, others: int = 0, held: int = 0) -> None:
        script = STAND_IN.format(others=others, own=own, held=held, path=f"{tmp_path}/count")
        monkeypatch.setattr(context, "_PROCESS", script)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")

    yield having
    measured_context_bytes.cache_clear()


def test_what_others_hold_and_what_the_allocator_holds_do_not_count(device_with: Callable[..., None]) -> None:
    device_with(own=517 * MIB, others=3000 * MIB, held=22 * MIB)
    assert measured_context_bytes(0) == 517 * MIB


def test_a_device_at_hand_has_its_own_context_in_place_of_the_published_range(device_with: Callable[..., None]) -> None:
    device_with(own=517 * MIB)
    found = with_measured_context(hardware_named("a100-80gb"))
    assert found.context_bytes == (517 * MIB, 517 * MIB)
    assert found.sources["context_bytes"] == "measured on cuda:0 of this machine"


def test_a_device_of_another_kind_is_left_as_it_is(device_with: Callable[..., None]) -> None:
    device_with(own=517 * MIB)
    assert with_measured_context(hardware_named("h200")) == hardware_named("h200")


def test_without_a_device_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(context, "_started", lambda index: pytest.fail("a process was started"))
    assert with_measured_context(hardware_named("h200")) == hardware_named("h200")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise RuntimeError('no kernel image is available')", "ended with RuntimeError: no kernel image is available"),
        ("print('nothing of use')", "ended with no message"),
    ],
)
def test_a_process_that_fails_says_why_and_the_range_stays(
    device_with: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    message: str,
) -> None:
    device_with(own=MIB)
    monkeypatch.setattr(context, "_PROCESS", script)
    with pytest.raises(MemwallError, match=message):
        measured_context_bytes(0)
    with caplog.at_level(logging.WARNING):
        assert with_measured_context(hardware_named("a100-80gb")) == hardware_named("a100-80gb")
    assert "the published range is taken instead" in caplog.text


def test_memory_that_others_free_meanwhile_is_no_context(device_with: Callable[..., None]) -> None:
    device_with(own=-50 * MIB, others=3000 * MIB)
    with pytest.raises(MemwallError, match=r"went from 2\.88 GiB to 2\.83 GiB while .* end what else runs there"):
        measured_context_bytes(0)
