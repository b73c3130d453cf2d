"""Who takes part in the planner benchmark: knobs as they are set by hand, other planners, and memwall.

A knob offers settings, and gets the best one that fits, as from a sweep. A planner gets one shot at each budget. All
speak in `Order`s per block, so that the simulator can judge them alike.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from planner_chain import chain_of
from planner_dynamic import solve_chain
from planner_greedy import solve_greedy
from planner_models import PlannedStep
from planner_simulator import MIN_MOVED_BYTES, Order, Outcome, Simulator
from planner_tape import DEVICE

from memwall.planning.block_problem import build_instance, build_menus, treatments_of_choice
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import WINDOW_BYTES, Costs, Menu
from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import Choice, Instance, Link
from memwall.planning.solver.solve import solve
from memwall.predict.curve import live_peak_bytes
from memwall.predict.treatment import StepModel

Orders = dict[int, Order]

MOST_CHOICES = 600_000
"""Up to here every choice is tried."""
_BISECTIONS = 10
_REPLAY_ROUNDS = 4
_TIER_BYTES = 1 << 44


class Setting(NamedTuple):
    """One way to set a knob."""

    label: str
    orders: Orders


class Side(NamedTuple):
    """The planner's problem without the next tier, or with it."""

    menus: tuple[Menu, ...]
    instance: Instance


class Forecast(NamedTuple):
    """What memwall says of its own plan."""

    orders: Orders
    peak_bytes: int
    extra_seconds: float
    lower_bound_seconds: float
    cpu_seconds: float
    window_bytes: int | None = None
    """Memory for bytes on their way out; None for the cost table's."""


class Problem:
    """One workload on one device: the simulator, and what memwall's planner makes of the trace."""

    def __init__(self, planned: PlannedStep) -> None:
        self.planned = planned
        self.simulator = Simulator(planned.step, planned.costs)
        self.base = self.simulator.run({})
        trace, step, costs = planned.trace, planned.step, planned.costs
        self.has_tier = costs.write_bytes_per_second > 0
        self.model = StepModel(step, trace.names, find_blocks(trace, step))
        self.sides = (self._side(0), self._side(costs.window_bytes)) if self.has_tier else (self._side(0),)
        self.narrow_sides = (self._side(WINDOW_BYTES),) if costs.window_bytes > WINDOW_BYTES else ()
        """With the window that memwall's plans have: less memory than the table's, and more waiting."""

    def _side(self, window_bytes: int) -> Side:
        """Returns the problem with the next tier, or without it where there is no memory for bytes on their way."""
        trace, costs = self.planned.trace, self.planned.costs
        has_link = window_bytes > 0
        link = Link(
            write_bytes_per_second=costs.write_bytes_per_second,
            read_bytes_per_second=costs.read_bytes_per_second,
            window_bytes=window_bytes,
            capacity_bytes=_TIER_BYTES,
        )
        menu_costs = Costs(
            copy_seconds_per_byte=costs.copy_seconds_per_byte,
            min_bytes=MIN_MOVED_BYTES,
            link=link if has_link else None,
        )
        menus = build_menus(trace, self.model, menu_costs)
        instance = build_instance(self.model, menus, budget_bytes=0, device=DEVICE, link=link if has_link else None)
        return Side(menus, instance)

    def orders_of(self, side: Side, choice: Choice) -> Orders:
        """What a choice of memwall's solvers means to the executor."""
        orders = {}
        for menu, option in zip(side.menus, choice.options, strict=True):
            treatment = menu.treatments[option]
            if treatment is not None:
                counted = self.model.counted_ops(menu.block.calls[0])
                kept = frozenset(counted[place] for place in treatment.kept_ops)
                orders[menu.block.module] = Order(treatment.recompute, kept, treatment.offload)
        return orders

    def extra_seconds(self, outcome: Outcome) -> float:
        """What a step takes longer than with everything kept."""
        return outcome.step_seconds - self.base.step_seconds


# -- knobs -------------------------------------------------------------------------------------------------------------


