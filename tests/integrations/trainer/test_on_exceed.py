"""A Trainer's run that passes its budget all the same trains on, or ends on every rank, as it was asked to."""

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
    measured = SimpleNamespace(has_plan=True, overall_peak_bytes=peak_bytes)
    callback.session = SimpleNamespace(
        end_step=lambda: None, state="running", measured=measured, budget_bytes=2 * MIB, ranks=None
    )
    control = SimpleNamespace(should_training_stop=False)
    callback.on_step_end(None, SimpleNamespace(global_step=7), control)
    assert control.should_training_stop == ends
    said = "memwall: training ends after step 7: 3.0 MiB were held, the budget is 2.0 MiB, and on_exceed='stop'\n"
    assert capsys.readouterr().err == (said if ends else "")


@pytest.mark.parametrize(("most_excess", "ends"), [(MIB, True), (0, False)])
def test_a_rank_that_passes_its_budget_ends_training_on_all(
    most_excess: int, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a rank within its budget AND another one THEN both stop after the same step, or the others would wait."""
    said: list[tuple[int, ...]] = []

    def largest(values: tuple[int, ...]) -> tuple[int, ...]:
        said.append(values)
        return (most_excess, *(0,) * (len(values) - 1))

    callback = MemwallCallback(budget=2 * MIB, on_exceed="stop")
    callback.session = SimpleNamespace(
        end_step=lambda: None,
        state="running",
        measured=SimpleNamespace(has_plan=True, overall_peak_bytes=MIB),
        budget_bytes=2 * MIB,
        ranks=SimpleNamespace(largest=largest, have_inputs=True),
    )
    control = SimpleNamespace(should_training_stop=False)
    callback.on_step_end(None, SimpleNamespace(global_step=7), control)
    assert [values[0] for values in said] == [-MIB]
    assert control.should_training_stop == ends
    assert ("another rank held 1.0 MiB more than its budget" in capsys.readouterr().err) == ends


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match=r"on_exceed='raise'\): expected 'warn' or 'stop'"):
        MemwallCallback(budget=MIB, on_exceed="raise")
