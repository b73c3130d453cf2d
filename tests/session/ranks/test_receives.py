"""Ranks that wait for each other, and tensor parallelism, are refused on all in seconds, whatever the time-out is."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_ranks, started_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memwall
from memwall.errors import UsageError
from memwall.patches import Patches
from memwall.session.ranks import agreement, receives
from memwall.session.ranks.receives import Wait, waits_of, watch_receives

BY_HAND = """
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
rank = distributed.get_rank()
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if rank == 0:
    sent = model(torch.ones(2, 4))
    distributed.send(sent.detach(), 1)
else:
    got = torch.empty(2, 4)
    distributed.recv(got, 0)
    model(got).sum().backward()
    optimizer.step()
"""

ALONE = """
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if distributed.get_rank() == 0:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
distributed.barrier()
"""

LATE = """
import os, sys, time
from torch import distributed
barrier, all_gather_object = distributed.barrier, distributed.all_gather_object
def returns_late(run, *args):
    run(*args)
    time.sleep(4 * int(os.environ["RANK"]))
distributed.barrier = lambda: returns_late(barrier)
distributed.all_gather_object = lambda *args: returns_late(all_gather_object, *args)
"""

TOGETHER = """
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
distributed.CALL
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""

# Who is only late is waited for by the rank that knows of the other.
IMPATIENT = """
import sys
from datetime import timedelta
from memwall.cli.app import main
from memwall.session.ranks import agreement
agreement._GRACE = timedelta(seconds=0.5)
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (BY_HAND, ("rank 1 of 2 waits to receive", "ranks meet before each one's first forward")),
        (ALONE, ("rank 1 of 2 waits for others (torch.distributed.barrier)", "none of them trains alone")),
    ],
    ids=["a pipeline by hand", "one rank trains first"],
)
def test_ranks_that_wait_for_each_other_are_refused_by_all(script: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """GIVEN a time-out of half an hour THEN ranks end within seconds, and say what is wrong."""
    (tmp_path / "script.py").write_text(script)
    begin = time.monotonic()
    ranks = started_ranks(2, "-c", IMPATIENT, "run", "--budget", "4GiB", "script.py", folder=tmp_path)
    try:
        statuses = [rank.wait(timeout_s=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert time.monotonic() - begin < 60
    assert 0 not in statuses
    said = "".join(rank.said for rank in ranks)
    assert all(each in said for each in words)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["barrier()", "all_gather_object([None, None], 'said')"])
def test_a_rank_that_returns_late_from_what_all_have_called_is_waited_for(call: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TOGETHER.replace("CALL", call))
    run_ranks(2, "-c", LATE + IMPATIENT, "run", "--budget", "4GiB", "script.py", folder=tmp_path, timeout_s=60)


def waiting(*found: dict[int, Wait]) -> tuple[list[int], dict[int, Wait]]:
    """Returns who is missing and who is stuck, of three ranks of which rank 0 has come, by what each look finds."""
    looks = iter(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memwall.session.ranks.agreement.waits_of", lambda *_: next(looks, {}))
        return agreement._absent(lambda _: [1, 2], None, timedelta(seconds=0.02))


@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        (({1: Wait(1, "recv", (0,))},) * 2, [1]),
        (({1: Wait(1, "recv", (0,))}, {1: Wait(2, "recv", (0,))}), []),  # it got the first one
        (({1: Wait(1, "recv", (2,))},) * 2, []),  # from a rank that has not come to train either
        (({1: Wait(1, "recv", ())},) * 2, []),
        (({1: Wait(1, "recv", (2,)), 2: Wait(1, "recv", (0,))},) * 2, [2]),
        (({1: Wait(1, "barrier", (0, 2)), 2: Wait(1, "barrier", (0, 1))},) * 2, [1, 2]),
        (({1: Wait(1, "barrier", (2,))},) * 2, []),  # in a group of its own
    ],
    ids=["stuck", "goes on", "of another", "of any", "in a row", "barrier", "barrier of others"],
)
def test_ranks_that_may_yet_go_on_are_waited_for(looks: tuple[dict[int, Wait], ...], stuck: list[int]) -> None:
    missing, found = waiting(*looks)
    assert (missing, list(found)) == ([1, 2], stuck)


def test_each_call_is_told_apart_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN calls that begin, end and fail THEN the store has the one that is under way, with who is to send."""
    store = distributed.HashStore()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(receives, "store_of_all", lambda: store)
    seen = []

    def recv(*_: Any, **options: Any) -> None:
        seen.append(waits_of(store, [0, 1]))
        if options:
            raise RuntimeError("no route to host")

    assert waits_of(store, [0, 1]) == {}
    receives._waits("recv", lambda: False, "word", recv, None, 0)
    with pytest.raises(RuntimeError, match="no route"):
        receives._waits("recv", lambda: False, "word", recv, tensor=None, src=2)
    receives._waits("recv", lambda: False, "word", recv, None)
    assert [look[1].needed for look in seen] == [(0,), (2,), ()]
    assert len({look[1].number for look in seen}) == 3
    assert waits_of(store, [0, 1]) == {}


