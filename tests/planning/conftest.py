"""What the tests of planning share: instances for the solvers, and traces of small models with large bytes.

Instances are small random ones, random chains, and a family of decoders with one link.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from planner_dynamic import Chain, ChainBlock, ChainOption
from zoo import MODELS, Case, trained_parameters

from memwall.errors import InfeasibleError
from memwall.machine.hardware import Hardware, hardware_named
from memwall.machine.tiers import Machine, Tier
from memwall.planning.link_waits import OnTheWay, hidden_bytes, leaving, piece_bytes
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.solver.evaluate import Evaluation, evaluate
from memwall.planning.solver.instance import BlockOptions, Instance, Link, Option, Row
from memwall.predict import process
from memwall.predict.curve import live_peak_bytes
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import TraceBuilder

MIB = 1 << 20


def _random_instance(rng: random.Random, num_blocks: int, most_options: int = 4) -> Instance:
    link = Link(
        write_bytes_per_second=rng.choice([2.0, 10.0, 50.0]),
        read_bytes_per_second=rng.choice([2.0, 10.0, 50.0]),
        window_bytes=rng.choice([0, 10, 40, 1000]),
        capacity_bytes=rng.choice([50, 100, 10**6]),
        piece_bytes=rng.choice([0, 3]),
    )
    blocks = []
    for index in range(num_blocks):
        forward_seconds, backward_seconds = rng.uniform(0.0, 3.0), rng.uniform(0.0, 6.0)
        options = [Option(name="keep", extra_seconds=0.0, moved_bytes=0)]
        for name in rng.sample(["select-1", "full", "offload", "full+offload"], rng.randint(0, most_options - 1)):
            num_parts = rng.randint(1, 3) if "offload" in name else 0
            left = sorted(rng.uniform(0.0, forward_seconds) for _ in range(num_parts))
            parts = [OnTheWay(rng.randint(1, 30), at, rng.uniform(0.0, backward_seconds)) for at in left]
            option = Option(
                name=name,
                extra_seconds=rng.choice([0.0, rng.uniform(0.0, 3.0)]),
                moved_bytes=sum(part.link_bytes for part in parts),
                hidden_bytes=hidden_bytes(parts, link),
                leaving=leaving(parts, link, max(piece_bytes(size, link) for size in range(1, 31))),
            )
            options.append(option)
        blocks.append(
            BlockOptions(
                path=f"blocks.{index}",
                options=tuple(options),
                forward_seconds=forward_seconds,
                backward_seconds=backward_seconds,
            )
        )
    rows = tuple(
        Row(
            label=f"row {index}",
            fixed_bytes=rng.randint(20, 100),
            held=tuple((rng.randint(0, 80), *(rng.randint(-3, 60) for _ in block.options[1:])) for block in blocks),
        )
        for index in range(rng.randint(1, 6))
    )
    instance = Instance(blocks=tuple(blocks), rows=rows, budget_bytes=0, link=link if rng.random() < 0.8 else None)
    keep_all_bytes = evaluate(instance, (0,) * num_blocks).peak_bytes
    return replace(instance, budget_bytes=int(keep_all_bytes * rng.uniform(0.4, 1.0)))


def _random_chain(rng: random.Random, num_blocks: int) -> tuple[Chain, int]:
    blocks = []
    for index in range(num_blocks):
        saved_bytes = rng.randint(20, 120)
        options = []
        for number in range(rng.randint(1, 5)):
            share = 1.0 if number == 0 else rng.random()
            options.append(
                ChainOption(
                    name="keep" if number == 0 else f"select-{number}",
                    extra_seconds=0.0 if number == 0 else rng.randint(1, 400) / 100,
                    resident_bytes=int(saved_bytes * share),
                    forward_bytes=saved_bytes + rng.randint(0, 30),
                    backward_bytes=saved_bytes + rng.randint(0, 80),
                )
            )
        blocks.append(
            ChainBlock(path=f"blocks.{index}", options=tuple(options), forward_seconds=2.0, backward_seconds=4.0)
        )
    chain = Chain(blocks=tuple(blocks), base_bytes=rng.randint(0, 100), loss_bytes=rng.randint(0, 150))
    keep_all_bytes = chain.base_bytes + sum(block.options[0].resident_bytes for block in blocks) + 60
    return chain, int(keep_all_bytes * rng.uniform(0.6, 1.1))


def _decoder(num_blocks: int, *, is_varied: bool, budget_share: float, link_mib_per_ms: float) -> Instance:
    """A decoder with one link, to the host; the last block stays on the device."""
    uniform = np.random.default_rng(1).random(num_blocks)
    scales = [0.6 + 0.8 * float(u) if is_varied else 1.0 for u in uniform]
    # name, resident share, moved share of the saved bytes, recomputed share of the forward
    menu = [
        ("keep", 1.0, 0.0, 0.0),
        ("select-1", 0.45, 0.0, 0.18),
        ("full", 0.06, 0.0, 1.0),
        ("select-1+offload", 0.0, 0.45, 0.18),
        ("full+offload", 0.0, 0.06, 1.0),
        ("offload", 0.0, 1.0, 0.0),
        ("select-2", 0.3, 0.0, 0.35),
        ("select-2+offload", 0.0, 0.3, 0.35),
    ]
    window_bytes = 600 * MIB
    base_bytes = 5000 * MIB + window_bytes
    blocks, resident, forward, backward = [], [], [], []
    for index, scale in enumerate(scales):
        saved_bytes = int(600 * scale * MIB)
        options = [entry for entry in menu if index < num_blocks - 1 or entry[2] == 0.0]
        blocks.append(
            BlockOptions(
                path=f"blocks.{index}",
                options=tuple(
                    Option(name=name, extra_seconds=0.012 * scale * redone, moved_bytes=int(saved_bytes * moved))
                    for name, _, moved, redone in options
                ),
                forward_seconds=0.012 * scale,
                backward_seconds=0.024 * scale,
            )
        )
        resident.append(tuple(int(saved_bytes * share) for _, share, _, _ in options))
        forward.append((saved_bytes + 300 * MIB,) * len(options))
        backward.append((saved_bytes + int(120 * scale * MIB),) * len(options))
    nothing = [(0,) * len(sizes) for sizes in resident]

    def row(phase: str, index: int, own: tuple[int, ...]) -> Row:
        held = (*resident[:index], own, *nothing[index + 1 :])
        return Row(label=f"{phase} of blocks.{index}", fixed_bytes=base_bytes, held=held)

    rows = [row("forward", i, forward[i]) for i in range(num_blocks)]
    rows.append(Row(label="loss", fixed_bytes=base_bytes + 2000 * MIB, held=tuple(resident)))
    rows += [row("backward", i, backward[i]) for i in reversed(range(num_blocks))]
    speed = link_mib_per_ms * 1000 * MIB
    return Instance(
        blocks=tuple(blocks),
        rows=tuple(rows),
        budget_bytes=base_bytes + int((700 + max(2000, budget_share * 600 * sum(scales))) * MIB),
        link=Link(
            write_bytes_per_second=speed,
            read_bytes_per_second=speed,
            window_bytes=window_bytes,
            capacity_bytes=1 << 40,
        ),
    )


def _all_verdicts(instance: Instance) -> list[Evaluation]:
    choices = itertools.product(*(range(len(block.options)) for block in instance.blocks))
    return [evaluate(instance, choice) for choice in choices]


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    """A device that is not here."""
    return hardware_named("a100-80gb")


@pytest.fixture(scope="session")
def random_instance() -> Callable[..., Instance]:
    """(rng, num_blocks) -> arbitrary rows and menus, mostly with a link; some infeasible."""
    return _random_instance


@pytest.fixture(scope="session")
def random_chain() -> Callable[[random.Random, int], tuple[Chain, int]]:
    """(rng, num_blocks) -> a chain and a budget; some infeasible."""
    return _random_chain


@pytest.fixture(scope="session")
def decoder() -> Callable[..., Instance]:
    """The family of decoders: num_blocks, is_varied, budget_share, link_mib_per_ms."""
    return _decoder


@pytest.fixture(scope="session")
def all_verdicts() -> Callable[[Instance], list[Evaluation]]:
    """Every choice there is, evaluated: the truth for a handful of blocks."""
    return _all_verdicts


_BASE_BYTES = 100 * MIB
_FACTOR = 400


def _disk(bytes_per_second: float) -> Tier:
    return Tier(
        name="disk",
        directory="/scratch",
        write_bytes_per_second=bytes_per_second,
        read_bytes_per_second=bytes_per_second,
        free_bytes=1 << 40,
    )


_DISK = Machine(
    tiers=(_disk(1e9),),
    copy_seconds_per_byte=2e-10,
)
_FAST_DISK = Machine(
    tiers=(_disk(1e12),),
    copy_seconds_per_byte=1e-12,
)


@pytest.fixture
def without_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is its base and its tensors."""
    monkeypatch.setattr(process, "unavailable_reason", lambda: "left out of this test")
    monkeypatch.setattr(process, "heap_unavailable_reason", lambda: "left out of this test")


