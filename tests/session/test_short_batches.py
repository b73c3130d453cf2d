"""A batch shorter than the recorded one leaves blocks alone that it has room for: fewer seconds, no byte and no bit."""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from plans import plan_of
from torch import Tensor, nn

import memwall
from memwall.apply.blocks.executor import BlockExecutor, BlockLayer
from memwall.machine.meter import process_bytes, return_free_memory
from memwall.planning.action import Action
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.session.loop.longer_batch import Shape, batch_shapes
from memwall.session.loop.short_batches import ShortBatches

MIB = 1 << 20


def block(number: int, cost_seconds: float, saved: int | None = 40) -> Recompute:
    saved_bytes = None if saved is None else saved * MIB
    return Recompute(block=f"blocks.{number}", saved_bytes=saved_bytes, cost_seconds=cost_seconds)


def spared(
    *shapes: Shape, actions: Sequence[Action], recorded: Sequence[Shape] = ((8, 64),), workspace: int = 0
) -> set[str]:
    """Tells of a plan that holds 220 MiB: 100 before the step, 20 of weights, and 100 that grow with the batch."""
    storages = (
        SimpleNamespace(nbytes=20 * MIB, category="parameter"),
        SimpleNamespace(nbytes=60 * MIB, category="activation"),
    )
    trace = SimpleNamespace(
        base_bytes=100 * MIB,
        workspace_bytes=workspace * MIB,
        input_shape=recorded[0],
        steps=(SimpleNamespace(storages=storages),),
    )
    forecast = SimpleNamespace(steady_process_bytes=220 * MIB)
    plan = SimpleNamespace(actions=actions, forecast=forecast)
    return set(ShortBatches(cast(Any, trace), cast(Any, plan), tuple(recorded)).spared(shapes))


THREE = (block(0, 0.1), block(1, 0.3), block(2, 0.2))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 64), set()),
        ((8, 56), set()),  # a seventh more would fit: 14 MiB
        ((8, 40), {"blocks.1"}),  # 60 MiB
        ((5, 64), {"blocks.1"}),
        ((8, 32), {"blocks.1", "blocks.2"}),
        ((8, 16), {"blocks.0", "blocks.1", "blocks.2"}),
        ((4, 96), set()),  # what attention holds grows with the square
        ((16, 96), set()),
        ((16, 16), set()),  # twice the length of a fourth of the samples, where the length comes first
        ((16, 4), {"blocks.0", "blocks.1", "blocks.2"}),
        ((8, 4, 4), set()),  # not to be compared
        ((), set()),
    ],
)
def test_the_dearest_blocks_that_have_room_are_left_alone(shape: Shape, expected: set[str]) -> None:
    assert spared(shape, actions=THREE) == expected


def test_what_the_process_has_beside_tensors_does_not_shrink_with_the_batch() -> None:
    assert len(spared((8, 32), actions=THREE, workspace=15)) == 2  # 85 MiB shrink
    assert len(spared((8, 32), actions=THREE, workspace=50)) == 1


def test_of_several_tensors_the_one_that_shrinks_least_counts() -> None:
    """A number for each sample, as a class is, says nothing of lengths; two sequences both do."""
    recorded = [(8, 64), (8,), (8, 32)]
    assert len(spared((8, 16), (8,), (8, 8), actions=THREE, recorded=recorded)) == 3
    assert spared((8, 16), (8,), (8, 32), actions=THREE, recorded=recorded) == set()
    assert spared((8, 16), (8,), actions=THREE, recorded=recorded) == set()
    assert len(spared((16,), actions=THREE, recorded=[(64,)])) == 3


def test_what_may_hold_tensors_unseen_has_no_shapes() -> None:
    ids = torch.ones(2, 3)
    assert batch_shapes((ids,), {"a": [ids, None], "b": {"c": torch.tensor(1)}, "d": True}) == ((2, 3), (2, 3))
    assert batch_shapes((ids,), {"a": [SimpleNamespace(x=ids)]}) == ()


