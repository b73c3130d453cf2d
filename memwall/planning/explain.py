"""Why a plan is what it is: what binds, what is missing, what would help, the levers it took or left; and its line.

A lever is the exchange rate between memory and time that the solver saw: what another GiB would cost that way.
"""

from collections.abc import Iterator, Sequence

from memwall.planning.action import Action
from memwall.planning.forecast import Lever
from memwall.planning.menu import Menu
from memwall.planning.planfile import Plan
from memwall.planning.solver.instance import Choice
from memwall.planning.technique import alike, technique_of, techniques
from memwall.predict.curve import peak_of
from memwall.predict.link_time import LinkTime
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

STATE_IN_FIRST_STEP = (
    "the recorded step's optimizer has its state on the device where that cannot leave as it is made; a plan that was "
    "made before has it in host memory from the start: `memwall plan SPEC --device NAME --host SIZE`, then "
    "`memwall run --plan`"
)
_SECONDS_PER_DAY = 86_400
_SMALL_STEP_BYTES = 64 << 20
"""Bytes that a step adds to its process, below which nothing is gained: memwall takes 30 MiB and two margins itself."""


def binding_reasons(trace: Trace, step: Step, moved_bytes: int, actions: Sequence[Action] = ()) -> tuple[str, ...]:
    """Returns what keeps the step from being faster: the instant at which bytes are tight, and the link if one is used.

    Args:
        moved_bytes: saved tensors that leave in a step.
        actions: of the plan.
    """
    peak = peak_of(trace, step)
    where = f"{peak.phase} in {peak.module}"
    largest = ", ".join(f"{share.name} {format_bytes(share.num_bytes)}" for share in peak.by_category[:3])
    reasons = [f"memory at {where}: {format_bytes(peak.live_bytes)} of tensors ({largest})"]
    if moved_bytes:
        tier = "disk" if trace.device == "cpu" else "host memory"
        reasons.append(f"{format_bytes(moved_bytes)} go to {tier} and come back in each step")
    for technique in techniques():
        reasons += technique.binding(trace, [one for one in actions if technique_of(one) is technique])
    return tuple(reasons)


def disk_wear(link: LinkTime | None, step_seconds: float) -> tuple[str, ...]:
    """Returns what a step's writes wear off a disk; nothing where it writes nothing.

    A disk is sold for so many writes of its whole size a day, over the years of its warranty.
    """
    if link is None or link.tier != "disk" or step_seconds <= 0:
        return ()
    per_day = link.written_bytes_per_day(step_seconds)
    text = f"{format_bytes(per_day)} are written to the disk in a day of such steps, {step_seconds:.3g} s each"
    if link.tier_total_bytes:
        text += f": {per_day / link.tier_total_bytes:.2g} times the file system's size"
    return (text,)


