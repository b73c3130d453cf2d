"""Mamba's scan is recorded as one pass on fake tensors, with the bytes of the loop that it stands in for."""

from contextlib import nullcontext
from typing import Any

import pytest

from memwall.integrations.hugging_face import hf_spec
from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.predict.curve import live_peak_bytes
from memwall.trace.records import Trace

pytestmark = [pytest.mark.requires("transformers"), pytest.mark.slow]

MAMBA: dict[str, Any] = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96}
TOLERANCE = 0.005
"""Counts the bytes that the loop frees of the first token before it asks for the second one's gradient."""


def recorded(source: str, sequence: int, dtype: str = "float32") -> Trace:
    hardware = hardware_named("a100-80gb")
    return device_run_of_spec(source, hardware, batch=2, sequence=sequence, dtype=dtype, optimizer="sgd").training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pass_has_the_bytes_of_the_loop(dtype: str, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(MAMBA | {"intermediate_size": 512})
    whole = recorded(source, 24, dtype)
    monkeypatch.setattr(hf_spec, "whole_scans", lambda model: nullcontext())
    loop = recorded(source, 24, dtype)
    for found, expected in zip(whole.steps, loop.steps, strict=True):
        assert live_peak_bytes(found, "cuda") == pytest.approx(live_peak_bytes(expected, "cuda"), rel=TOLERANCE)
        assert len(found.ops) < len(expected.ops) / 2


def test_a_longer_text_has_no_more_operations(written: Any) -> None:
    source = written(MAMBA)
    short, long = recorded(source, 16), recorded(source, 1024)
    assert len(short.steps[1].ops) == len(long.steps[1].ops)
