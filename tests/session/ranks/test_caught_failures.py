"""A script that catches whatever fails in its part of a step hears of another rank's failure all the same."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rank_threads import on_ranks

from memwall.apply.memory.exhaustion import Exhaustion
from memwall.session.ranks.agreement import Ranks
from memwall.session.ranks.joint_parts import FailedStepError, JointParts, Told


class Collectives:
    """Stands for a model whose ranks meet twice in a part, as before the gathers of two units."""

    def run(self, part: Callable[[Callable[[], None]], Any], _: Any, meet: Callable[[], None]) -> Any:
        return part(meet)

    def end(self, _: Any) -> None:
        """Does nothing."""

    begin = reset = reduces = end


def test_another_ranks_failure_is_not_swallowed() -> None:
    """GIVEN a rank whose script catches what says that another one has failed, and goes on to the next collective
    THEN that rank does the step again too, and waits for nobody there.
    """

    def do(ranks: Ranks) -> Any:
        def part(meet: Callable[[], None]) -> str:
            if ranks.rank == 1:
                raise MemoryError
            for _ in range(2):
                with suppress(Exception):
                    meet()
            return "went on"

        def tell(error: Exception | None) -> tuple[Told, Exception | None]:
            return Told(plan_hash="a plan", has_failed=error is not None, asked_bytes=1, held_bytes=2), None

        joint: Any = JointParts(ranks, Collectives())  # type: ignore[arg-type]
        return joint.run(part, (), None, tell)

    for rank, outcome in enumerate(on_ranks(2, do)):
        assert isinstance(outcome, FailedStepError)
        assert outcome.has_failed_here == (rank == 1)
        assert outcome.found == Exhaustion(phase="forward", asked_bytes=1, held_bytes=2)
