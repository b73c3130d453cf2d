"""A pipeline by hand, and tensor parallelism, are refused on all ranks within seconds, whatever the time-out is."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import started_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memwall
from memwall.errors import UsageError
from memwall.session.ranks import agreement, receives
from memwall.session.ranks.receives import Receive, receiving

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
def test_a_pipeline_by_hand_is_refused_by_all(tmp_path: Path) -> None:
    """GIVEN a time-out of half an hour THEN ranks end within seconds, and say what is wrong."""
    (tmp_path / "script.py").write_text(BY_HAND)
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
    assert "wait to receive" in said
    assert "ranks meet before each one's first forward" in said


def waiting(*found: dict[int, Receive]) -> tuple[list[int], list[int]]:
    """Returns who is missing and who is stuck, of three ranks of which rank 0 has come, by what each look finds."""
    looks = iter(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memwall.session.ranks.agreement.receiving", lambda *_: next(looks, {}))
        patch.setattr("memwall.session.ranks.agreement._missing", lambda *_: [1, 2])
        return agreement._absent(None, None, 3, timedelta(seconds=0.02))


@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        (({1: Receive(1, 0)}, {1: Receive(1, 0)}), [1]),
        (({1: Receive(1, 0)}, {1: Receive(2, 0)}), []),  # it got the first one
        (({1: Receive(1, 2)}, {1: Receive(1, 2)}), []),  # from a rank that has not come to train either
        (({1: Receive(1, -1)}, {1: Receive(1, -1)}), []),
        (({1: Receive(1, 2), 2: Receive(1, 0)}, {1: Receive(1, 2), 2: Receive(1, 0)}), [2]),
    ],
    ids=["stuck", "goes on", "of another", "of any", "in a row"],
)
def test_ranks_that_will_be_sent_something_are_waited_for(
    looks: tuple[dict[int, Receive], ...], stuck: list[int]
) -> None:
    assert waiting(*looks) == ([1, 2], stuck)


def test_each_call_is_told_apart_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN calls that begin, end and fail THEN the store has the one that is under way, with who is to send."""
    store = distributed.HashStore()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(receives, "store_of_all", lambda: store)
    seen = []

    def recv(*_: Any, **options: Any) -> None:
        seen.append(receiving(store, [0, 1]))
        if options:
            raise RuntimeError("no route to host")

    assert receiving(store, [0, 1]) == {}
    receives._received(lambda: False, recv, None, 0)
    with pytest.raises(RuntimeError, match="no route"):
        receives._received(lambda: False, recv, tensor=None, src=2)
    receives._received(lambda: False, recv, None)
    assert [look[1].source for look in seen] == [0, 2, -1]
    assert len({look[1].number for look in seen}) == 3
    assert receiving(store, [0, 1]) == {}


@pytest.mark.usefixtures("one_rank")
def test_tensor_parallelism_is_refused() -> None:
    model = parallelize_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)), ColwiseParallel())
    with pytest.raises(UsageError, match=r"DTensors that fully_shard did not make.*\(tensor parallelism\)"):
        memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB")