def knobs(problem: Problem) -> dict[str, list[Setting]]:
    """Arm -> its settings."""
    blocks = problem.planned.blocks
    count = len(blocks)
    full = Order(recompute=True)
    found = {
        "keep-all": [Setting("", {})],
        "full": [Setting("", dict.fromkeys(blocks, full))],
        "every-n": [Setting(f"n={n}", dict.fromkeys(blocks[::n], full)) for n in range(2, count + 1)],
        "first-n": [Setting(f"n={n}", dict.fromkeys(blocks[:n], full)) for n in range(1, count)],
        "sac-alternate": [Setting("", _alternate_products(problem))],
    }
    if problem.has_tier:
        found["offload"] = [Setting("", dict.fromkeys(blocks, Order(offload=True)))]
        found["full+offload"] = [Setting("", dict.fromkeys(blocks, Order(recompute=True, offload=True)))]
    return found


def _alternate_products(problem: Problem) -> Orders:
    """torchtitan's selective checkpointing: keeps attention and every second matrix product or convolution."""
    names, step = problem.planned.trace.names, problem.planned.step
    orders = {}
    for call in step.calls:
        kept, num_products = [], 0
        for number in range(call.start, call.end):
            name = names[step.ops[number].name]
            if "attention" in name:
                kept.append(number)
            elif name in ("aten.mm.default", "aten.convolution.default"):
                num_products += 1
                if num_products % 2:
                    kept.append(number)
        orders[call.module] = Order(recompute=True, kept_ops=frozenset(kept))
    return orders


# -- planners ----------------------------------------------------------------------------------------------------------

Planner = Callable[[Problem, int], Orders | None]


def planners() -> dict[str, Planner]:
    """Arm -> what it plans at a budget, None where it finds nothing or does not apply."""
    return {**_torch_knapsacks(), "greedy": _greedy, "dynamic": _dynamic, "exhaustive": _exhaustive}


def _torch_knapsacks() -> dict[str, Planner]:
    try:
        from torch._functorch._activation_checkpointing import knapsack
    except ImportError:
        return {}
    solvers = {name: getattr(knapsack, f"{name}_knapsack", None) for name in ("greedy", "dp")}
    return {f"knapsack-{name}": _knapsack(solver) for name, solver in solvers.items() if solver is not None}


def _knapsack(solver: Callable[..., Any]) -> Planner:
    """torch.compile's memory budget: a ratio of saved bytes, bisected until the peak fits."""

    def planner(problem: Problem, budget_bytes: int) -> Orders | None:
        items = list(_saved_by_op(problem))
        total_bytes = sum(size for _, size, _ in items)
        memory = [size / total_bytes for _, size, _ in items]
        runtimes = [seconds for _, _, seconds in items]
        low, high = 0.0, 1.0
        best: Orders | None = None
        best_seconds = math.inf
        for step in range(_BISECTIONS + 1):
            ratio = (low + high) / 2 if step else 0.0
            saved = solver(memory, runtimes, ratio)[1] if ratio else []
            orders = _keeping(problem, [items[place][0] for place in saved], [op for op, _, _ in items])
            outcome = problem.simulator.run(orders)
            if outcome.peak_bytes > budget_bytes:
                high = ratio
                continue
            low = ratio
            if outcome.step_seconds < best_seconds:
                best, best_seconds = orders, outcome.step_seconds
        return best

    return planner


def _saved_by_op(problem: Problem) -> Iterator[tuple[int, int, float]]:
    """(operation, bytes it makes, its seconds) of the blocks' operations whose results autograd saves."""
    step = problem.planned.step
    saved = {save.storage for save in step.saved}
    for call in step.calls:
        for number in range(call.start, call.end):
            op = step.ops[number]
            if saved.intersection(op.outputs):
                yield number, sum(step.storages[index].nbytes for index in op.outputs), op.seconds


def _keeping(problem: Problem, kept: Sequence[int], candidates: Sequence[int]) -> Orders:
    """Blocks that keep exactly these of the candidate operations; one that keeps all of its own is left alone."""
    is_kept = set(kept)
    orders = {}
    for call in problem.planned.step.calls:
        own = [op for op in candidates if call.start <= op < call.end]
        chosen = frozenset(op for op in own if op in is_kept)
        if len(chosen) < len(own):
            orders[call.module] = Order(recompute=True, kept_ops=chosen)
    return orders


def _cheaper_side(problem: Problem, answers: Sequence[Choice | None]) -> Orders | None:
    found = [(choice.extra_seconds, place) for place, choice in enumerate(answers) if choice is not None]
    if not found:
        return None
    place = min(found)[1]
    choice = answers[place]
    assert choice is not None
    return problem.orders_of(problem.sides[place], choice)


def _greedy(problem: Problem, budget_bytes: int) -> Orders | None:
    """Least seconds per byte of peak removed, on memwall's menu."""
    return _cheaper_side(
        problem, [solve_greedy(replace(side.instance, budget_bytes=budget_bytes)) for side in problem.sides]
    )


