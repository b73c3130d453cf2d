"""A plan in one line, as a loop tells it that has no page to show it on."""

from plans import a_plan

from memwall.planning.explain import actions_text, plan_line, writes_text
from memwall.planning.techniques.recompute import Recompute


def test_equal_actions_are_drawn_together() -> None:
    actions = (*(Recompute(block=f"layers.{number}") for number in range(12)), Recompute(block="head"))
    assert actions_text(actions) == "recompute (head, layers.0-11)"


def test_a_plan_that_does_nothing_says_so() -> None:
    line = plan_line(a_plan())
    assert "nothing needs to be done" in line
    assert "\n" not in line
    assert writes_text(a_plan()) == ""
