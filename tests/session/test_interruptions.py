"""A session that closes under Ctrl-C or without memory brings back what is on disk before the script hears of it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from block_models import WIDTH, Model, train
from plans import plan_of

from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.errors import OutOfMemoryError
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.session.interruptions import interruptions_put_off
from memwall.session.session import Session
from memwall.store.buckets import DiskBucket
from memwall.store.workers import Transfer

PLACED = (
    ParameterPlacement(
        tier="disk", blocks=("blocks.0", "blocks.1"), window_bytes=1 << 16, min_bytes=1024, written_bytes=0
    ),
    OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=1 << 16, min_bytes=1024),
)


@pytest.fixture
def _sigint() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
def test_parameters_are_whole_after_two_interruptions_while_they_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = (Model() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    with Session(plan=plan_of(plain, *PLACED), disk=str(tmp_path)) as session:
        train(session, plain)
    give_up = ParameterTier.give_up
    num_given_up = 0

    def interrupted(tier: ParameterTier, member: object) -> None:
        nonlocal num_given_up
        num_given_up += 1
        if num_given_up in (1, 3):
            os.kill(os.getpid(), signal.SIGINT)
        give_up(tier, member)  # type: ignore[arg-type]

    monkeypatch.setattr(ParameterTier, "give_up", interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with Session(plan=plan_of(model, *PLACED), disk=str(tmp_path)) as session:
            train(session, model)
    assert num_given_up > 3
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert model(torch.ones(2, WIDTH)).isfinite().all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_sigint")
def test_one_who_insists_is_heard() -> None:
    done: list[int] = []

    def closes() -> None:
        with interruptions_put_off():
            for number in range(10):
                done.append(number)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        closes()
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("is_failed", [False, True], ids=["after training", "after a failure"])
def test_state_that_has_no_room_when_a_session_closes_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_failed: bool
) -> None:
    model, copies, tried = Model(), DiskBucket.copies, []

    def no_room_for_the_first(bucket: DiskBucket, device: torch.device | None = None) -> dict[int, torch.Tensor]:
        tried.append(bucket)
        if len(tried) == 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        return copies(bucket, device)

    expected, said = (ValueError, "the script's own") if is_failed else (OutOfMemoryError, "while the session closed")
    with (  # noqa: PT012 (the session's own end is what may raise)
        pytest.raises(expected, match=said) as caught,
        Session(plan=plan_of(model, *PLACED), disk=str(tmp_path)) as session,
    ):
        train(session, model)
        monkeypatch.setattr(DiskBucket, "copies", no_room_for_the_first)
        if is_failed:
            raise ValueError("the script's own")
    assert len(tried) > 1, "what there is room for comes back"
    told = caplog.text if is_failed else str(caught.value)
    assert "1.00 PiB could not be had" in told
    assert "load them from a checkpoint before they are used" in told


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast", "slow"])
def test_what_the_disk_has_not_written_yet_is_on_its_way_and_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """GIVEN writes that end only once they are waited for WHEN a step ends THEN its plan is not said to do nothing."""
    model = Model()
    if is_slow:
        monkeypatch.setattr(Transfer, "is_done", property(lambda self: False))
    placed = (msgspec.structs.replace(PLACED[0], window_bytes=1 << 17), PLACED[1])
    with Session(plan=plan_of(model, *placed), disk=str(tmp_path)) as session:
        train(session, model)
    assert session.failure is None