def _magnified(step: Step) -> Step:
    """The step with every byte _FACTOR times, and times that follow from bytes and FLOPs."""
    storages = tuple(msgspec.structs.replace(s, nbytes=s.nbytes * _FACTOR) for s in step.storages)
    saved = tuple(msgspec.structs.replace(s, nbytes=s.nbytes * _FACTOR) for s in step.saved)
    ops = tuple(
        msgspec.structs.replace(
            op, seconds=1e-5 + 5e-9 * op.flops + 2e-10 * sum(storages[i].nbytes for i in op.outputs)
        )
        for op in step.ops
    )
    return msgspec.structs.replace(step, storages=storages, saved=saved, ops=ops, process_peak_bytes=0)


def _magnified_trace(case: Case, machine: Machine = _DISK) -> Trace:
    optimizer = torch.optim.AdamW(trained_parameters(case.model), lr=1e-3)
    builder = TraceBuilder([case.model])
    for _ in range(2):
        builder.start_step(optimizer)
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        builder.finish_step(optimizer)
    trace = builder.trace(optimizer, machine=machine)
    return msgspec.structs.replace(trace, base_bytes=_BASE_BYTES, steps=tuple(_magnified(step) for step in trace.steps))


@cache
def _a_trace(name: str) -> Trace:
    return _magnified_trace(MODELS[name]("tiny"))


