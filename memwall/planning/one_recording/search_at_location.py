"""Candidates with the optimizer's state and the parameters in one place: what to split, what to treat.

Per candidate: solve for live bytes, replay the treated step through the allocator, take what fragmentation adds off the
budget and solve again. The replayed peak decides; the solver only proposes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from memwall.planning.action import Action
from memwall.planning.block_problem import (
    block_actions,
    build_instance,
    build_menus,
    treatments_of_choice,
    window_bytes_of,
)
from memwall.planning.blocks import find_blocks
from memwall.planning.candidate import Candidate
from memwall.planning.explain import binding_reasons, levers_of
from memwall.planning.forecast import Lever
from memwall.planning.location import Location, can_offload
from memwall.planning.menu import MIN_MOVED_BYTES, WINDOW_BYTES, Costs, Menu
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.one_recording.step_rows import StepRows
from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import Choice, Instance, Link
from memwall.planning.solver.live_limits import LiveLimits
from memwall.planning.solver.solve import lowest_peak, smallest_feasible_bytes, solve
from memwall.planning.step_under_plan import evaluation_under_actions, step_under_actions
from memwall.planning.technique import technique_of, techniques
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.evaluation import copying_bytes
from memwall.predict.process import Resident
from memwall.predict.treatment import StepModel
from memwall.store.transfer import DEFAULT_BLOCK_BYTES
from memwall.trace.records import Step

# What each operation of a further micro-batch costs besides its arithmetic: dispatch and launch.
_SECONDS_PER_OP = 8e-6


class _Batch(NamedTuple):
    """Holds the step of one micro-batch, and how the recorded one is split into such."""

    model: StepModel
    rows: StepRows
    in_chain: StepRows | None = None
    """Rows of blocks that are treated together with those before them; None where that makes no difference."""
    num_parts: int = 1
    actions: tuple[Action, ...] = ()
    """Are what splits it."""

    @property
    def split_seconds(self) -> float:
        """Returns the seconds that further micro-batches cost besides their arithmetic."""
        return (self.num_parts - 1) * len(self.model.step.ops) * _SECONDS_PER_OP


class SearchAtLocation:
    """Finds candidates with state and parameters in one location.

    Args:
        inputs: what candidates share with those of other locations.
        location: where state and parameters are between their uses.
        packs: whether saved tensors may leave with fewer digits.
        fills: whether an allocator may be so full that it gives back what it keeps in every step, which takes time.
        is_outline: whether candidates near the cheapest will do.
    """

    def __init__(
        self,
        inputs: SearchInputs,
        location: Location,
        *,
        packs: bool = False,
        fills: bool = False,
        is_outline: bool = False,
    ) -> None:
        self._inputs, self._location = inputs, location
        self._trace, self._settings = inputs.trace, inputs.settings
        self._process, self._steady = inputs.process, inputs.steady
        self._packs, self._fills, self._is_outline = packs, fills, is_outline

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate within so many process bytes.

        The user's own micro-batch comes first, so that equal costs leave it alone.
        """
        best: Candidate | None = None
        if max(self._location.built_bytes, self._evaluated_bytes) > limit_bytes:
            return None
        limit_bytes -= self._location.grown_bytes
        for batch in self._batches():
            found = self._best_for(batch, limit_bytes, math.inf if best is None else best.extra_seconds)
            if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                best = found
            if best is not None and not best.actions:
                break
        return best

    def smallest_bytes(self) -> int:
        """Returns the smallest budget for which there is a candidate, margin included.

        Of a run that has begun, one with room for an evaluation of a step's samples as well, as most will have one.
        """
        windows = (0, WINDOW_BYTES) if self._can_move else (0,)
        least_bytes: int | None = None
        for batch in self._batches():
            for size in reversed(windows):  # what moves as well needs less, mostly
                least_bytes = self._smallest_for(batch, self._instance(batch, size), least_bytes)
            if batch.in_chain is not None and self._can_move:
                in_chain = self._instance(batch, WINDOW_BYTES, batch.in_chain)
                least_bytes = self._smallest_for(batch, in_chain, least_bytes)
            # With fewest tensors a device's allocator may hold more of what lies between them.
            least_bytes = self._replayed_bytes(batch.model.step, 0, least_bytes)
        assert least_bytes is not None, "there is the recorded batch"
        return max(least_bytes, self._process.budget_for(self.evaluation_bytes))

    @property
    def evaluation_bytes(self) -> int:
        """Returns what the process is foreseen to hold in the evaluation that is known of, or in one as a step has."""
        return self._evaluation_bytes(is_called=True)

    def _evaluation_bytes(self, *, is_called: bool) -> int:
        first = self._settings.first_step
        if first is None or self._trace.device != "cpu":
            return 0
        actions = self._location.actions
        held_bytes = evaluation_under_actions(self._trace, self._steady, actions, first, is_called=is_called)
        return held_bytes + self._location.grown_bytes

    @property
    def copying_bytes(self) -> int:
        """Returns what the process is foreseen to hold with copies of its weights between steps, where that counts."""
        first = self._settings.first_step
        if first is None or self._trace.device != "cpu":
            return 0
        step = step_under_actions(self._trace, self._steady, self._location.actions)
        held_bytes = copying_bytes(self._trace, self._steady, step, keeps_copy=first.kept_bytes > 0)
        return held_bytes and held_bytes + self._location.grown_bytes

    @property
    def _evaluated_bytes(self) -> int:
        first = self._settings.first_step
        return 0 if first is None or not first.evaluation_batch else self._evaluation_bytes(is_called=False)

    def _batches(self) -> Iterator[_Batch]:
        """Yields each micro-batch there is, the recorded one first."""
        steady = step_under_actions(self._trace, self._steady, self._location.actions)
        yield self._batch(steady)
        # What passes all through a step is read again for each part, which no cost here knows.
        if not self._location.keeps_tier_busy and not self._location.keeps_batch_whole:
            is_cooperative = self._settings.allow_accumulation
            for technique in techniques():
                for step, num_parts, action in technique.parts(self._trace, steady, is_cooperative=is_cooperative):
                    yield self._batch(step, num_parts, (action,))

    def _batch(self, step: Step, num_parts: int = 1, actions: tuple[Action, ...] = ()) -> _Batch:
        model = StepModel(step, self._trace.names, find_blocks(self._trace, step))
        device = self._trace.device
        in_chain = StepRows(model, device, in_chain=True) if model.has_chains else None
        return _Batch(model, StepRows(model, device), in_chain, num_parts, actions)

    @property
    def _can_move(self) -> bool:
        """Tells whether saved tensors may move: a disk that others pass through again has no time for them."""
        return can_offload(self._trace) is None and not self._location.keeps_tier_busy

    def _windows(self, batch: _Batch) -> Iterator[tuple[Sequence[Menu], Instance]]:
        """Yields what there is to choose from for each size of the memory that saved tensors may pass through, 0 first.

        What of a block finds no room there leaves while the block waits. A device's copies run beside its kernels, so
        that a window for a whole block hides what its link can carry; a disk's threads want the cores as well.
        """
        yield self._instance(batch, 0)
        if not self._can_move:
            return
        menus, instance = self._instance(batch, WINDOW_BYTES)
        yield menus, instance
        if batch.in_chain is not None:
            yield self._instance(batch, WINDOW_BYTES, batch.in_chain)
        if self._trace.device == "cuda":
            most_bytes = max((option.moved_bytes for menu in menus for option in menu.options), default=0)
            if most_bytes > WINDOW_BYTES:
                yield self._instance(batch, most_bytes)

    def _best_for(self, batch: _Batch, limit_bytes: int, at_most: float) -> Candidate | None:
        """Returns the cheapest candidate for a micro-batch, unless it is known to cost `at_most` seconds or more."""
        room_bytes = limit_bytes - self._process.base_bytes
        if self._trace.device == "cuda" and batch.rows.untouchable_bytes > room_bytes:
            return None
        # What passes through memory beside malloc is in no forecast of it: then the heap is held to a limit.
        if not self._location.keeps_tier_busy:
            plain = self._process.untreated(batch.model.step)
            budget_bytes = self._settings.budget_bytes - self._location.grown_bytes
            # Nor is an evaluation held to anything where nothing is applied.
            most_bytes = max(plain.process_bytes, self._evaluated_bytes)
            if self._process.fits_untouched(most_bytes, budget_bytes=budget_bytes, limit_bytes=limit_bytes):
                return self._found(batch, batch.model.step, plain, None, 0)
        best: Candidate | None = None
        for menus, instance in self._windows(batch):
            found = self._solve_for(batch, menus, instance, limit_bytes, at_most)
            if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                best, at_most = found, min(at_most, found.extra_seconds)
        return best

    def _solve_for(
        self, batch: _Batch, menus: Sequence[Menu], instance: Instance, limit_bytes: int, at_most: float
    ) -> Candidate | None:
        """Solves for several live budgets: more live bytes cost less recomputation, but more page faults.

        Ends as soon as nothing that is left can cost less than `at_most`: replays are what takes long.
        """
        model = batch.model
        room_bytes = limit_bytes - self._process.base_bytes - self._process.workspace_bytes
        best: Candidate | None = None
        tried: set[tuple[int, ...]] = set()
        # What a choice costs besides its own seconds; of page faults it can save no more than there are.
        least_seconds = batch.split_seconds + self._location.seconds - self._inputs.plain_fault_seconds
        limits = LiveLimits(
            room_bytes,
            lambda: smallest_feasible_bytes(instance),
            is_tightened=self._trace.device == "cuda",
        )
        for live_bytes in limits:
            below_seconds = min(at_most - least_seconds, math.inf if best is None else best.extra_seconds)
            choice = solve(instance.within(live_bytes), below_seconds=below_seconds, is_outline=self._is_outline)
            if choice is None or (best is not None and choice.extra_seconds >= best.extra_seconds):
                break  # fewer live bytes are harder still, and cost more
            if choice.extra_seconds + least_seconds >= at_most:
                break
            if choice.options in tried:
                continue
            tried.add(choice.options)
            treatments, window_bytes = self._treatments(menus, choice)
            step = model.treated(treatments)
            resident = self._resident(step, limit_bytes - window_bytes, fills=self._fills)
            most_bytes = limit_bytes
            if self._fills and self._process.gives_back and resident.process_bytes + window_bytes <= limit_bytes:
                # It could do with less, but is held to the budget alone: up to that it keeps what it has, which may be
                # in pieces that a later request does not fit into, though it would with less.
                most_bytes = self._settings.budget_bytes - self._location.grown_bytes
                resident = self._resident(step, most_bytes - window_bytes, fills=True)
            if resident.process_bytes + window_bytes > most_bytes:
                limits.over(resident.process_bytes + window_bytes - self._process.base_bytes)
                continue
            found = self._found(batch, step, resident, (menus, choice), window_bytes)
            if best is None or found.extra_seconds < best.extra_seconds:
                best = found
        return best

    def _treatments(self, menus: Sequence[Menu], choice: Choice) -> tuple[dict[str, Treatment], int]:
        """Returns a choice's treatments, and the memory beside the step for what passes through.

        On a device sources and buffers are the allocator's blocks as all others are, and part of the step.
        """
        treatments, window_bytes = treatments_of_choice(menus, choice), window_bytes_of(menus, choice)
        if self._trace.device == "cpu" or not window_bytes:
            return treatments, window_bytes
        return {path: each.but(window_bytes=window_bytes) for path, each in treatments.items()}, 0

    def _resident(self, step: Step, limit_bytes: int, *, fills: bool) -> Resident:
        if self._trace.device not in ("cpu", "cuda"):  # nothing is known about another device's allocator
            return self._process.bare(step)
        forecast = self._process.crowded if fills else self._process.treated
        resident = forecast(step, limit_bytes)
        # What passes through lies outside the heap.
        outside_bytes = resident.outside_bytes + self._location.paged_bytes
        return msgspec.structs.replace(resident, outside_bytes=outside_bytes)

    def _instance(
        self, batch: _Batch, window_bytes: int, rows: StepRows | None = None
    ) -> tuple[tuple[Menu, ...], Instance]:
        machine = self._trace.machine
        tier, link = machine.next_tier if window_bytes else None, None
        if tier is not None:
            # A block's seconds are those of all parts, its bytes those of one, which pass as often as there are parts.
            link = Link(
                write_bytes_per_second=tier.write_bytes_per_second / batch.num_parts,
                read_bytes_per_second=tier.read_bytes_per_second / batch.num_parts,
                window_bytes=window_bytes,
                capacity_bytes=self._inputs.capacity_bytes - self._location.held_bytes if self._inputs.may_write else 0,
                piece_bytes=DEFAULT_BLOCK_BYTES if tier.name == "disk" else 0,
            )
        costs = Costs(
            copy_seconds_per_byte=machine.copy_seconds_per_byte,
            min_bytes=MIN_MOVED_BYTES,
            pack_seconds_per_element=machine.pack_seconds_per_element if self._packs else None,
            runs_ahead=self._trace.device != "cpu",
            num_passes=batch.num_parts,
            link=link,
            lost=self._settings.lost,
        )
        rows = rows or batch.rows
        menus = build_menus(self._trace, batch.model, costs, rows)
        return menus, build_instance(
            batch.model, menus, budget_bytes=0, device=self._trace.device, link=link, rows=rows
        )

    def _found(
        self,
        batch: _Batch,
        step: Step,
        resident: Resident,
        solved: tuple[Sequence[Menu], Choice] | None,
        window_bytes: int,
    ) -> Candidate:
        standing = sorted(self._settings.standing, key=lambda action: technique_of(action).order)
        actions = [*self._location.actions, *standing, *batch.actions]
        split_seconds = batch.split_seconds
        extra_seconds, moved_bytes, bound = split_seconds, 0, 0.0
        levers: tuple[Lever, ...] = ()
        if solved is not None:
            menus, choice = solved
            levers = levers_of(menus, choice, actions)
            actions.extend(block_actions(menus, choice, self._trace.device))
            extra_seconds += choice.extra_seconds
            bound = choice.lower_bound_seconds + split_seconds
            moved_bytes = batch.num_parts * sum(
                m.options[o].moved_bytes for m, o in zip(menus, choice.options, strict=True)
            )
        process_bytes = resident.process_bytes + window_bytes + self._location.grown_bytes
        fault_seconds = 0.0 if resident.is_default else resident.fault_seconds - self._inputs.plain_fault_seconds
        settled = (
            technique.settled_action(self._inputs, resident, process_bytes, window_bytes) for technique in techniques()
        )
        actions.extend(action for action in settled if action is not None)
        return Candidate(
            actions=tuple(actions),
            process_bytes=process_bytes,
            live_bytes=live_peak_bytes(step, self._trace.device),
            extra_seconds=extra_seconds + fault_seconds + self._location.seconds,
            compute_seconds=max(0.0, step_seconds(step) + split_seconds + fault_seconds),
            moved_bytes=moved_bytes,
            location=self._location,
            num_parts=batch.num_parts,
            lower_bound_seconds=bound + self._location.seconds,
            levers=levers,
            binding=binding_reasons(self._trace, step, moved_bytes, actions),
        )

    def _smallest_for(self, batch: _Batch, offered: tuple[Sequence[Menu], Instance], known_bytes: int | None) -> int:
        """Returns the smallest budget with what is offered, or the known one where that is no larger."""
        menus, instance = offered
        leanest = lowest_peak(instance)
        verdict = evaluate(instance, leanest)
        # Where the program runs into its time limit, it may not find again what it has found here.
        choice = solve(instance.within(verdict.peak_bytes))
        choice = choice or Choice(leanest, verdict.extra_seconds, 0.0)
        treatments, beside_bytes = self._treatments(menus, choice)
        return self._replayed_bytes(batch.model.treated(treatments), beside_bytes, known_bytes)

    def _replayed_bytes(self, step: Step, beside_bytes: int, known_bytes: int | None) -> int:
        """Returns the smallest budget for such a step, or the known one where that is no larger."""
        beside_bytes += self._location.grown_bytes
        if known_bytes is not None and self._trace.device == "cuda":  # what is replayed holds its tensors at least
            bare_bytes = self._process.bare(step).process_bytes + beside_bytes
            if self._process.budget_for(max(bare_bytes, self._location.built_bytes)) >= known_bytes:
                return known_bytes
        process_bytes = self._resident(step, 0, fills=True).process_bytes + beside_bytes
        smallest_bytes = self._process.budget_for(max(process_bytes, self._location.built_bytes))
        return smallest_bytes if known_bytes is None else min(smallest_bytes, known_bytes)
