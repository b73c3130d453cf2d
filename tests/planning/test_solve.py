"""The inner solve: loses to no knob, honours every budget, says when there is none, repeats itself exactly."""

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import highspy
import pytest
from msgspec.structs import replace
from planner_dynamic import Chain, ChainBlock, ChainOption, chain_instance
from planner_greedy import solve_greedy

from memwall.planning.solver import milp
from memwall.planning.solver import solve as solve_module
from memwall.planning.solver.evaluate import Evaluation, evaluate
from memwall.planning.solver.instance import Choice, Instance
from memwall.planning.solver.milp import solve_milp
from memwall.planning.solver.solve import knob_choices, smallest_feasible_bytes, solve

RandomInstance = Callable[..., Instance]
Decoder = Callable[..., Instance]
MIB = 1 << 20


def _residual_chain(num_blocks: int) -> Chain:
    """Blocks of 34 MiB that only need their 2 MiB input kept to be recomputed, as in pytorch #197838."""
    options = tuple(
        ChainOption(
            name=name,
            extra_seconds=0.012 * redone,
            resident_bytes=int(34 * MIB * share),
            forward_bytes=42 * MIB,
            backward_bytes=41 * MIB,
        )
        for name, share, redone in (("keep", 1.0, 0.0), ("select-1", 0.45, 0.18), ("full", 0.06, 1.0))
    )
    blocks = tuple(
        ChainBlock(path=f"blocks.{index}", options=options, forward_seconds=0.012, backward_seconds=0.024)
        for index in range(num_blocks)
    )
    return Chain(blocks=blocks, base_bytes=100 * MIB, loss_bytes=20 * MIB)