def _dynamic(problem: Problem, budget_bytes: int) -> Orders | None:
    """The dynamic program, on memwall's menu without the next tier, where the blocks are a chain."""
    side = problem.sides[0]
    chain = chain_of(replace(side.instance, budget_bytes=budget_bytes))
    if chain is None:
        return None
    quantum_bytes = max(1, (problem.base.peak_bytes - chain.base_bytes) >> 14)
    choice = solve_chain(chain, budget_bytes, quantum_bytes=quantum_bytes)
    return None if choice is None else problem.orders_of(side, choice)


def _exhaustive(problem: Problem, budget_bytes: int) -> Orders | None:
    """Every choice of memwall's menu, where there are few enough."""
    return _cheaper_side(
        problem, [_best_of_all(replace(side.instance, budget_bytes=budget_bytes)) for side in problem.sides]
    )


def _best_of_all(instance: Instance) -> Choice | None:
    counts = [len(block.options) for block in instance.blocks]
    if not counts or math.prod(counts) > MOST_CHOICES:
        return None
    options = np.indices(counts).reshape(len(counts), -1)
    peaks = np.zeros(options.shape[1], dtype=np.int64)
    for row in instance.rows:
        held = sum(np.asarray(sizes)[chosen] for sizes, chosen in zip(row.held, options, strict=True))
        np.maximum(peaks, row.fixed_bytes + held, out=peaks)
    seconds = np.zeros(options.shape[1])
    for block, chosen in zip(instance.blocks, options, strict=True):
        seconds += np.asarray([option.extra_seconds for option in block.options])[chosen]
    (fitting,) = np.nonzero(peaks <= instance.budget_bytes)
    best: Choice | None = None
    # Waiting only adds to a choice's own seconds: past the best found, none can be cheaper.
    for number in fitting[np.argsort(seconds[fitting], kind="stable")]:
        if best is not None and seconds[number] >= best.extra_seconds:
            break
        choice = tuple(int(option) for option in options[:, number])
        verdict = evaluate(instance, choice)
        if verdict.fits and (best is None or verdict.extra_seconds < best.extra_seconds):
            best = Choice(choice, verdict.extra_seconds, 0.0)
    return best


# -- memwall -----------------------------------------------------------------------------------------------------------


def memwall(problem: Problem, budget_bytes: int) -> Forecast | None:
    """Plans without and with the next tier; where neither fits, with the narrow window of memwall's own plans."""
    start = time.process_time()
    best = _best_of(problem, problem.sides, budget_bytes) or _best_of(problem, problem.narrow_sides, budget_bytes)
    return None if best is None else best._replace(cpu_seconds=time.process_time() - start)


def _best_of(problem: Problem, sides: Sequence[Side], budget_bytes: int) -> Forecast | None:
    """Returns planning.solver.solve's cheapest answer; each is replayed, and solved again if too large.

    The bound is the lowest of the sides': nothing on memwall's menus can be cheaper.
    """
    best: Forecast | None = None
    bounds = []
    for side in sides:
        room_bytes = budget_bytes
        for number in range(_REPLAY_ROUNDS):
            choice = solve(replace(side.instance, budget_bytes=room_bytes))
            if choice is None:
                break
            if not number:
                bounds.append(choice.lower_bound_seconds)
            peak_bytes = _replayed_bytes(problem, side, choice)
            if peak_bytes <= budget_bytes:
                if best is None or choice.extra_seconds < best.extra_seconds:
                    orders, link = problem.orders_of(side, choice), side.instance.link
                    window_bytes = None if link is None else link.window_bytes
                    best = Forecast(orders, peak_bytes, choice.extra_seconds, 0.0, 0.0, window_bytes)
                break
            room_bytes -= peak_bytes - budget_bytes
    return None if best is None else best._replace(lower_bound_seconds=min(bounds))


def _replayed_bytes(problem: Problem, side: Side, choice: Choice) -> int:
    """Peak of memwall's own replay, with the window if bytes move."""
    treated = problem.model.treated(treatments_of_choice(side.menus, choice))
    moves = any(menu.options[o].moved_bytes for menu, o in zip(side.menus, choice.options, strict=True))
    window_bytes = side.instance.link.window_bytes if moves and side.instance.link else 0
    return live_peak_bytes(treated, DEVICE) + window_bytes