def test_all_that_is_done_to_a_block_counts_and_what_is_not_known_is_all_there_is() -> None:
    moved = Offload(
        block="blocks.0",
        scope="inputs",
        tier="disk",
        saved_bytes=30 * MIB,
        cost_seconds=0.1,
        min_bytes=1,
        window_bytes=1,
    )
    assert spared((8, 40), actions=[block(0, 0.1), moved]) == set()
    assert spared((8, 32), actions=[block(0, 0.1), moved]) == {"blocks.0"}
    assert spared((8, 40), actions=[block(0, 0.1, saved=None)]) == set()


def test_a_part_of_a_batch_that_the_plan_divides_is_no_short_one() -> None:
    """GIVEN a last batch of one part WHEN the next step begins THEN its parts are what the plan has counted on."""
    divided = Accumulate(micro_batch=2, num_micro_batches=4)
    assert spared((2, 64), actions=[*THREE, divided]) == set()


def test_a_block_that_is_left_alone_runs_as_it_is_until_it_is_not() -> None:
    class Doubled(BlockLayer):
        depth = 0

        def wrapped(self, module: nn.Module, forward: Any, counts: Any) -> Any:
            return lambda x: 2 * forward(x)

    layer = nn.Identity()
    executor = BlockExecutor({"layer": layer}, ())
    executor.add("layer", Doubled())
    executor.apply()
    found = [layer(torch.ones(1)).item()]
    executor.spared = frozenset({"layer"})
    found.append(layer(torch.ones(1)).item())
    executor.spared = frozenset()
    found.append(layer(torch.ones(1)).item())
    assert found == [2, 1, 2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)
        )
        self.num_runs = 0
        self.unforeseen = 0
        """Numbers that are saved for a short batch beside what its blocks save."""
        self.blocks[0][0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_runs += 1

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = x + one(x)
        if self.unforeseen and x.shape[1] == 64:
            x = x + torch.ones(self.unforeseen).mul(self.blocks[0][0].bias.sum()).square().mean()
        return x


def train(model: Net, batches: list[list[int]], **fit: Any) -> tuple[list[int], Any]:
    """Trains on batches of sequences of so many positions, several forwards to a step; returns runs of the block."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    runs = []

    def loop() -> None:
        for lengths in batches:
            before = model.num_runs
            for length in lengths:
                model(torch.randn(16, length, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(model.num_runs - before)

    if not fit:
        loop()
        return runs, None
    with memwall.fit(model, optimizer, **fit) as session:
        loop()
    return runs, session


@pytest.mark.slow
def test_short_batches_are_recomputed_no_more_to_the_same_bits_below_the_same_peak() -> None:
    """GIVEN a plan that recomputes WHEN short and long batches come THEN short ones are not, and nothing else differs.

    A step of several forwards is never left alone, nor is one after it: its batch is not all that comes.
    """
    batches = [[1024], [1024], [1024], [64], [1024], [64], [512], [64, 64], [64], [64]]
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    train(plain, batches)
    return_free_memory()
    for room_mib in (140, 130, 120, 110, 100):  # what other tests have left free is room as well
        present = copy.deepcopy(model)
        runs, session = train(present, batches, budget=process_bytes() + room_mib * MIB, no_disk=True)
        actions = session.plan.actions
        if any(isinstance(action, Recompute) and action.block.startswith("blocks.0") for action in actions):
            break
    else:
        pytest.fail("no plan computes the first block again")
    model = present
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert (runs[2:6], runs[7:]) == ([2, 1, 2, 1], [3, 2, 1])
    assert session.measured.num_replans == 0
    assert session.measured.peak_bytes <= session.plan.forecast.budget_bytes


@pytest.mark.slow
def test_once_a_short_batch_took_more_than_foreseen_none_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.unforeseen = 60 * MIB // 4
    train(copy.deepcopy(model), [[1024]])  # what the process needs once
    return_free_memory()
    lengths = [[1024], [1024], [1024], [64], [64], [64]]
    runs, session = train(model, lengths, budget=process_bytes() + 140 * MIB, no_disk=True)
    assert runs[2:] == [2, 1, 2, 2]
    assert "a step with a short batch used" in caplog.text
    assert session.measured.num_replans == 0


@pytest.mark.slow
def test_a_plan_that_was_given_is_followed_whatever_the_length() -> None:
    model = Net()
    runs, _ = train(model, [[512], [512], [512], [16], [16]], plan=plan_of(model, Recompute(block="blocks.0")))
    assert runs[2:] == [2, 2, 2]
