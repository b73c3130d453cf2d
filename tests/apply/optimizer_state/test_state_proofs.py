"""Optimizer state on disk proves itself: what comes back different from what left ends the run before it is used."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import PLACED, WIDTH, Model, train
from plans import plan_of

from memwall.errors import NotExactError
from memwall.session.session import Session
from memwall.store.buckets import Bucket

pytestmark = pytest.mark.usefixtures("one_thread")


def test_optimizer_state_that_comes_back_different_ends_the_run_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a bucket that gives tensors of one shape back under each other's keys, which no checksum sees."""
    finish = Bucket.finish_read

    def swapped(bucket: Bucket[Any], buffer: Any) -> None:
        finish(bucket, buffer)
        for holder in {id(piece.holder): piece.holder for piece in bucket._pieces}.values():
            holder["exp_avg"], holder["exp_avg_sq"] = holder["exp_avg_sq"], holder["exp_avg"]

    torch.manual_seed(0)
    model = Model()
    with Session(plan=plan_of(model, PLACED), disk=str(tmp_path)) as session:
        train(session, model, 1, torch.randn(16, WIDTH))
        weights = copy.deepcopy(model)
        monkeypatch.setattr(Bucket, "finish_read", swapped)
        optimizer = session._borders.optimizers[0]
        model(torch.randn(16, WIDTH)).square().mean().backward()
        with pytest.raises(NotExactError, match=r"moving optimizer state .* came back different from what left"):
            optimizer.step()
        pairs = zip(model.parameters(), weights.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs if one.dim() > 1), "those whose state was away"


def test_state_that_a_loop_has_replaced_is_not_taken_for_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    with Session(plan=plan_of(model, PLACED), disk=str(tmp_path)) as session:
        train(session, model, 1, torch.randn(16, WIDTH))
        optimizer = session._borders.optimizers[0]
        for parameter, state in optimizer.state.items():
            state["exp_avg"] = torch.zeros_like(parameter)
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
