"""Ranks agree, or end together: threads that stand for processes."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from torch import Tensor, distributed, nn

from memwall.apply.microbatch import MicroBatches
from memwall.errors import RankError
from memwall.session.ranks.agreement import Ranks, _met
from memwall.session.ranks.shared_plan import agreed_excess, tell_of_failure

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")


def test_all_hear_what_each_says_and_what_one_says() -> None:
    """GIVEN messages of different lengths, one of them empty THEN none is cut or filled up."""
    said = on_ranks(3, lambda ranks: (ranks.gathered(b"x" * ranks.rank), ranks.shared(b"from %d" % ranks.rank, 1)))
    assert said == [([b"", b"x", b"xx"], b"from 1")] * 3


def test_a_step_exceeds_its_forecast_on_all_ranks_by_the_most() -> None:
    assert on_ranks(3, lambda ranks: agreed_excess(ranks, 10 * ranks.rank)) == [20] * 3


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    """GIVEN one rank that runs something else THEN the others end within the time-out, and say which one it is."""
    found = on_ranks(3, lambda ranks: None if ranks.rank == 1 else ranks.largest([0]))
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, RankError)
        assert str(error).startswith("rank 1 of 3 did not come to the beginning of this step")


def test_restarted_ranks_meet_in_the_store_of_those_that_ended() -> None:
    """GIVEN a store that torchrun has kept, in which a rank has waited in vain and another one was killed waiting
    THEN the ranks that follow meet, however late one of them comes, whoever it was that had waited.
    """
    store, timeout = distributed.HashStore(), timedelta(seconds=0.2)
    _, missing = _met(store, 0, 2, timeout)
    assert missing == [1]
    _, missing = _met(store, 1, 2, timeout)
    assert missing == [0]
    distributed.PrefixStore("memwall/meeting", store).set("here/1", "of a process that was killed")

    def meet(rank: int) -> tuple[str, list[int]]:
        time.sleep(0.1 * rank)
        found, missing = _met(store, rank, 2, timedelta(seconds=10))
        if rank == 1:
            found.set("name", "both know it")
        return found.get("name").decode(), missing

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(meet, range(2))) == [("both know it", [])] * 2


class Stopped:
    """Stands for the store of a rank that is stopped: takes questions, and answers none."""

    timeout = timedelta(seconds=0.05)

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def set(self, *_: Any) -> None:
        self.goes_on.wait()

    wait = check = get = set


class Unreached:
    """Stands for the group of such a rank."""

    def wait_for_rank_0(self) -> None:
        raise RuntimeError("timed out")


def test_a_store_that_does_not_answer_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN rank 0, which holds the store, stopped THEN another rank ends and says so, and leaves no last word."""
    monkeypatch.setattr("memwall.session.ranks.agreement._GRACE", timedelta(seconds=0.1))
    store = Stopped()
    try:
        ranks = Ranks(store, Unreached(), rank=1, num_ranks=4)
        with pytest.raises(RankError, match="rank 0 of 4, or the launcher of its host, does not answer: it is stopped"):
            ranks._meet_at(lambda group: group.wait_for_rank_0())
        assert ranks.told_at_end(b"", timedelta(seconds=0.1)) == {}
    finally:
        store.goes_on.set()


def test_a_rank_that_waits_for_long_says_what_may_be_the_matter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN a rank that waits in a barrier until the other has trained WHEN that one waits THEN it does so in words."""
    monkeypatch.setattr("memwall.session.ranks.agreement._PATIENCE", timedelta(seconds=0.1))
    _, missing = _met(distributed.HashStore(), 0, 2, timedelta(seconds=0.3))
    assert missing == [1]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        "rank 1 of 2 did not begin to train within 0 s, and waiting goes on for up to 0 s; ranks share"
    )
    assert "none may wait for another one to train first, in a barrier" in said


def test_what_one_rank_cannot_do_ends_the_run_on_all() -> None:
    def do(ranks: Ranks) -> Any:
        def apply() -> int:
            if ranks.rank == 1:
                raise OSError("no space left")
            return 7

        return ranks.done_by_all("apply the plan", apply)

    first, second = on_ranks(2, do)
    assert isinstance(second, OSError)
    assert str(first) == "rank 1 of 2 could not apply the plan, so no rank goes on: no space left"


def test_a_rank_that_has_failed_tells_the_others_where_they_begin_their_next_step() -> None:
    def do(ranks: Ranks) -> Any:
        return tell_of_failure(ranks) if ranks.rank == 0 else agreed_excess(ranks, 5)

    _, other = on_ranks(2, do)
    assert isinstance(other, RankError)
    assert str(other).startswith("rank 0 of 2 ended its run in the last step")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 8])
def test_gradients_are_those_of_one_process_with_the_whole_batch(
    num_ranks: int, dtype: torch.dtype, tolerance: float
) -> None:
    """GIVEN labels of which many are ignored, shared out unevenly, and parts of which the last one is short
    AND gradients that are averaged over ranks THEN any number of ranks has the gradient of one.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 9).to(dtype)
    inputs, labels = torch.randn(24, 6, dtype=dtype), torch.randint(9, (24,))
    labels[torch.rand(24) < 0.4] = -100
    labels[torch.linspace(0, 23, 9).long()] = 1  # so that each rank has one
    cross_entropy = nn.functional.cross_entropy
    expected = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
    bounds = [0, *(24 * (2 * rank + 2) // (2 * num_ranks + 1) for rank in range(num_ranks - 1)), 24]

    def gradients(ranks: Ranks) -> list[Tensor]:
        replica = copy.deepcopy(model)
        micro = MicroBatches()
        micro.divide_into(2)
        own = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        batch = {"inputs": inputs[own], "labels": labels[own]}
        for part in micro.split(batch, lambda one: int((one["labels"] != -100).sum()), total_of=ranks.terms_per_rank):
            if (part["labels"] != -100).any():
                micro.backward(cross_entropy(replica(part["inputs"]), part["labels"]))
        return [p.grad for p in replica.parameters() if p.grad is not None]

    by_rank = on_ranks(num_ranks, gradients)
    for ours, theirs in zip(zip(*by_rank, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(ours).mean(0), theirs, rtol=tolerance, atol=tolerance)


def test_a_rank_without_a_loss_term_is_an_error_on_all_ranks() -> None:
    """GIVEN a batch whose mean loss is not a number on one rank THEN none of them waits for it."""
    for error in on_ranks(3, lambda ranks: ranks.terms_per_rank(7 * (ranks.rank != 1))):
        assert str(error).startswith("1 of 3 ranks have a batch without a loss term")


def test_the_last_words_of_a_run_need_no_group() -> None:
    """GIVEN a group that is closed by then, and a rank that left no word THEN rank 0 hears those of the others."""

    def do(ranks: Ranks) -> Any:
        ranks.leave()
        return {} if ranks.rank == 2 else ranks.told_at_end(f"{ranks.rank}".encode(), timedelta(seconds=0.3))

    assert on_ranks(3, do) == [{0: b"0", 1: b"1"}, {}, {}]