def relaxations(trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> tuple[str, ...]:
    """Returns what to allow or lower so that less memory is needed, cheapest first."""
    ranked = sorted(techniques(), key=lambda technique: technique.advice_rank)
    advice = (technique.advice(trace, allow, can_split=can_split) for technique in ranked)
    found = [text for text in advice if text is not None]
    found.append("shorten the sequence or lower the resolution")
    return tuple(found)


def infeasible_message(
    trace: Trace,
    budget_bytes: int,
    smallest_bytes: int,
    helps: tuple[str, ...],
    *,
    parameters_stay: str = "",
    is_running: bool = False,
    evaluation_batch: int = 0,
    evaluation_bytes: int = 0,
    kept_bytes: int = 0,
    kept_at: str = "",
    without_copies_bytes: int = 0,
    plain_bytes: int | None = None,
    first_step_bytes: int = 0,
    before_bytes: int = 0,
) -> str:
    """Returns one message: what was asked, what was found, what to do.

    Args:
        is_running: a run has begun, and may do other things than its training steps.
        evaluation_batch: samples of an evaluation that the smallest budget has room for; 0 where none is known.
        evaluation_bytes: what the process is foreseen to hold in that.
        kept_bytes: a copy of the weights that the script is going to keep, which is in the trace; 0 for none.
        kept_at: the line that keeps it.
        without_copies_bytes: the smallest budget for the steps alone, where copies of the weights between them are what
            decides; 0 where they do not.
        parameters_stay: why parameters and gradients cannot be on disk, if they cannot.
        plain_bytes: what the process is foreseen to hold with nothing done; None where no run has begun.
        first_step_bytes: what the recorded step held on a device, where that is what no smaller budget has room for.
        before_bytes: what the process held before that step, where that is it.
    """
    parameters = sum(s.nbytes for s in trace.steps[0].storages if s.category == "parameter")
    gains_nothing = plain_bytes is not None and plain_bytes <= (without_copies_bytes or smallest_bytes)
    is_small = gains_nothing and (plain_bytes or 0) - trace.base_bytes < _SMALL_STEP_BYTES
    largest = max(trace.modules, key=lambda module: module.parameter_bytes, default=None)
    lines = [
        f"the budget of {format_bytes(budget_bytes, rounding='down')} cannot be met: the smallest feasible one is "
        f"{format_bytes(smallest_bytes, rounding='up')}, "
        f"{format_bytes(smallest_bytes - budget_bytes, rounding='up')} more",
        f"of that, {format_bytes(trace.base_bytes - kept_bytes)} are the process before the step, "
        f"{format_bytes(parameters)} parameters"
        + (f" (largest: {largest.path or largest.class_name})" if largest is not None else ""),
        *([_outside(trace.micro_batch, evaluation_batch, evaluation_bytes)] if is_running else []),
        *(
            [f"a copy of the weights, {format_bytes(kept_bytes)}, which {kept_at} keeps, is in that too"]
            * bool(kept_at)
        ),
        *([_with_copies(without_copies_bytes, is_kept=kept_bytes > 0)] if without_copies_bytes else []),
        *([_without_gain(plain_bytes or 0, is_small=is_small)] if gains_nothing else []),
        *(
            [f"the first step held {format_bytes(first_step_bytes, rounding='up')}: {STATE_IN_FIRST_STEP}"]
            if first_step_bytes
            else []
        ),
        *(
            [f"before its first step the script held {format_bytes(before_bytes, rounding='up')}, in work of its own"]
            if before_bytes
            else []
        ),
        *([f"parameters and gradients stay in memory: {parameters_stay}"] if parameters_stay else []),
        *(f"  - {help_line}" for help_line in helps if not is_small),
    ]
    return "\n".join(lines)


def _without_gain(plain_bytes: int, *, is_small: bool) -> str:
    advice = (
        "the script is too small for a plan to pay, run it without memwall"
        if is_small
        else "no plan of the allowed ways makes its step smaller"
    )
    return (
        f"with nothing done it would hold about {format_bytes(plain_bytes)}, some 30 MiB of which are memwall's own: "
        f"{advice}"
    )


def _with_copies(without_bytes: int, *, is_kept: bool) -> str:
    reason = "beside that copy" if is_kept else "gradients or state are not all in memory at once, so that"
    return (
        f"{reason} a digest of all weights between steps holds more than a step: two copies of them are in that; a "
        f"script that makes none needs {format_bytes(without_bytes, rounding='up')}"
    )


def _outside(trained_batch: int, evaluation_batch: int, evaluation_bytes: int) -> str:
    if evaluation_batch > trained_batch:
        return (
            f"an evaluation of {evaluation_batch} samples at once, more than the {trained_batch} of a step, is "
            f"foreseen to hold {format_bytes(evaluation_bytes, rounding='up')}, which is in that, and no plan makes it "
            "smaller: evaluate fewer at once; a data loader with such batches, which evaluates nothing in this run, is "
            "built after the second step"
        )
    if evaluation_bytes:
        return "an evaluation of as many samples as a step has is in that; what else the script does is not"
    return "what the script does outside its training steps, evaluation say, is not in that"


def levers_of(menus: Sequence[Menu], choice: Choice, fixed: Sequence[Action]) -> tuple[Lever, ...]:
    """Returns the levers of a choice, the cheapest per byte first.

    Args:
        fixed: the plan's other actions; of these, those that say what they free and cost.
    """
    found = [
        lever
        for technique in techniques()
        for name, text in technique.block_levers.items()
        if (lever := _block_lever(name, text, menus, choice)) is not None
    ]
    for action in fixed:
        text = technique_of(action).lever(action)
        if text and action.saved_bytes and action.saved_bytes > 0 and action.cost_seconds is not None:
            found.append(Lever(name=text, freed_bytes=action.saved_bytes, cost_seconds=action.cost_seconds))
    return tuple(sorted(found, key=lambda lever: lever.seconds_per_gib))


def _block_lever(name: str, text: str, menus: Sequence[Menu], choice: Choice) -> Lever | None:
    """Returns one way to treat blocks, in all that have it: the point that is used, or else the cheapest per byte."""
    num_blocks = num_used = freed_bytes = 0
    cost_seconds = 0.0
    for menu, chosen in zip(menus, choice.options, strict=True):
        points = list(_points(name, menu))
        if not points:
            continue
        point = chosen if chosen in points else min(points, key=lambda p: _rate(menu, p))
        num_blocks += 1
        num_used += chosen in points
        freed_bytes += menu.freed_bytes[point]
        cost_seconds += menu.options[point].extra_seconds
    if not num_blocks:
        return None
    return Lever(
        name=text,
        freed_bytes=freed_bytes,
        cost_seconds=cost_seconds,
        num_blocks=num_blocks,
        num_blocks_used=num_used,
    )


def _points(name: str, menu: Menu) -> Iterator[int]:
    """Yields a block's options of that name that free anything; selective recomputation has several."""
    for number, option in enumerate(menu.options):
        if option.name.partition("-")[0] == name and menu.freed_bytes[number] > 0:
            yield number


def _rate(menu: Menu, point: int) -> float:
    return menu.options[point].extra_seconds / menu.freed_bytes[point]


def plan_line(plan: Plan) -> str:
    """Returns what a plan does, what it foresees, and what it writes to the disk in a day."""
    forecast = plan.forecast
    budget = "" if not forecast.budget_bytes else f" for {format_bytes(forecast.budget_bytes, rounding='down')}"
    foreseen = f"foresees {format_bytes(forecast.peak.process_bytes, rounding='up')}"
    if plan.actions and forecast.plain_peak is not None:
        foreseen += f" (without it {format_bytes(forecast.plain_peak.process_bytes, rounding='up')})"
    if forecast.step_seconds and forecast.plain_step_seconds and plan.actions:
        foreseen += f", steps {forecast.step_seconds / forecast.plain_step_seconds:.2f} times as long"
    writes = writes_text(plan)
    return f"the plan{budget}: {actions_text(plan.actions)}; {foreseen}{f'; {writes}' if writes else ''}"


def actions_text(actions: tuple[Action, ...]) -> str:
    """Returns what actions do and where, equal ones together: "recompute at layers.0-11; offload at head"."""
    texts = []
    for same in alike(actions):
        technique = technique_of(same[0])
        where = technique.where(same)
        texts.append(technique.what(same[0]) + (f" ({where})" if where else ""))
    return ", ".join(texts) or "nothing needs to be done"


def writes_text(plan: Plan) -> str:
    """Returns what a plan writes to the disk in a day, and how to have it write nothing; "" where it does not."""
    forecast = plan.forecast
    if forecast.link is None or forecast.link.tier != "disk" or not forecast.step_seconds:
        return ""
    per_day = forecast.link.written_bytes / forecast.step_seconds * _SECONDS_PER_DAY
    return f"{format_bytes(per_day, rounding='up')} a day are written to the disk (nothing with --no-disk)"
