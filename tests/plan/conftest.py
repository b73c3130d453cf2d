"""Instances for the solver tests: small random ones, random chains, and the decoder family of planning handbook 3.7."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from memwall.plan.dynamic import Chain, ChainBlock, ChainOption
from memwall.plan.evaluate import Evaluation, evaluate
from memwall.plan.instance import Block, Instance, Link, Option, Row

MIB = 1 << 20


def _random_instance(rng: random.Random, num_blocks: int, most_options: int = 4) -> Instance:
    blocks = []
    for index in range(num_blocks):
        options = [Option(name="keep", extra_seconds=0.0, moved_bytes=0)]
        for name in rng.sample(["select-1", "full", "offload", "full+offload"], rng.randint(0, most_options - 1)):
            moved_bytes = rng.randint(1, 60) if "offload" in name else 0
            extra_seconds = rng.choice([0.0, rng.uniform(0.0, 3.0)])
            options.append(Option(name=name, extra_seconds=extra_seconds, moved_bytes=moved_bytes))
        blocks.append(
            Block(
                path=f"blocks.{index}",
                options=tuple(options),
                forward_seconds=rng.uniform(0.0, 3.0),
                backward_seconds=rng.uniform(0.0, 6.0),
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
    link = Link(
        write_bytes_per_second=rng.choice([2.0, 10.0, 50.0]),
        read_bytes_per_second=rng.choice([2.0, 10.0, 50.0]),
        window_bytes=rng.choice([0, 10, 40, 1000]),
        capacity_bytes=rng.choice([50, 100, 10**6]),
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
    """Handbook 3.7 with one link, to the host; the last block stays on the device."""
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
            Block(
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
    """The family of handbook 3.7: num_blocks, is_varied, budget_share, link_mib_per_ms."""
    return _decoder


@pytest.fixture(scope="session")
def all_verdicts() -> Callable[[Instance], list[Evaluation]]:
    """Every choice there is, evaluated: the truth for a handful of blocks."""
    return _all_verdicts
