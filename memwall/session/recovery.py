"""Decides what follows where a step needed more memory than its plan foresaw.

A step that took more, but ran, is followed by steps under a plan that knows of it. One that ran out of memory is done
again under a plan that needs less. Where neither can be, the run ends with an error that says with which budget to
begin again; a run that commits its steps leaves that budget to the process that resumes it (`next_budget`).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memwall.apply.memory.exhaustion import Exhaustion, as_error, exhaustion_of
from memwall.errors import InfeasibleError, OutOfMemoryError, RankError
from memwall.machine.process_group import num_processes
from memwall.planning.explain import STATE_IN_FIRST_STEP
from memwall.planning.planfile import Plan
from memwall.session.live_plan import LivePlan, Revision
from memwall.session.measurements import Measurements
from memwall.session.next_budget import MAX_ATTEMPTS
from memwall.session.ranks.shared_plan import agreed_excess
from memwall.session.step_borders import StepBorders
from memwall.session.step_state import StepState
from memwall.torch_internals.allocator import clear_cublas_workspaces
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_OF_TENSORS = "the script has come to keep %s of copies of its weights"
_BESIDE_TENSORS = "the process has come to hold %s more beside tensors"


class Recovery:
    """Watches the steps of one session, and changes its plan where they need more."""

    def __init__(self, live: LivePlan, borders: StepBorders, measured: Measurements) -> None:
        self._live, self._borders, self._measured = live, borders, measured
        self._excess_bytes = 0
        """Bytes by which the last step under the plan exceeded what the plan promised, the budget being near."""
        self._kept = ""
        """Says what the loop has come to hold since, where that is the excess, and no step took it yet."""
        self._ended_bytes = 0
        """Says what was held at most when the last step under the plan had ended."""
        self._can_plan_again = True
        self._is_agreed = False
        """Whether ranks have agreed already before the step that begins next."""
        self.why_not_again = ""
        """Why the forward that failed last could not be called again; "" where none has failed, or it was."""
        self._evaluated_after = -1
        """The number of steps after which an evaluation was last called again."""
        self._shortage: Exhaustion | None = None
        """Says what the optimizer's step lacked, in the last step."""

    # -- steps that took more than foreseen ----------------------------------------------------------------------------

    def begin_step(self, peak_bytes: int, *, is_told: bool) -> None:
        """Measures a step from here on: what ran since the last one, an evaluation say, is no part of it.

        A peak that is the last steps' own, and far from the budget, stands: nobody asks whether this step stays below.

        Args:
            peak_bytes: what the process has held at most until now.
            is_told: whether somebody is told the figures of each step.
        """
        measured, plan = self._measured, self._live.plan
        measured.note(peak_bytes)
        is_theirs = measured.meter.device == "cpu" and peak_bytes == self._ended_bytes
        if is_told or plan is None or not is_theirs or _is_near_budget(plan, peak_bytes):
            self._can_plan_again &= measured.meter.reset_peak()

    def note_kept(self, kept_bytes: int, risen_bytes: int) -> None:
        """Notes what the loop has come to hold since the last steps, so that the next one is planned with it.

        Args:
            kept_bytes: copies of the weights that no plan has room for yet.
            risen_bytes: what is no tensor, and would leave a step less than half of its margin.
        """
        plan = self._live.plan
        if plan is not None and self._live.trace is not None and self._can_plan_again:
            kept_bytes = excess_bytes(plan, plan.forecast.steady_process_bytes + kept_bytes) if kept_bytes else 0
            for excess, kept in ((kept_bytes, _OF_TENSORS), (risen_bytes, _BESIDE_TENSORS)):
                if excess > self._excess_bytes:  # what a step itself has used too much is told, where there was any
                    is_steps = self._excess_bytes > 0 and not self._kept
                    self._excess_bytes, self._kept = excess, "" if is_steps else kept

    def end_step(self, peak_bytes: int) -> None:
        """Notes what a step under the plan held at most."""
        self._ended_bytes = peak_bytes
        if self._live.plan is not None and self._live.trace is not None and self._can_plan_again:
            excess = excess_bytes(self._live.plan, peak_bytes)
            # While a rank has no more batches, the most of the steps meanwhile is kept.
            if excess > self._excess_bytes and not self._live.in_effect.device_budget.is_kept:
                self._excess_bytes, self._kept = excess, ""

    def forget_excess(self) -> None:
        """Forgets what the last step took too much: the plan that it ran under is no more."""
        self._excess_bytes, self._kept = 0, ""

    def plan_ahead(self, *, has_newcomer: bool) -> None:
        """Plans anew as `plan_again` does, which has nothing left to do then: before a loop's own code runs.

        Args:
            has_newcomer: see `agree`.

        Raises:
            RankError: another rank has ended its run.
        """
        self._is_agreed = False
        self.agree(has_newcomer=has_newcomer)
        self.plan_again()
        self._is_agreed = True

    def agree(self, *, has_newcomer: bool = False, is_longer: bool = False) -> None:
        """Has ranks know of the step that exceeded its forecast most, before any of them looks at what the next one is.

        Once one has no more batches, each keeps what is its own: they plan for that when they go on together.

        Args:
            has_newcomer: whether an optimizer has begun to step on this rank.
            is_longer: whether its batch has no room under the plan.

        Raises:
            RankError: another rank has ended its run, or has no more batches before there is a plan.
        """
        ranks = self._live.ranks
        if ranks is None or self._is_agreed:
            return
        excess = agreed_excess(ranks, self._excess_bytes, has_newcomer=has_newcomer, is_longer=is_longer)
        self._is_agreed = True
        if ranks.have_inputs:
            self._excess_bytes = excess
        elif self._live.plan is None:
            raise RankError(
                f"another of the {ranks.num_ranks} ranks has no more batches before there is a plan, which all make "
                "together: its first step was skipped, or recorded in vain; have each of them take one more step"
            )

    def plan_again(self) -> None:
        """Plans anew before the next step, if the last one used more than foreseen.

        What it used beyond that is charged to the process, unless actions that were dropped explain it.
        Ranks that train together do so together: by what the one that exceeded its forecast most has used.

        Raises:
            RankError: another rank has ended its run.
        """
        self.agree()
        self._is_agreed = False
        if self._live.ranks is not None and not self._live.ranks.have_inputs:
            return
        excess, self._excess_bytes = self._excess_bytes, 0
        kept, self._kept = self._kept, ""
        what = kept or "a step used %s more than foreseen"
        shortage, self._shortage = self._shortage, None
        if shortage is not None and self._live.ranks is None and self._live.trace is not None:
            self._change_to_less(shortage)
            return
        if not excess:
            return
        is_explained = self._live.note_lost() and not kept
        try:
            revision = self._live.revised(charged_bytes=0 if is_explained else excess)
        except InfeasibleError as error:
            if kept == _BESIDE_TENSORS:  # part of a margin is left
                return
            _log.warning(
                f"{what}, and no plan makes up for it, so the run goes on with this one: %s",
                format_bytes(excess),
                error,
            )
            self._can_plan_again = False
            self._live.in_effect.device_budget.lift()
            return
        _log.warning(f"{what}; a new plan makes up for it from now on", format_bytes(excess))
        self._measured.count_replan()
        self._live.change_to(revision)
        self._can_plan_again = self._measured.num_replans < MAX_ATTEMPTS

    # -- steps that ran out of memory ----------------------------------------------------------------------------------

    def exhaustion_of(self, error: BaseException) -> Exhaustion | None:
        """Returns what a failure to get memory says; None of any other failure."""
        return exhaustion_of(error, self._borders.phase, self._measured.meter)

    @property
    def plan_hash(self) -> str:
        """Returns the hash of the plan in effect; empty where there is none."""
        return "" if self._live.plan is None else self._live.plan.plan_hash

    def why_final(self, state: StepState | None, *, is_joint: bool = False) -> str | None:
        """Returns why a step that ran out of memory cannot be done again; None if it can.

        Args:
            state: what the step began with, where that is known.
            is_joint: whether other ranks do it again with this one.
        """
        if num_processes() > 1 and not is_joint:
            return (
                f"this is one of {num_processes()} processes, and the others wait for its part of this "
                "step: it ends, so that they do not wait for ever"
            )
        if self._live.plan is None:
            return "the first step runs under the safest plan that there is already"
        if self._live.trace is None:
            return "the run follows a plan that was given, and has recorded no step to make another one from"
        if self._measured.oom_recoveries >= MAX_ATTEMPTS:
            return f"this run was recovered {MAX_ATTEMPTS} times before"
        return None if state is None else state.why_not()

    def plan_for_less(self, found: Exhaustion, where: str = "", *, again: str = "step") -> bool:
        """Changes to a plan under which the step would not have failed like that; False if none needs less.

        What was needed beyond the forecast is charged to the process. What the process held is all that it can have:
        where that is below the budget, the budget was not there.

        Args:
            where: names the rank, where several do the step again.
            again: what is done again.
        """
        revision = self._change_to_less(found)
        if revision is None:
            return False
        self._measured.count_recovery()
        self._is_agreed = self._live.ranks is not None
        _log.warning(
            "out of memory%s in the %s of step %d: %s asked for, %s held; the %s is done again; attempt %d of %d, "
            "under a plan for %s",
            where,
            found.phase,
            self._measured.num_steps + 1,
            format_bytes(found.asked_bytes),
            format_bytes(found.held_bytes),
            again,
            self._measured.oom_recoveries,
            MAX_ATTEMPTS,
            format_bytes(revision.plan.forecast.peak.process_bytes),
        )
        return True

    def _change_to_less(self, found: Exhaustion) -> Revision | None:
        before = self._live.plan
        assert before is not None
        self._live.note_lost()
        self._live.in_effect.allocator.trim()
        held_bytes = found.held_bytes
        if self._measured.meter.device != "cpu":
            # A step may begin with nothing cached: then what the last one held says more of what can be had.
            held_bytes, self._ended_bytes = max(held_bytes, self._ended_bytes), 0
        charged_bytes = max(0, held_bytes + found.asked_bytes - before.forecast.steady_process_bytes)
        try:
            revision = self._live.revised(charged_bytes=charged_bytes, held_bytes=held_bytes)
        except InfeasibleError as error:
            # The error that ends the run says what to do.
            needed = format_bytes(error.smallest_feasible_bytes, rounding="up")
            _log.warning("no plan fits the %s that could be had: it takes %s", format_bytes(error.budget_bytes), needed)
            return None
        if revision.plan.actions == before.actions:
            return None
        self._live.change_to(revision)
        return revision

    def make_room(self, error: torch.OutOfMemoryError) -> bool:
        """Makes room for an operation of an optimizer's step on CUDA; tells whether it is to be repeated.

        Parameters have begun to change, so that the step cannot be done again. What follows it runs under a plan that
        needs less.
        """
        found = exhaustion_of(error, "optimizer step", self._measured.meter)
        if found is None or self._measured.oom_recoveries >= MAX_ATTEMPTS:
            return False
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        self._shortage = found
        self._measured.count_recovery()
        _log.warning(
            "out of memory in the optimizer step of step %d: %s asked for, %s held; what failed is repeated; "
            "attempt %d of %d",
            self._measured.num_steps + 1,
            format_bytes(found.asked_bytes),
            format_bytes(found.held_bytes),
            self._measured.oom_recoveries,
            MAX_ATTEMPTS,
        )
        return True

    def make_room_for_evaluation(self, found: Exhaustion) -> None:
        """Gives free memory back before an evaluation is called again; says so once between two steps."""
        self._live.in_effect.allocator.trim()
        if self._measured.meter.device == "cuda":
            clear_cublas_workspaces()
            torch.cuda.empty_cache()
        if self._evaluated_after == self._measured.num_steps:
            return
        self._evaluated_after = self._measured.num_steps
        _log.warning(
            "out of memory in evaluation, after step %d: %s asked for, %s held; what was free is given back, and the "
            "forward is called again, as are others that fail before the next step",
            self._measured.num_steps,
            format_bytes(found.asked_bytes),
            format_bytes(found.held_bytes),
        )

    def error(self, found: Exhaustion, reason: str, *, has_next: bool = True) -> OutOfMemoryError:
        """Returns the error that ends the run.

        Args:
            reason: why the step is not done again.
            has_next: whether a run with a smaller budget may get further.
        """
        plan, foreseen = self._live.plan, ""
        if plan is not None:
            holds = "".join(f", with the most {reason}" for reason in plan.forecast.binding[:1])
            foreseen = f"the plan foresees {format_bytes(plan.forecast.steady_process_bytes)}{holds}"
        return as_error(
            found,
            num_steps=self._measured.num_steps,
            budget_bytes=self._live.budget_bytes,
            reason=reason,
            next_budget_bytes=_budget_after(plan, found) if plan is not None and has_next else 0,
            foreseen=foreseen,
        )

    def explained(self, error: BaseException) -> OutOfMemoryError | None:
        """Returns the typed error for a failure to get memory that nobody handed over; None of any other failure."""
        found = None if isinstance(error, OutOfMemoryError) else self.exhaustion_of(error)
        if found is None:
            return None
        if found.phase == "optimizer step" and self._live.plan is None and self._measured.meter.device == "cuda":
            return self.error(found, STATE_IN_FIRST_STEP)
        if found.phase == "optimizer step":
            return self.error(found, "parameters had begun to change, so that the step cannot be done again")
        reason = self.why_final(None) or (self.why_not_again if found.phase == "forward" else "")
        reason = reason or "the loop computes the gradients itself, so that memwall cannot do that again"
        return self.error(found, reason)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raises the typed error for a failure to get memory within."""
        try:
            yield
        except Exception as error:
            explained = self.explained(error)
            if explained is None:
                raise
            raise explained from error

    @contextmanager
    def bringing_back(self, *, is_last_word: bool) -> Iterator[None]:
        """Says in words what a session that closes has no memory for, within.

        Args:
            is_last_word: whether to raise it; else it is logged, and the caller raises what has ended the training.
        """
        try:
            yield
        except Exception as error:
            found = self.exhaustion_of(error)
            if found is None:
                raise
            asked = format_bytes(found.asked_bytes) if found.asked_bytes else "memory"
            failed = OutOfMemoryError(
                f"out of memory while the session closed: {asked} could not be had while the process held "
                f"{format_bytes(found.held_bytes)}; parameters and optimizer state that the plan has elsewhere are not "
                "all back in memory, and what is not is on the meta device; load them from a checkpoint before they "
                "are used, with more memory free",
                phase="between steps",
                asked_bytes=found.asked_bytes,
                held_bytes=found.held_bytes,
                next_budget_bytes=0,
            )
            if is_last_word:
                raise failed from error
            _log.error("%s", failed)


def excess_bytes(plan: Plan, peak_bytes: int) -> int:
    """Returns how far a step's peak lies above what the plan foresaw; 0 within the margin, or far from the budget."""
    if not _is_near_budget(plan, peak_bytes):
        return 0
    excess = peak_bytes - plan.forecast.steady_process_bytes
    return excess if excess > plan.forecast.margin_bytes else 0


def _is_near_budget(plan: Plan, peak_bytes: int) -> bool:
    budget_bytes = plan.forecast.budget_bytes
    return budget_bytes is not None and peak_bytes + plan.forecast.margin_bytes > budget_bytes


def _budget_after(plan: Plan, found: Exhaustion) -> int:
    """Returns the budget of a plan that would not have failed like that; 0 where there is none.

    What the process held, it can have. And if what is foreseen is too little, as it was for this plan, then a plan that
    foresees less by what was asked for needs that much less. The smallest budget that is told has a margin more, for
    what another recording may differ by, without which the next run may well have a plan.
    """
    margin_bytes = plan.forecast.margin_bytes
    budget_bytes = min(found.held_bytes, plan.forecast.steady_process_bytes - found.asked_bytes) + margin_bytes
    least_bytes = (plan.forecast.smallest_feasible_budget_bytes or 1) - margin_bytes
    return budget_bytes if budget_bytes >= max(least_bytes, 1) else 0
