"""The planner benchmark: its simulator counts right, its traces are frozen, and its gates hold and can fail."""

import random
from pathlib import Path

import msgspec
import planner
import planner_report
import pytest
from planner_arms import Forecast, Problem
from planner_models import planned_step
from planner_simulator import CHECKPOINT_SECONDS, Order, Simulator
from planner_tape import DEVICE, CostTable, Tape

from memwall.planning.block_problem import treatments_of_choice
from memwall.planning.solver.instance import Choice
from memwall.predict.curve import live_peak_bytes

S = 10 << 20
"""Bytes of every activation of the small step below."""
STANDING = 8 + 2 + 12  # text, one weight, its optimizer state
# Every operation takes one second; a storage takes two to leave and five to come back, one may be on its way.
SECOND = CostTable("", 1e30, 1e30, S / 2, S / 5, S, launch_seconds=1.0, interference=0.0)


def _two_blocks() -> tuple[Simulator, list[int]]:
    """x -> (a, b) -> (c, d) -> loss, each operation saving what it reads."""
    tape = Tape(SECOND)
    text, weight = tape.standing(8, "input"), tape.weight(1)
    (x,) = tape.run("aten.embedding.default", (text,), (S,), weights=(weight,))
    blocks = []
    for path in ("first", "second"):
        blocks.append(tape.module(path, "Block"))
        with tape.call(blocks[-1], (x,)):
            for _ in range(2):
                (x,) = tape.run("aten.silu.default", (x,), (S,), saves=(x,))
    tape.begin_loss()
    (loss,) = tape.run("aten.mse_loss.default", (x,), (4,), saves=(x,))
    tape.backward(loss)
    tape.optimizer_step()
    return Simulator(tape.trace("").steps[0], SECOND), blocks


def test_a_plain_step_holds_what_autograd_saved_until_backward_is_done_with_it() -> None:
    simulator, _ = _two_blocks()
    outcome = simulator.run({})
    # Forward: 6 operations; backward: 1 to begin, 1 for the loss, 4, 1 for the weight; optimizer: 1.
    assert outcome.step_seconds == 14.0
    # The first gradient beside x, a, b, c and d, and the two scalars' 4 bytes that the loss began with.
    assert outcome.peak_bytes == 6 * S + STANDING + 4


def test_recomputation_holds_the_inputs_and_what_it_makes_again() -> None:
    simulator, blocks = _two_blocks()
    outcome = simulator.run(dict.fromkeys(blocks, Order(recompute=True)))
    # Where c's gradient is made: x, b, c made again, and two gradients.
    assert outcome.peak_bytes == 5 * S + STANDING
    # One operation each runs again: nothing needs the second one's result.
    assert outcome.step_seconds == pytest.approx(16.0 + 2 * CHECKPOINT_SECONDS)
    assert outcome.stall_seconds == 0.0


def test_a_kept_result_is_not_made_again() -> None:
    simulator, blocks = _two_blocks()
    call = simulator.calls[1]
    kept = simulator.run({blocks[1]: Order(recompute=True, kept_ops=frozenset({call.start}))})
    made_again = simulator.run({blocks[1]: Order(recompute=True)})
    assert kept.step_seconds < made_again.step_seconds - 0.99
    assert kept.peak_bytes == simulator.run({}).peak_bytes
    assert made_again.peak_bytes == kept.peak_bytes - 4  # c is back when the 4 bytes are gone


def test_moved_bytes_wait_for_the_way_out_and_for_the_way_back() -> None:
    simulator, blocks = _two_blocks()
    outcome = simulator.run({blocks[0]: Order(offload=True)})
    assert outcome.moved_bytes == 2 * S
    # x leaves from second 1 to 3, so a must wait from 2 to 3. a never needs to come back: it is still being held. x is
    # read from second 9, where the second block's backward begins, to 14; it is asked for at 12.
    assert outcome.stall_seconds == pytest.approx(1.0 + 2.0)
    assert outcome.step_seconds == pytest.approx(17.0)
    # There a, x on its way back, b, c, and two gradients.
    assert outcome.peak_bytes == 6 * S + STANDING


