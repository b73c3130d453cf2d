"""What follows where a Trainer's run passes its budget after the first step all the same."""

from types import SimpleNamespace

import pytest

from memwall.errors import UsageError
from memwall.integrations.trainer import MemwallCallback

MIB = 1 << 20


@pytest.mark.parametrize(
    ("on_exceed", "peak_bytes", "ends"),
    [("stop", 3 * MIB, True), ("stop", 2 * MIB, False), ("warn", 3 * MIB, False)],
)
def test_training_ends_where_that_was_asked_for(
    on_exceed: str, peak_bytes: int, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = MemwallCallback(budget=2 * MIB, on_exceed=on_exceed)
    measured = SimpleNamespace(has_plan=True, judged_peak_bytes=peak_bytes)
    callback.session = SimpleNamespace(
        end_step=lambda: None, state="running", measured=measured, budget_bytes=2 * MIB, ranks=None
    )
    control = SimpleNamespace(should_training_stop=False)
    callback.on_step_end(None, SimpleNamespace(global_step=7), control)
    assert control.should_training_stop == ends
    said = "memwall: training ends after step 7: 3.0 MiB were held, the budget is 2.0 MiB, and on_exceed='stop'\n"
    assert capsys.readouterr().err == (said if ends else "")


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match=r"on_exceed='raise'\): expected 'warn' or 'stop'"):
        MemwallCallback(budget=MIB, on_exceed="raise")