def _plain_bytes(trace: Trace) -> int:
    return trace.base_bytes + live_peak_bytes(steady_step(trace), "cpu")


def _smallest_bytes(trace: Trace, **settings: Any) -> int:
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=_BASE_BYTES, **settings))
    return error.value.smallest_feasible_bytes


def _budgets(trace: Trace, shares: Sequence[float], **settings: Any) -> list[int]:
    """Between the smallest feasible budget (0.0) and what the plain run takes (1.0)."""
    least = _smallest_bytes(trace, **settings)
    return [int(least + (_plain_bytes(trace) - least) * share) for share in shares]


def _without_disk(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, machine=Machine())


@pytest.fixture(scope="session")
def magnified_trace() -> Callable[[Case], Trace]:
    """Two live steps of a small model, their bytes multiplied until tensors are as large as those worth an action."""
    return _magnified_trace


@pytest.fixture(scope="session")
def a_trace() -> Callable[[str], Trace]:
    """The magnified trace of a model of the zoo; made once."""
    return _a_trace


@pytest.fixture(scope="session")
def plain_bytes() -> Callable[[Trace], int]:
    """Process bytes of the run without a plan, malloc left out."""
    return _plain_bytes


@pytest.fixture(scope="session")
def smallest_bytes() -> Callable[..., int]:
    """(trace, **settings) -> the smallest feasible budget."""
    return _smallest_bytes


@pytest.fixture
def smallest_where(monkeypatch: pytest.MonkeyPatch, smallest_bytes: Callable[..., int]) -> Callable[..., int]:
    """(trace, technique, answer) -> the smallest feasible budget where a technique answers so when asked where to."""

    def smallest(trace: Trace, technique: Any, answer: tuple[()] | str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(technique, "locations", lambda *_: answer)
            return smallest_bytes(trace)

    return smallest


@pytest.fixture(scope="session")
def budgets() -> Callable[..., list[int]]:
    """(trace, shares, **settings) -> between the smallest feasible budget (0.0) and what the plain run takes (1.0)."""
    return _budgets


@pytest.fixture(scope="session")
def without_disk() -> Callable[[Trace], Trace]:
    """The trace on a machine without a tier to move bytes to."""
    return _without_disk


@pytest.fixture(scope="session")
def fast_disk() -> Machine:
    """A machine whose disk costs next to nothing."""
    return _FAST_DISK