@pytest.mark.parametrize(("workload", "table"), [("unet-5", "a100-no-tier"), ("encoder-decoder", "h200")])
def test_simulator_and_replay_were_written_apart_and_agree_on_recomputation_to_the_byte(
    workload: str, table: str
) -> None:
    problem = Problem(planned_step(workload, table))
    side = problem.sides[0]
    rng = random.Random(3)
    for _ in range(12):
        choice = Choice(tuple(rng.randrange(len(menu.options)) for menu in side.menus), 0.0, 0.0)
        replayed = problem.model.treated(treatments_of_choice(side.menus, choice))
        simulated = problem.simulator.run(problem.orders_of(side, choice))
        assert simulated.peak_bytes == live_peak_bytes(replayed, DEVICE)
        chosen = [menu.options[option] for menu, option in zip(side.menus, choice.options, strict=True)]
        claimed = sum(option.extra_seconds for option in chosen)
        assert problem.extra_seconds(simulated) == pytest.approx(claimed, rel=1e-9)


def test_the_same_file_gives_the_same_traces() -> None:
    first, second = (msgspec.msgpack.encode(planned_step("decoder-32-varied", "h200").trace) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("workload", "table"),
    [("decoder-5", "rtx-4090"), ("unet-5", "a100-slow-nvme"), ("decoder-24", "a100-no-tier")],
)
def test_gates_hold(workload: str, table: str) -> None:
    step = planner.measure(workload, table, (100, 70, 10))
    assert planner.failed_cells([step]) == []
    for cell in step["cells"]:
        assert cell["arms"]["memwall"]["peak_bytes"] <= cell["budget_bytes"]
        assert cell["arms"]["keep-all"] is None or cell["share_percent"] == 100
        assert cell["best_rival"] is not None
        assert (cell["arms"]["exhaustive"] is not None) == workload.endswith("-5")


def test_a_planner_that_keeps_everything_fails_and_the_cells_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def keeps_everything(problem: Problem, budget_bytes: int) -> Forecast:
        return Forecast({}, budget_bytes, 0.0, 0.0, 0.0)

    result = tmp_path / "planner.json"
    arguments = ["--workload", "unet-5", "--table", "h200", "--shares", "100", "50", "--output", str(result)]
    assert planner.main(arguments, keeps_everything) == 1
    assert "unet-5 on h200 at 50 %: over the budget, peak forecast too low\n" in capsys.readouterr().err
    written = msgspec.json.decode(result.read_bytes())
    assert written["tag"] == "simulated"
    full, half = written["steps"][0]["cells"]
    assert full["failures"] == []
    assert half["failures"] == ["over the budget", "peak forecast too low"]
    assert "| unet-5 | h200 | 50 % |" in planner_report.losing_table(written)
    assert planner_report.score(written["steps"][0], half, "memwall") == 0.0


def test_a_dearer_plan_fails() -> None:
    def recomputes_everything(problem: Problem, budget_bytes: int) -> Forecast:
        orders = dict.fromkeys(problem.planned.blocks, Order(recompute=True))
        outcome = problem.simulator.run(orders)
        seconds = problem.extra_seconds(outcome)
        return Forecast(orders, outcome.peak_bytes, seconds, seconds, 0.0)

    step = planner.measure("decoder-5", "a100-no-tier", (90,), recomputes_everything)
    assert planner.failed_cells([step])
    assert step["cells"][0]["failures"][0].startswith("dearer than ")


def test_only_its_own_section_of_the_page_changes() -> None:
    page = "# Benchmarks\n\n## Other\n\n<!-- knobs: begin -->\nold\n<!-- knobs: end -->\n"
    once = planner_report.with_section(page, "first")
    twice = planner_report.with_section(once, "second")
    assert once.startswith(page.rstrip())
    assert "first" in once
    assert twice == once.replace("first", "second")