@pytest.mark.slow
def test_the_peak_never_rises_when_the_budget_is_lowered() -> None:
    # P12: torch.compile's memory budget, lowered from 0.15 to 0.05, took this from 275 to 1145 MB (pytorch #197838).
    instance = chain_instance(_residual_chain(32), 1)
    highest = evaluate(instance, (0,) * 32).peak_bytes
    lowest = smallest_feasible_bytes(instance)
    peaks, costs = [], []
    for step in range(41):
        budget_bytes = highest - (highest - lowest) * step // 40
        choice = solve(replace(instance, budget_bytes=budget_bytes))
        assert choice is not None
        verdict = evaluate(instance, choice.options)
        assert verdict.peak_bytes <= budget_bytes
        peaks.append(verdict.peak_bytes)
        costs.append(verdict.extra_seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert costs == sorted(costs)
    assert peaks[-1] == lowest
    assert costs[0] == 0.0 < costs[-1]


@pytest.mark.parametrize("is_varied", [False, True])
@pytest.mark.parametrize("budget_share", [0.5, 0.3, 0.15])
@pytest.mark.parametrize("link_mib_per_ms", [20.0, 3.0])
def test_no_knob_is_cheaper_and_greedy_by_no_more_than_the_gap(
    decoder: Decoder, is_varied: bool, budget_share: float, link_mib_per_ms: float
) -> None:
    instance = decoder(24, is_varied=is_varied, budget_share=budget_share, link_mib_per_ms=link_mib_per_ms)
    choice = solve(instance)
    assert choice is not None
    assert evaluate(instance, choice.options).fits
    knobs = [verdict for options in knob_choices(instance) if (verdict := evaluate(instance, options)).fits]
    assert choice.extra_seconds <= min(verdict.extra_seconds for verdict in knobs)
    greedy = solve_greedy(instance)
    assert greedy is not None
    step_seconds = sum(block.forward_seconds + block.backward_seconds for block in instance.blocks)
    assert choice.extra_seconds <= greedy.extra_seconds + 0.001 * step_seconds
    assert 0.0 < choice.lower_bound_seconds <= choice.extra_seconds


def test_a_program_that_stops_inside_its_gap_does_not_win_against_a_better_knob(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = decoder(32, is_varied=True, budget_share=0.15, link_mib_per_ms=20.0)
    fitting = [(evaluate(instance, options), options) for options in knob_choices(instance)]
    costs = sorted((verdict.extra_seconds, options) for verdict, options in fitting if verdict.fits)
    (best_seconds, best), (worse_seconds, worse) = costs[0], costs[-1]
    assert worse_seconds > best_seconds

    def stopped_early(_: Instance, **__: object) -> Choice:
        return Choice(worse, worse_seconds, 0.9 * best_seconds)

    monkeypatch.setattr(solve_module, "solve_milp", stopped_early)
    assert solve(instance) == Choice(best, best_seconds, 0.9 * best_seconds)


def test_when_everything_fits_nothing_is_done_and_nothing_is_solved(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(solve_module, "solve_milp")
    instance = replace(
        decoder(12, is_varied=True, budget_share=0.3, link_mib_per_ms=20.0), budget_bytes=80 * 1024 * MIB
    )
    assert solve(instance) == Choice((0,) * 12, 0.0, 0.0)


def test_every_nth_block_recomputed_is_among_the_knobs() -> None:
    knobs = list(knob_choices(chain_instance(_residual_chain(5), 1)))
    assert knobs[0] == (0, 0, 0, 0, 0)
    for options in ((1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (2, 0, 2, 0, 2), (2, 0, 0, 2, 0), (2, 0, 0, 0, 0)):
        assert options in knobs


@pytest.mark.slow
def test_within_the_budget_and_as_cheap_as_claimed_on_random_instances(
    random_instance: RandomInstance, all_verdicts: Callable[[Instance], list[Evaluation]]
) -> None:
    rng = random.Random(21)
    num_feasible = 0
    for _ in range(80):
        instance = random_instance(rng, rng.randint(1, 5))
        seconds = [verdict.extra_seconds for verdict in all_verdicts(instance) if verdict.fits]
        choice = solve(instance)
        assert (choice is None) == (not seconds)
        if choice is not None:
            num_feasible += 1
            step_seconds = sum(block.forward_seconds + block.backward_seconds for block in instance.blocks)
            assert evaluate(instance, choice.options).fits
            assert choice.extra_seconds == evaluate(instance, choice.options).extra_seconds
            assert choice.lower_bound_seconds <= min(seconds) + 1e-9
            assert choice.extra_seconds <= min(seconds) + 0.00101 * step_seconds
    assert num_feasible >= 24


@pytest.mark.slow
def test_the_smallest_budget_is_feasible_and_one_per_cent_less_is_not(
    random_instance: RandomInstance, decoder: Decoder
) -> None:
    # P26
    rng = random.Random(22)
    instances = [random_instance(rng, rng.randint(4, 9)) for _ in range(20)]
    instances += [decoder(24, is_varied=v, budget_share=0.3, link_mib_per_ms=6.0) for v in (False, True)]
    for instance in instances:
        smallest_bytes = smallest_feasible_bytes(instance)
        at_smallest = replace(instance, budget_bytes=smallest_bytes)
        choice = solve(at_smallest)
        assert choice is not None
        assert evaluate(at_smallest, choice.options).peak_bytes == smallest_bytes
        assert solve(replace(instance, budget_bytes=int(smallest_bytes * 0.99))) is None


def test_without_rows_everything_is_kept() -> None:
    instance = replace(chain_instance(_residual_chain(2), 1), rows=())
    assert solve(instance) == Choice((0, 0), 0.0, 0.0)


class Talkative(highspy.Highs):
    """Names itself as it is made, past Python and by C's own buffer, as HiGHS 1.16 does."""

    def __init__(self) -> None:
        os.write(1, b"Running HiGHS\n")
        ctypes.CDLL(None).printf(b"Includes third-party software components\n")
        super().__init__()


def test_a_solver_that_prints_as_it_is_made_is_not_heard(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script's own lines around it are, those in C's buffer too."""
    monkeypatch.setattr(highspy, "Highs", Talkative)
    ctypes.CDLL(None).printf(b"before, ")
    assert solve_milp(decoder(4, is_varied=True, budget_share=0.5, link_mib_per_ms=20.0)) is not None
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before, after\n"


def test_standard_output_comes_back_where_a_solver_cannot_be_made(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def made() -> highspy.Highs:
        raise RuntimeError("no solver")

    monkeypatch.setattr(highspy, "Highs", made)
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="no solver"):
        solve_milp(decoder(4, is_varied=True, budget_share=0.5, link_mib_per_ms=20.0))
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_process_without_standard_output_plans_too() -> None:
    module = "memwall.planning.solver.quiet_streams"
    code = f"import os\nos.close(1)\nfrom {module} import nothing_printed\nwith nothing_printed():\n    pass"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


_SCRIPT = """
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("instances", sys.argv[1])
instances = importlib.util.module_from_spec(spec)
spec.loader.exec_module(instances)
from memwall.planning.solver.solve import smallest_feasible_bytes, solve
rng = random.Random(5)
for _ in range(40):
    instance = instances._random_instance(rng, 8)
    print(solve(instance), smallest_feasible_bytes(instance), file=sys.stderr)
for share in (0.5, 0.15):
    print(solve(instances._decoder(24, is_varied=True, budget_share=share, link_mib_per_ms=6.0)), file=sys.stderr)
"""


@pytest.mark.exhaustive  # of whole plans: tests/planning/test_planfile.py
def test_two_processes_choose_the_same_and_print_nothing() -> None:
    # P27: HiGHS inside scipy 1.17 wrote debug lines to file descriptor 1; the JSON of `memwall plan` goes there.
    root = Path(solve_module.__file__).parents[3]
    runs = []
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(Path(__file__).with_name("conftest.py"))],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(str(root / name) for name in ("", "tests", "benchmarks")),
            },
            capture_output=True,
            check=False,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr.decode()
        assert run.stdout == b""
        runs.append(run.stderr)
    assert runs[0] == runs[1]
    assert runs[0].count(b"Choice(") >= 12


def _without_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object, **__: object) -> None:
        raise AssertionError("the program with integers was solved")

    monkeypatch.setattr(milp, "_run", ran)


def test_what_a_bound_says_is_of_no_use_is_not_looked_for(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a candidate cheaper than a budget's relaxed optimum WHEN solving for that budget THEN nothing is proven."""
    instance = decoder(12, is_varied=True, budget_share=0.3, link_mib_per_ms=20.0)
    cheapest = solve(instance)
    assert cheapest is not None
    _without_integers(monkeypatch)
    below_seconds = 0.5 * cheapest.lower_bound_seconds
    found = solve(instance, below_seconds=below_seconds)
    assert found is None or found.extra_seconds >= below_seconds


def test_an_outline_fits_and_takes_no_program_with_integers(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = decoder(12, is_varied=True, budget_share=0.3, link_mib_per_ms=20.0)
    cheapest = solve(instance)
    assert cheapest is not None
    with monkeypatch.context() as patch:
        _without_integers(patch)
        outline = solve(instance, is_outline=True)
    assert outline is not None
    assert evaluate(instance, outline.options).fits
    assert outline.extra_seconds >= cheapest.lower_bound_seconds


def test_the_integer_program_begins_from_the_cheapest_choice_that_is_known(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a choice next to the relaxed optimum that beats every knob THEN HiGHS is given it."""
    instance = decoder(12, is_varied=True, budget_share=0.3, link_mib_per_ms=20.0)
    knobs, near = list(knob_choices(instance)), solve_milp(instance, gap_share_of_step=0.0)
    assert near is not None
    begun: list[object] = []

    def ran(*_: object, start: object, **__: object) -> milp._Found:
        begun.append(start)
        return milp._Found(None, 0.0)

    monkeypatch.setattr(milp, "_near_relaxed", lambda *_: milp._Found(near.options, 0.0))
    monkeypatch.setattr(milp, "_run", ran)
    solve_milp(instance, starts=knobs, gap_share_of_step=0.0)
    assert begun == [near.options]