@pytest.mark.usefixtures("one_rank")
def test_a_call_that_the_others_have_made_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two ranks at a barrier WHEN one of them has returned THEN it does not hold the other one for stuck."""
    store = distributed.HashStore()
    monkeypatch.setattr(receives, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(receives, "store_of_all", lambda: store)
    seen = []

    def barrier(rank: int, do: Callable[[], object] = bool) -> None:
        monkeypatch.setattr(distributed, "get_rank", lambda: rank)
        receives._waits("barrier", lambda: False, f"word {rank}", lambda: do())

    def look() -> None:
        seen.append(waits_of(store, [1]))

    barrier(1, look)
    barrier(0)
    barrier(0)
    barrier(1, look)
    barrier(1, look)
    assert [{rank: wait.needed for rank, wait in each.items()} for each in seen] == [{1: (0,)}, {}, {1: (0,)}]


class Outliving(distributed.HashStore):
    """A store that hears nothing from a process that is killed."""

    is_cut = False

    def set(self, key: str, value: str) -> None:
        if not self.is_cut:
            super().set(key, value)


@pytest.mark.usefixtures("one_rank")
def test_what_ranks_waited_for_that_were_killed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a rank that was killed at a barrier, and a store that outlives it WHEN it is restarted THEN it waits for
    nobody, and what another one had made before it was restarted is no barrier of now.
    """
    store = Outliving()
    monkeypatch.setattr(receives, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(receives, "store_of_all", lambda: store)
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(distributed, "init_process_group", lambda: None)
    seen: list[dict[int, Wait]] = []

    def started(rank: int, *barriers: Callable[[], object]) -> None:
        """Runs a process that makes barriers, one of which may end it."""
        store.is_cut = False
        monkeypatch.setattr(distributed, "get_rank", lambda: rank)
        with pytest.MonkeyPatch.context() as patch:
            patches, calls = Patches("watches a process"), iter(barriers)
            patch.setattr(distributed, "barrier", lambda: next(calls)())
            watch_receives(patches, lambda: False)
            try:
                distributed.init_process_group()
                for _ in barriers:
                    distributed.barrier()
            finally:
                patches.undo()

    def look() -> None:
        seen.append(waits_of(store, [1]))

    def killed() -> None:
        look()
        store.is_cut = True
        raise SystemExit

    started(0, bool, bool)
    with pytest.raises(SystemExit):
        started(1, bool, bool, killed)
    started(0)
    started(1)
    look()
    started(1, look)
    assert [{rank: wait.needed for rank, wait in each.items()} for each in seen] == [{1: (0,)}, {}, {1: (0,)}]


@pytest.mark.usefixtures("one_rank")
def test_tensor_parallelism_is_refused() -> None:
    model = parallelize_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)), ColwiseParallel())
    with pytest.raises(UsageError, match=r"DTensors that fully_shard did not make.*\(tensor parallelism\)"):
        memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB")
