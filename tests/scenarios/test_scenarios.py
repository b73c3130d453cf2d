"""Every script of the corpus ends with the same bits in every way, or in the one clear error it expects."""

import re
from pathlib import Path

import pytest
from combinations import exhaustive

from memwall.errors import MemwallError
from scenarios import (  # noqa: F401  (they register)
    autograd,
    calls,
    hooks,
    layers,
    loops,
    modules,
    procedures,
    python_state,
    weights,
)
from scenarios.arms import ARMS, REFUSED, Result, train
from scenarios.corpus import SCENARIOS

pytestmark = pytest.mark.usefixtures("one_thread")
_plain: dict[str, Result] = {}

# Each script in one way, and where the planner's choice has shown a fault; the rest in `make test-all`.
FAULTS = {
    ("closure_of_adamw", "planner's choice at 70 %"),
    ("gradient_penalty", "planner's least"),
    ("gradient_penalty", "parameters-on-disk"),
    ("gradients_once_more_after_a_backward", "gradient-release"),
    ("copies_the_model_in_mid_run", "gradient-release"),
    ("a_block_that_runs_a_backward_of_its_own", "recompute"),
}
CASES = [
    (name, arm) if number % len(ARMS) == place or (name, arm) in FAULTS else exhaustive(name, arm)
    for number, name in enumerate(SCENARIOS)
    for place, arm in enumerate(ARMS)
]


@pytest.mark.parametrize(("name", "arm"), CASES)
def test_training_is_the_same(name: str, arm: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    if name not in _plain:
        _plain[name] = train(scenario, None, tmp_path)
    said = scenario.refused.get(arm)
    if said is not None:
        with pytest.raises(MemwallError, match=said):
            train(scenario, arm, tmp_path)
        return
    try:
        result = train(scenario, arm, tmp_path)
    except MemwallError as error:
        if re.search(REFUSED.get(arm, "no error"), str(error)):
            return
        raise
    assert result.differences(_plain[name]) == ""
